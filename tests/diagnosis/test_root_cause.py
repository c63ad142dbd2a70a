"""The root cause of attempts that failed in every way."""

from __future__ import annotations

import re
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.diagnosis.root_cause import (
    RootCause,
    early_leavers,
    find_root_cause,
    others_in_one_line,
    what_happened,
    what_it_means,
)
from nblaunch.events import UNKNOWN_EXIT, ExceptionInfo, ExitStatus, Failed, Returned


def failed(rank: int, time_s: float, name: str = "ValueError", *, is_consequence: bool = False) -> Failed:
    return Failed(rank, time_s, info=ExceptionInfo(name, f"on rank {rank}"), is_consequence=is_consequence)


def report(
    *,
    returned: dict[int, float] | None = None,
    errors: tuple[Failed, ...] = (),
    exits: dict[int, tuple[int, float]] | None = None,
    signalled: dict[int, float] | None = None,
    left_by_exit: bool = False,
) -> AttemptReport:
    """Return a report in which every rank that sent an event has also exited."""
    made = AttemptReport(signalled=signalled or {})
    made.returned = {r: Returned(r, t, left_by_exit=left_by_exit) for r, t in (returned or {}).items()}
    made.failed = {error.rank: error for error in errors}
    made.exits = {rank: (ExitStatus(0), 99.0) for rank in made.returned}
    made.exits |= {rank: (ExitStatus(1), 99.0) for rank in made.failed}
    made.exits |= {rank: (ExitStatus(code), at) for rank, (code, at) in (exits or {}).items()}
    return made


def blamed(made: AttemptReport) -> RootCause:
    cause = find_root_cause(made)
    assert cause is not None
    return cause


def test_the_earliest_failure_is_the_root_cause() -> None:
    made = report(errors=(failed(0, 7.0), failed(2, 5.0), failed(1, 6.0)))
    assert blamed(made).rank == 2


def test_consequences_are_blamed_last() -> None:
    made = report(errors=(failed(0, 1.0, is_consequence=True), failed(1, 5.0)))
    assert blamed(made).rank == 1


def test_our_own_interrupt_is_not_a_cause() -> None:
    made = report(
        errors=(failed(0, 2.5, "KeyboardInterrupt"), failed(1, 2.0, is_consequence=True)), signalled={0: 2.4}
    )
    assert blamed(made).rank == 1


def test_a_silent_death_explains_consequences() -> None:
    made = report(
        errors=(failed(0, 3.0, is_consequence=True),), exits={1: (-9, 3.1)}, signalled={0: 3.2, 1: 3.2}
    )
    cause = blamed(made)
    assert (cause.rank, cause.status) == (1, ExitStatus(-9))


def test_ranks_killed_by_us_are_not_causes() -> None:
    made = report(errors=(failed(1, 2.0),), exits={0: (-9, 8.0), 2: (-15, 7.0)}, signalled={0: 2.3, 2: 2.3})
    assert blamed(made).rank == 1


def test_no_rank_is_blamed_if_the_launcher_killed_all() -> None:
    made = report(returned={0: 1.0}, exits={1: (-9, 8.0)}, signalled={1: 7.0})
    assert find_root_cause(made) is None


@pytest.mark.parametrize(
    ("by_exit", "words"), [(True, "called sys.exit(0)"), (False, "returned from the function")]
)
def test_a_rank_that_left_is_blamed_for_the_consequences(by_exit: bool, words: str) -> None:
    made = report(
        returned={1: 2.0, 3: 2.5},
        errors=(failed(0, 3.0, is_consequence=True), failed(2, 3.1, is_consequence=True)),
        left_by_exit=by_exit,
    )
    cause = blamed(made)
    assert (cause.rank, cause.left_early) == (1, True)
    assert (
        what_happened(cause, made) == f"{words} while ranks 0 and 2 still needed it in a collective operation"
    )
    assert "loop length" in what_it_means(cause)


@pytest.mark.parametrize(
    ("leaving", "sentence"),
    [
        ((), ""),
        ((0, 1, 2), ""),
        ((1,), "rank 1 called sys.exit(0) before the function returned; its value is None"),
        ((0, 2), "ranks 0 and 2 called sys.exit(0) before the function returned; their values are None"),
    ],
)
def test_early_exits_are_named(leaving: tuple[int, ...], sentence: str) -> None:
    made = AttemptReport()
    made.returned = {rank: Returned(rank, 1.0, left_by_exit=rank in leaving) for rank in range(3)}
    assert early_leavers(made) == sentence


def test_later_returns_are_not_blamed() -> None:
    made = report(returned={1: 9.0}, errors=(failed(0, 3.0, is_consequence=True),))
    assert (blamed(made).rank, blamed(made).left_early) == (0, False)


@pytest.mark.parametrize(
    ("code", "happened", "meaning"),
    [
        (-9, "was killed by SIGKILL", "OOM killer"),
        (-11, "was killed by SIGSEGV", "Native code"),
        (-7, "was killed by SIGBUS", "/dev/shm"),
        (-6, "was killed by SIGABRT", "last lines"),
        (-15, "was killed by SIGTERM", "max_restarts"),
        (-1, "was killed by SIGHUP", "Hangup"),
        (-12, "was killed by SIGUSR2", "User defined signal 2"),
        (-62, "was killed by signal 62", "complete log"),
        (0, "ended with exit code 0 before the function returned", "os._exit(0)"),
        (UNKNOWN_EXIT.code, "ended with an unknown exit status before the function returned", "waitpid(-1)"),
        (3, "ended with exit code 3 before the function returned", "sys.exit(3)"),
    ],
)
def test_exit_statuses_are_described(code: int, happened: str, meaning: str) -> None:
    cause = RootCause(1, status=ExitStatus(code))
    assert what_happened(cause, report(exits={1: (code, 1.0)})) == happened
    assert meaning in what_it_means(cause)


@pytest.mark.parametrize("code", [*(-number for number in signal.valid_signals()), 0, 1, 3])
def test_every_death_has_a_next_step(code: int) -> None:
    """The text says first what a death means, then what to do."""
    meaning, *steps = re.split(r"(?<=[.)]) (?=[A-Z])", what_it_means(RootCause(1, status=ExitStatus(code))))
    assert meaning
    assert steps, meaning


def test_other_failures_share_one_line() -> None:
    long = Failed(5, 4.0, info=ExceptionInfo("OSError", "x" * 200))
    made = report(
        returned={4: 1.0},
        errors=(
            failed(0, 3.0, is_consequence=True),
            failed(1, 2.0),
            failed(2, 3.0, is_consequence=True),
            long,
            failed(6, 9.0, "KeyboardInterrupt"),
        ),
        exits={3: (-15, 9.0), 7: (-11, 2.1)},
        signalled={3: 5.0, 6: 5.0},
    )
    line = others_in_one_line(made, RootCause(1))
    assert line.splitlines() == [line]
    others, rest = line.split("; ranks 3 and 6: ")
    assert others == "ranks 0 and 2: lost the connection to it"
    assert rest.startswith("stopped by the launcher; rank 4: finished; rank 5: OSError: xxx")
    assert rest.endswith("...; rank 7: killed by SIGSEGV")
    assert others_in_one_line(report(errors=(failed(1, 2.0),)), RootCause(1)) == ""


@given(
    st.lists(
        st.tuples(st.sampled_from(["own", "consequence", "death", "finished"]), st.floats(0, 10)),
        min_size=1,
        max_size=8,
    )
)
def test_the_earliest_of_the_worst_kind_is_blamed(fates: list[tuple[str, float]]) -> None:
    ranks = dict(enumerate(fates))
    made = report(
        returned={r: t for r, (kind, t) in ranks.items() if kind == "finished"},
        errors=tuple(
            failed(r, t, is_consequence=kind == "consequence")
            for r, (kind, t) in ranks.items()
            if kind in ("own", "consequence")
        ),
        exits={r: (-9, t) for r, (kind, t) in ranks.items() if kind == "death"},
    )
    cause = find_root_cause(made)
    primary = [t for kind, t in fates if kind in ("own", "death")]
    if primary:
        assert cause is not None
        assert fates[cause.rank][0] in ("own", "death")
        assert cause.time_s == min(primary)
    elif any(kind == "consequence" for kind, _ in fates):
        assert cause is not None
        assert cause.left_early == (fates[cause.rank][0] == "finished")
    else:
        assert cause is None
