"""The kernel's end of the debugger, used by two threads: the cell's and a background job's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nblaunch.launcher.debug_client import DebugClient
from nblaunch.wire.worker_commands import CommandConnection, Line, Prompted, Resumed, connect

STOP = ("train.py", 7, 1)
PROMPT = Prompted("-> breakpoint()", STOP)


class Ranks:
    """Two ranks that wait at the same breakpoint."""

    def __init__(self) -> None:
        pairs = [connect() for _ in range(2)]
        self.workers = [CommandConnection(fd) for _, fd in pairs]
        self.debugger = DebugClient({rank: kernel for rank, (kernel, _) in enumerate(pairs)})


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.workers.clear()  # closes the connections
    ranks.debugger.connections.clear()


def test_other_ranks_continue_if_the_end_arrives_first(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for worker in ranks.workers:
        worker.send(PROMPT)
    while len(ranks.debugger.prompts) < 2:
        ranks.debugger.receive_available(1.0)
    first = ranks.debugger.connections[0]
    send = first.send

    def send_and_receive(message: Any) -> None:
        """The worker is fast, and the other thread reads its answer at once."""
        send(message)
        ranks.workers[0].send(Resumed(""))
        ranks.debugger.receive_available(1.0)

    monkeypatch.setattr(first, "send", send_and_receive)
    ranks.debugger.send_line(0, "c")
    assert ranks.debugger.printed == {0: ""}
    assert ranks.debugger.prompts == {}
    assert ranks.workers[1].receive() == (Line(text="continue"), [])


def test_later_ranks_pass_the_breakpoint(ranks: Ranks) -> None:
    ranks.workers[0].send(PROMPT)
    ranks.debugger.receive_available(1.0)
    ranks.debugger.send_line(0, "c")
    ranks.workers[1].send(PROMPT)
    ranks.debugger.receive_available(1.0)
    assert ranks.debugger.prompts == {}
    assert ranks.workers[1].receive() == (Line(text="continue"), [])


@pytest.mark.parametrize("is_noticed_by", ["its connection", "the end of the job"])
def test_a_line_for_a_rank_that_has_ended_at_its_prompt_is_lost(ranks: Ranks, is_noticed_by: str) -> None:
    """The job's thread notices the end while the user still types."""
    ranks.workers[0].send(PROMPT)
    ranks.debugger.receive_available(1.0)
    if is_noticed_by == "its connection":
        del ranks.workers[0]  # closes the connection
        ranks.debugger.receive_available(1.0)
    else:
        ranks.debugger.close()
    ranks.debugger.send_line(0, "p step")
    assert ranks.debugger.wait_for_prompt(0) is None


def test_a_closed_client_waits_for_no_rank(ranks: Ranks) -> None:
    """The job has ended, but a process that a rank has left behind keeps the connection open."""
    ranks.debugger.close()
    assert ranks.debugger.wait_for_prompt(1) is None
