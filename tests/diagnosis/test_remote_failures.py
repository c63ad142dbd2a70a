"""Errors that this node raises for failures on other nodes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nblaunch.diagnosis.failure import Failure, failure_of
from nblaunch.diagnosis.report import AttemptReport, RemoteFailures
from nblaunch.errors import NodeLost, WorkerDied, WorkerFailed
from nblaunch.events import ExceptionInfo, ExitStatus, Failed, Returned
from nblaunch.launcher.joblog import JobLog

LABELS = {2: "node 1 (host beta)", 3: "node 1 (host beta)"}


def failed(
    rank: int, name: str = "ValueError", time_s: float = 1.0, *, is_consequence: bool = False
) -> Failed:
    return Failed(rank, time_s, info=ExceptionInfo(name, "wrong"), is_consequence=is_consequence)


def failure(remote: RemoteFailures, tmp_path: Path, here: Failed | None = None) -> Failure:
    """Return the failure of an attempt whose ranks 0 and 1 ran here and could not continue without the others."""
    first = here or failed(0, "RuntimeError", 5.0, is_consequence=True)
    report = AttemptReport(
        failed={first.rank: first},
        exits={rank: (ExitStatus(1), 6.0) for rank in range(2)},
        signalled={1: 5.5},
        remote=remote,
    )
    log = JobLog(str(tmp_path))
    log.end()
    return failure_of(report, {}, log, 0, ["attempt 0: it failed before"])


def test_remote_first_failure_explains_local_ones(tmp_path: Path) -> None:
    found = failure(
        RemoteFailures(LABELS, failed={3: failed(3, time_s=2.0), 2: failed(2, time_s=3.0)}), tmp_path
    )
    assert found.rank == 3
    assert found.sentence == "rank 3 raised ValueError: wrong (on node 1 (host beta))"
    assert type(found.error) is ValueError
    notes = "\n".join(getattr(found.error, "__notes__", []))
    assert "rank 3 on node 1 (host beta); its complete log is there" in notes
    assert "attempt 0: it failed before" in notes


def test_remote_data_is_not_unpickled(tmp_path: Path) -> None:
    """Only the text is used; classes that are not loaded here are not searched for."""
    there = failed(3, "somewhere.else.Odd", 2.0)
    found = failure(
        RemoteFailures(LABELS, failed={3: replace(there, exception=pickle.dumps(Witness()))}), tmp_path
    )
    assert isinstance(found.error, WorkerFailed)
    assert str(found.error).startswith("rank 3 raised somewhere.else.Odd: wrong\n")
    assert unpickled == []


unpickled: list[str] = []


class Witness:
    """An object that leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled.append, ("this ran",)


def test_a_remote_death_is_reported_with_its_signal(tmp_path: Path) -> None:
    found = failure(RemoteFailures(LABELS, exits={2: (ExitStatus(-9), 2.0)}), tmp_path)
    assert found.sentence == "rank 2 was killed by SIGKILL (on node 1 (host beta))"
    assert isinstance(found.error, WorkerDied)
    assert found.error.exitcode == -9


def test_a_lost_node_is_the_last_explanation(tmp_path: Path) -> None:
    why = "node 1 (host beta, ranks 2 and 3) has sent no heartbeat for 5 s"
    found = failure(RemoteFailures(LABELS, lost={2: why}), tmp_path)
    assert isinstance(found.error, NodeLost)
    assert str(found.error).startswith(why + ".\n")
    known = failure(RemoteFailures(LABELS, failed={3: failed(3)}, lost={2: why}), tmp_path)
    assert known.rank == 3


@pytest.mark.parametrize("left_s", [4.0, 5.5])
def test_remote_early_return_explains_local_failure(tmp_path: Path, left_s: float) -> None:
    found = failure(RemoteFailures(LABELS, returned={3: Returned(3, left_s)}), tmp_path)
    if left_s < 5.0:
        assert found.sentence.startswith("rank 3 returned from the function while rank 0 still needed it")
    else:
        assert found.rank == 0


def test_local_root_cause_comes_first(tmp_path: Path) -> None:
    remote = RemoteFailures(LABELS, failed={3: failed(3, time_s=0.5)}, lost={2: "node 1 is gone"})
    assert failure(remote, tmp_path, here=failed(0, "KeyError")).rank == 0
