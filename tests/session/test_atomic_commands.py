"""An interrupt at any line of a session's start or commands is raised, and no worker is left, or none is busy."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

import psutil
import pytest

from nblaunch import Session
from tests.left_behind import Snapshot
from tests.signals_at_lines import with_signal_at_line
from tests.thorough import thorough

STRIDE = 23
"""Lines between two tested lines; a prime, because otherwise the same lines of a loop would be hit."""

SAMPLED = 4
"""Of so many of these lines, one is tested without ``--thorough``: another one in each run."""


def numbers(sampled: int, stride: int = STRIDE) -> range:
    """Return the numbers of lines to test."""
    return range(1 + stride * random.randrange(sampled), 10_000, stride * sampled)


def children() -> frozenset[psutil.Process]:
    return Snapshot.take().processes


def next_number(number: int) -> int:
    """Return the next number, in a worker."""
    return number + 1


COMMANDS: dict[str, Callable[[Session], object]] = {
    "execute": lambda session: session.execute("1 + 1"),
    "put": lambda session: session.put(x=1),
    "run": lambda session: session.run(next_number, (1,), dashboard="none"),
}


pytestmark = pytest.mark.usefixtures("first_store")


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("sampled", [SAMPLED, thorough(1)])
def test_an_interrupt_at_any_line_of_a_command_leaves_the_session_free(name: str, sampled: int) -> None:
    with Session(2, backend="cpu") as session:
        COMMANDS[name](session)
        for number in numbers(sampled):
            place, error = with_signal_at_line(number, signal.SIGINT, lambda: COMMANDS[name](session))
            if not place:
                break
            assert type(error) is KeyboardInterrupt, (place, error)
            assert session.execute("2") == {0: 2, 1: 2}, place
        assert number > 100, "few lines have run"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_a_session_is_garbage_collected_leaves_no_worker() -> None:
    """Python ignores an exception that a handler raises in a finalizer."""
    for number in range(1, 100):
        sessions = [Session(2, backend="cpu")]
        workers = [psutil.Process(pid) for pid in sessions[0].pids.values()]
        place, _ = with_signal_at_line(number, signal.SIGINT, sessions.clear, folder="")
        _, alive = psutil.wait_procs(workers, 30)
        assert not alive, place
        if not place:
            break


@pytest.mark.parametrize("sampled", [SAMPLED, thorough(1)])
def test_an_interrupt_at_any_line_of_close_ends_the_workers(sampled: int) -> None:
    Session(2, backend="cpu").close()
    before = children()
    for number in numbers(sampled, STRIDE // 2):
        session = Session(2, backend="cpu")
        place, error = with_signal_at_line(number, signal.SIGINT, session.close)
        if not place:
            break
        assert type(error) is KeyboardInterrupt, (place, error)
        session.close()  # has no further effect
        assert children() == before, place
    assert number > 50, "few lines have run"


@pytest.mark.parametrize("sampled", [SAMPLED, thorough(1)])
def test_an_interrupt_at_any_line_of_the_start_leaves_no_worker(sampled: int) -> None:
    Session(2, backend="cpu").close()
    before = children()
    made: list[Session] = []
    for number in numbers(sampled, 2 * STRIDE):
        place, error = with_signal_at_line(
            number, signal.SIGINT, lambda: made.append(Session(2, backend="cpu"))
        )
        if not place:
            break
        assert type(error) is KeyboardInterrupt, (place, error)
        assert (made, children()) == ([], before), place
    made.pop().close()
    assert number > 500, "few lines have run"
