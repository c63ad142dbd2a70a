"""The exception that the kernel raises for a failed attempt: the root cause with its evidence."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nblaunch import formatting
from nblaunch.diagnosis import memory, stacks
from nblaunch.diagnosis.disagreements import Explanation, place, sides_in_words
from nblaunch.diagnosis.exceptions import annotate, rebuild
from nblaunch.diagnosis.report import AttemptReport, Hang, how_left
from nblaunch.diagnosis.root_cause import (
    SAME_COLLECTIVES,
    RootCause,
    find_root_cause,
    how_died,
    others_in_one_line,
    own_failures,
    what_happened,
    what_it_means,
)
from nblaunch.diagnosis.stalls import Standing, explain_stall
from nblaunch.errors import CollectiveMismatch, DistributedOperationException, JobHung, NodeLost, WorkerDied
from nblaunch.events import ExitStatus, Failed
from nblaunch.host import files

_LAST_LINES = 5
_LINE = 200  # characters
# C++ code that aborts, such as NCCL's watchdog or libtpu, prints the cause on one line and the stack frames on many.
_NATIVE_FRAME = re.compile(r"\s*frame #\d+: |\s+@\s+0x[0-9a-f]+ |\*\*\* Check failure stack trace: ")
_NATIVE_ERROR = re.compile(r"\s*what\(\): |F\d{4} ")
_NATIVE_LINE = 600
_LAST_BYTES = 1 << 16
_OPENMP_ABORT = "fork() called from a process already using GNU OpenMP"
_CLOSED_DESCRIPTORS = ("nfds != -1", "[Errno 9] Bad file descriptor")  # messages of gloo and of Python
_HEADLINE = 500  # characters
_LOOK_THERE = (
    "Check the launcher's output there and the network between the machines; with --max_restarts, the job starts "
    "again once the node is back."
)
_KILLING_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGBUS")

_COLLECTIVE_FILES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/torch/autograd/graph.py",
    "/nblaunch/training/collectives/",
)
"""Files and folders whose code raises an exception when a collective fails or gets mismatched data."""

_OF_ARGUMENTS = ("AttributeError", "KeyError", "PicklingError", "TypeError", "ValueError")

_PASSED = re.compile(r"^  rank (\d+): (.*)$", re.MULTILINE)
"""The value that a rank passed, as shown in an error message from ``training/collectives/operations.py``."""


class Logs(Protocol):
    """The log files of a job, by rank and attempt."""

    def attempt_path(self, attempt: int) -> Path:
        """Return the folder of an attempt."""

    def log_path(self, rank: int, attempt: int) -> Path:
        """Return the file with a rank's output."""

    def read(self, rank: int, attempt: int, max_bytes: int | None = None) -> str:
        """Return a rank's output, or its last ``max_bytes``."""

    def read_stacks(self, rank: int, attempt: int) -> str:
        """Return the stacks that a rank wrote when it crashed."""


@dataclass(frozen=True)
class Failure:
    """An exception to raise, with the rank of the failure and a headline (``ValueError: ...``).

    ``rank`` is None if several ranks are at fault or the rank is unknown. ``advice`` explains the failure and says what
    to do, if more is known than the exception shows.
    """

    error: BaseException
    rank: int | None
    headline: str
    advice: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """``rank 3 raised ValueError: no such file``."""
        if isinstance(self.error, (JobHung, CollectiveMismatch)):
            return str(self.error).partition("\n")[0]
        verb = "" if isinstance(self.error, WorkerDied) else "raised "
        return f"rank {self.rank} {verb}{self.headline}"


def failure_of(
    report: AttemptReport,
    pids: Mapping[int, int],
    logs: Logs,
    attempt: int,
    past: Sequence[str] = (),
) -> Failure:
    """Return the failure of an attempt that did not succeed.

    Args:
        report: facts of the attempt.
        pids: rank -> process id.
        logs: log files of the job.
        attempt: number of the attempt, counted from 0.
        past: one line for each earlier attempt that failed.
    """
    if report.hang:
        return _hung(report, report.hang, logs.attempt_path(attempt))
    of_node = "" if report.places else " of this node"
    remote = _remote_explanation(report, [f"logs{of_node}: {logs.attempt_path(attempt)}", *past])
    if remote is not None:
        return remote
    root = find_root_cause(report)
    mismatch = _explain_failure(report, root, _own_aborts(report, logs, attempt))
    if mismatch is not None and not (root is not None and root.left_early and _left(mismatch, report)):
        return _mismatched(report, mismatch, root, [*past, f"complete logs: {logs.attempt_path(attempt)}"])
    if root is None:  # ranks that the launcher stopped did not end in time
        rank = min(rank for rank in report.exits if rank not in report.returned)
        root = RootCause(rank, status=report.exits[rank][0])
    pid = pids.get(root.rank)
    printed = logs.read(root.rank, attempt, _LAST_BYTES)
    evidence = (
        _device_evidence(root)
        or memory_evidence(report, root)
        or _openmp_evidence(printed)
        or _descriptor_evidence(root, printed)
    )
    notes = [*_notes(report, root, pid, logs, attempt), *past]
    if root.failed is not None:
        return _raised(report, root, root.failed, evidence, notes)
    if mismatch is not None:
        explanation = [f"{mismatch.headline}.", mismatch.advice]
    else:
        meaning = "" if evidence else what_it_means(root, is_script=report.is_script)
        explanation = [meaning] if meaning else []
    advice = [*explanation, *evidence, *shm_evidence(report, root)]
    traces = _last_lines(printed, logs.log_path(root.rank, attempt)) + _crash_stack(logs, root.rank, attempt)
    return _died(root, pid, what_happened(root, report), advice, [*traces, *notes])


def _raised(
    report: AttemptReport, root: RootCause, failed: Failed, evidence: Sequence[str], notes: Sequence[str]
) -> Failure:
    """Return the failure of a rank that raised an exception.

    If nblaunch raised it because ranks passed different values to a collective, a comparison names the ranks at fault.
    """
    headline = (
        f"{failed.info.type_name}: {failed.info.message[:_HEADLINE]}".strip().splitlines()[0].rstrip(":")
    )
    rank: int | None = root.rank
    advice = list(evidence)
    compared = _explain_rejection(report, root)
    if compared is not None:
        # The exception says what the ranks passed, but not where; the headline shows only its first line.
        rank = compared.ranks[0] if len(compared.ranks) == 1 else None
        places = {place(call) for calls in report.calls.values() if (call := calls.last) is not None}
        advice = [f"{compared.headline}.", *evidence]
        evidence = advice if len(places) > 1 else evidence
    error = rebuild(failed)
    annotate(error, failed.info, [*evidence, *notes])
    return Failure(error, rank, headline, tuple(advice))


def _died(
    root: RootCause, pid: int | None, headline: str, advice: Sequence[str], notes: Sequence[str]
) -> Failure:
    """Return the failure of a rank whose process ended without an exception."""
    who = f"rank {root.rank}" + (f" (pid {pid})" if pid else "")
    text = "\n".join([f"{who} {headline}.", *advice, *notes])
    error = WorkerDied(text, rank=root.rank, exitcode=_exit_code(root.status))
    return Failure(error, root.rank, headline, tuple(advice))


def _remote_explanation(report: AttemptReport, notes: Sequence[str]) -> Failure | None:
    """Return the failure on another node that explains the failures of this node, or None."""
    if own_failures(report):
        return None
    explanation = _explain_remote(report, notes)
    if explanation is None and report.failed:
        first = min(report.failed.values(), key=lambda failed: failed.time_s)
        explanation = _left_early(report, first.time_s, f"rank {first.rank}", notes)
    return explanation


def _explain_remote(report: AttemptReport, notes: Sequence[str]) -> Failure | None:
    """Return the first failure on another node, with ``notes``; None if there is none."""
    remote = report.remote
    times = {rank: failed.time_s for rank, failed in remote.failed.items()}
    times |= {rank: time_s for rank, (_, time_s) in remote.exits.items()}
    if times:
        rank = min(times, key=lambda rank: times[rank])
        label = remote.labels[rank]
        if rank in remote.failed:
            return _raised_remotely(remote.failed[rank], label, notes)
        return _died_remotely(report, rank, notes)
    for rank, why in remote.lost.items():
        advice = remote.advice or _LOOK_THERE
        error = NodeLost("\n".join([f"{why}.", advice, *notes]), rank=rank, exitcode=1)
        return Failure(error, rank, f"was lost: {why}")
    return None


def _exit_code(status: ExitStatus | None) -> int:
    """Return the exit code for the error of a dead worker; 1 if it is unknown."""
    if status is None:
        return 0
    return status.code if status.is_known else 1


def _left_early(
    report: AttemptReport, first_error_s: float, waiting: str, notes: Sequence[str]
) -> Failure | None:
    """Return the rank on another node whose early return made ranks on this node fail."""
    remote = report.remote
    for rank, returned in sorted(remote.returned.items()):
        if returned.time_s <= first_error_s:
            left = how_left(returned, is_script=report.is_script)
            headline = f"{left} while {waiting} still needed it in a collective operation"
            text = f"rank {rank} on {remote.labels[rank]} {headline}. {SAME_COLLECTIVES}"
            error = WorkerDied("\n".join([text, *notes]), rank=rank, exitcode=0)
            return Failure(error, rank, headline)
    return None


def _raised_remotely(failed: Failed, label: str, notes: Sequence[str]) -> Failure:
    lines = f"{failed.info.type_name}: {failed.info.message}".strip().splitlines()
    note = f"rank {failed.rank} on {label}; its complete log is there"
    error = rebuild(failed, is_remote=True)
    annotate(error, failed.info, [note, *notes])
    return Failure(error, failed.rank, f"{lines[0]} (on {label})")


def _died_remotely(report: AttemptReport, rank: int, notes: Sequence[str]) -> Failure:
    status, _ = report.remote.exits[rank]
    headline = f"{how_died(status, is_script=report.is_script)} (on {report.remote.labels[rank]})"
    meaning = what_it_means(RootCause(rank, status=status), is_script=report.is_script)
    sentences = [f"rank {rank} {headline}.", meaning, "Its last lines and complete log are on that machine."]
    text = " ".join(filter(None, sentences))
    return Failure(
        WorkerDied("\n".join([text, *notes]), rank=rank, exitcode=_exit_code(status)), rank, headline
    )


def _left(mismatch: Explanation, report: AttemptReport) -> bool:
    """Return whether the fault of the ranks at fault is that they have returned, not that their calls differ."""
    return (
        report.disagreement is None and bool(mismatch.ranks) and set(mismatch.ranks) <= report.returned.keys()
    )


def _mismatched(
    report: AttemptReport, mismatch: Explanation, root: RootCause | None, notes: Sequence[str]
) -> Failure:
    """Return the failure of ranks whose collectives differ, with the error that they caused as its ``__cause__``."""
    ended = {rank: str(report.exits[rank][0]) for rank in _aborted(report)}
    how = [
        f"{formatting.ranks(ranks)}: {text}, because torch's backend ends a process whose tensors do not match"
        for text, ranks in formatting.ranks_by_text(ended).items()
    ]
    error = CollectiveMismatch("\n".join([f"{mismatch.text}", *how, *notes]), ranks=mismatch.ranks)
    if root is not None and root.failed is not None:
        error.__cause__ = rebuild(root.failed)
    return _failure_of_ranks(error, mismatch.ranks, mismatch.headline)


def _hung(report: AttemptReport, hang: Hang, folder: Path) -> Failure:
    stopped = "no rank made progress, so the job was stopped:"
    lines = [f"{hang.headline}; {stopped}" if hang.ranks or hang.is_explained else stopped, *hang.lines]
    lines += [hang.advice] if hang.advice else []
    lines += [*report.unkillable.values(), f"complete logs: {folder}"]
    advice = (hang.advice,) if hang.advice else ()
    return _failure_of_ranks(JobHung("\n".join(lines), ranks=hang.ranks), hang.ranks, hang.headline, advice)


def _failure_of_ranks(
    error: BaseException, ranks: Sequence[int], headline: str, advice: tuple[str, ...] = ()
) -> Failure:
    """Return the failure of several ranks; ``headline`` is a sentence that begins with these ranks."""
    if len(ranks) != 1:
        return Failure(error, None, headline, advice)
    return Failure(error, ranks[0], headline.removeprefix(f"rank {ranks[0]} "), advice)


def _device_evidence(root: RootCause) -> list[str]:
    """Return evidence from the worker's device, for example that its memory ran out."""
    if root.failed is None or not root.failed.evidence:
        return []
    first, *others = root.failed.evidence
    return [f"rank {root.rank}: {first}", *others]


def memory_evidence(report: AttemptReport, root: RootCause) -> list[str]:
    """Return evidence that memory caused the failure, as lines; empty if there is none."""
    record = report.memory
    if root.left_early:
        return []
    if record is None:
        return list(report.evidence[root.rank].memory) if root.rank in report.evidence else []
    return memory.judge(
        record,
        {rank: sample.peak_bytes for rank, sample in report.host_memory.items()},
        report.last_readings,
        is_killed=root.status is not None and root.status.signal_name in _KILLING_SIGNALS,
        message=f"{root.failed.info.type_name}: {root.failed.info.message}" if root.failed else "",
    )


def shm_evidence(report: AttemptReport, root: RootCause) -> list[str]:
    """Return evidence that /dev/shm is full, in which case SIGBUS kills the next process that writes to it."""
    if root.rank in report.places:
        return list(report.evidence[root.rank].shm) if root.rank in report.evidence else []
    if root.status is None or root.status.signal_name != "SIGBUS":
        return []
    line = memory.shm_line(memory.read_facts())
    return [line] if line else []


def _notes(report: AttemptReport, root: RootCause, pid: int | None, logs: Logs, attempt: int) -> list[str]:
    place = report.places.get(root.rank, socket.gethostname())
    where = f"rank {root.rank}" + (f" (pid {pid})" if pid else "") + f" on {place}"
    lines = [f"{where}; complete log: {logs.log_path(root.rank, attempt)}"]
    others = others_in_one_line(report, root)
    return [*lines, *([others] if others else []), *report.unkillable.values()]


def _last_lines(printed: str, path: Path) -> list[str]:
    lines = [line for line in printed.splitlines() if line.strip() and not _NATIVE_FRAME.match(line)]
    shown = [line[: _NATIVE_LINE if _NATIVE_ERROR.match(line) else _LINE] for line in lines[-_LAST_LINES:]]
    problem = files.growth_problem(path, _LINE)
    lost = [f"Its last output may be missing: {problem}."] if problem else []
    return (["Its last lines:", *(f"    {line}" for line in shown)] if shown else []) + lost


def _openmp_evidence(printed: str) -> list[str]:
    """Return why GNU OpenMP ended a forked worker, if the worker's last lines show it."""
    if _OPENMP_ABORT not in printed:
        return []
    return [
        "GNU OpenMP, which numba's parallel functions use, ran threads in the kernel before the fork, and "
        "does not run in the worker. Launch with start_method='forkserver'."
    ]


def _descriptor_evidence(root: RootCause, printed: str) -> list[str]:
    """Return a sentence about closed descriptors, if the last lines of a dead rank show that they caused its death."""
    if root.failed is not None or not any(text in printed for text in _CLOSED_DESCRIPTORS):
        return []
    return [
        "Descriptors that its libraries or nblaunch need were closed: look for os.closerange() and os.close() in the "
        "function, and close only what the function has opened."
    ]


def _crash_stack(logs: Logs, rank: int, attempt: int) -> list[str]:
    """Return the user's innermost frames, as faulthandler wrote them during the crash."""
    lines = stacks.describe(_crash_frames(logs, rank, attempt)[:_LAST_LINES])
    return ["Its Python stack, innermost first:", *(f"    {line}" for line in lines)] if lines else []


def _crash_frames(logs: Logs, rank: int, attempt: int) -> Sequence[stacks.StackFrame]:
    """Return the frames of the thread that crashed, innermost first; empty if they are unknown."""
    _, crash, text = logs.read_stacks(rank, attempt).rpartition("Fatal Python error")
    threads = [thread for thread in stacks.parse(text) if thread.is_current] if crash else []
    return threads[0].frames if threads else ()


# --- failures that collectives explain: an error or abort of a backend, or a rank that returns while others wait ------


def _explain_failure(
    report: AttemptReport, root: RootCause | None, own_aborts: Collection[int]
) -> Explanation | None:
    """Return which calls differ, or which rank arrived alone; None if another failure explains why the job ended.

    Args:
        report: facts of the attempt.
        root: its root cause, judged only by signals and exceptions.
        own_aborts: ranks that were aborted by their own code, not by a backend.
    """
    causes = own_failures(report) if report.disagreement is not None else [root] if root is not None else []
    if any(cause.rank in own_aborts or not _may_come_from_collective(cause) for cause in causes):
        return None
    if report.disagreement is not None or root is None or _is_of_arguments(root):
        return report.disagreement
    readings = {reading.rank: reading.step for reading in report.last_readings}
    standing = Standing(report.calls, report.ways_left, steps=readings, aborted=_aborted(report))
    return explain_stall(standing)


def _aborted(report: AttemptReport) -> list[int]:
    return [rank for rank, (status, _) in report.exits.items() if status.signal_name == "SIGABRT"]


def _own_aborts(report: AttemptReport, logs: Logs, attempt: int) -> list[int]:
    """Return the ranks that were aborted in a call from Python code; a backend aborts in its own threads."""
    return [rank for rank in _aborted(report) if _aborts_in_own_code(_crash_frames(logs, rank, attempt))]


def _aborts_in_own_code(frames: Sequence[stacks.StackFrame]) -> bool:
    return bool(frames) and not any(part in frame.filename for part in _COLLECTIVE_FILES for frame in frames)


def _explain_rejection(report: AttemptReport, root: RootCause) -> Explanation | None:
    """Return which ranks passed different values to a collective that nblaunch rejected; None for other failures."""
    if root.failed is None or not _is_rejection(root):
        return None
    passed = {int(rank): text for rank, text in _PASSED.findall(root.failed.info.message)}
    named = {
        rank: call
        for rank in passed.keys() & report.calls.keys()
        if (call := report.calls[rank].last) is not None
    }
    if len(set(passed.values())) < 2 or named.keys() != passed.keys():
        return None
    texts = {rank: f"{call.site.name or call.site.kind} of {passed[rank]}" for rank, call in named.items()}
    return Explanation(*sides_in_words(texts, named))


def _is_rejection(cause: RootCause) -> bool:
    """Return whether nblaunch raised the exception because ranks passed different data to a collective."""
    name = DistributedOperationException.__name__
    return cause.failed is not None and cause.failed.info.type_name.endswith(name)


def _is_of_arguments(cause: RootCause) -> bool:
    """Return whether a rank could not start a collective, for example because an object can't be pickled."""
    return cause.failed is not None and cause.failed.info.type_name.rpartition(".")[2] in _OF_ARGUMENTS


def _may_come_from_collective(cause: RootCause) -> bool:
    """Return whether a collective can fail like this: with an error, an abort, or a return while other ranks wait."""
    if cause.left_early:
        return True
    if cause.failed is None:
        return cause.status is not None and cause.status.signal_name == "SIGABRT"
    if cause.failed.is_consequence:
        return True
    if _is_rejection(cause):
        return False
    inner = itertools.takewhile(lambda frame: not frame.is_user, reversed(cause.failed.info.frames))
    return any(part in frame.filename for frame in inner for part in _COLLECTIVE_FILES)
