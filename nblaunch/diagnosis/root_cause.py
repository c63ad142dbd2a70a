"""The root cause of a failed attempt: pure functions over an :class:`AttemptReport`."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from nblaunch import formatting
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.events import ExitStatus, Failed

# Signal -> its meaning, and what to do next.
_MEANINGS = {
    "SIGKILL": "It was killed from outside, usually by the system's OOM killer (see dmesg). Use less memory "
    "per rank (a smaller batch, fewer processes, the model passed as an argument), or a host "
    "with more.",
    "SIGSEGV": "Native code accessed invalid memory; on small hosts this can also mean that memory ran out. The "
    "process's Python stack names the library: update the library, or run the function with num_processes=1 to find "
    "the cause.",
    "SIGBUS": "A mapped file ended early; in containers, this is usually because /dev/shm is full. Enlarge it "
    "(docker run --shm-size=2g), or use fewer data loader workers (num_workers).",
    "SIGABRT": "Native code aborted. Its message is in the last lines or in the complete log; with "
    "NCCL_DEBUG=INFO in the environment, NCCL prints more.",
    "SIGTERM": "Another process ended it: a kill command, or a batch system or container that reached its "
    "time or memory limit. Raise that limit, or save checkpoints and launch with max_restarts=1.",
}

_UNKNOWN_STATUS = (
    "Other code in this process took the worker's exit status (os.wait, os.waitpid(-1), or SIGCHLD set to SIG_IGN "
    "while workers ran), so the signal or exit code is lost. Look in the complete log, and remove that code "
    "from the notebook."
)

SAME_COLLECTIVES = (
    "Every rank must take part in the same collectives: look for a branch, a loop length or a return that depends on "
    "the rank."
)
"""Advice for a rank that returned while others still needed it."""


@dataclass(frozen=True)
class RootCause:
    """The failure that explains the others.

    Args:
        rank: rank of the failure.
        failed: the exception, if there was one.
        status: exit status of the process, if it ended without an exception.
        left_early: the rank had returned or called ``sys.exit(0)`` while others still needed it.
        time_s: wall clock time.
    """

    rank: int
    failed: Failed | None = None
    status: ExitStatus | None = None
    left_early: bool = False
    time_s: float = 0.0


def find_root_cause(report: AttemptReport) -> RootCause | None:
    """Return the earliest failure that no other failure explains; if there is none, the earliest of all.

    Returns:
        None if every rank finished or was stopped by the launcher.
    """
    causes = own_failures(report)
    if causes:
        return min(causes, key=lambda cause: cause.time_s)
    errors = _errors(report)
    if not errors:
        return None
    leavers = [event for event in report.returned.values() if event.time_s <= min(e.time_s for e in errors)]
    if leavers:
        leaver = min(leavers, key=lambda event: event.time_s)
        return RootCause(leaver.rank, status=ExitStatus(0), left_early=True, time_s=leaver.time_s)
    return min(errors, key=lambda cause: cause.time_s)


def own_failures(report: AttemptReport) -> list[RootCause]:
    """Return the failures that were not caused by another rank or by the launcher."""
    deaths = [
        RootCause(rank, status=status, time_s=time_s)
        for rank, (status, time_s) in report.exits.items()
        if rank not in report.returned
        and rank not in report.failed
        and not _was_signalled_by_launcher(report, rank)
    ]
    return deaths + [error for error in _errors(report) if not _is_consequence(report, error)]


def _errors(report: AttemptReport) -> list[RootCause]:
    return [RootCause(rank, failed=failed, time_s=failed.time_s) for rank, failed in report.failed.items()]


def _was_signalled_by_launcher(report: AttemptReport, rank: int) -> bool:
    """Return whether a rank ended without an exception after the launcher sent it a signal."""
    return rank in report.signalled and report.signalled[rank] <= report.exits[rank][1]


def _is_consequence(report: AttemptReport, cause: RootCause) -> bool:
    """Return whether a failure is an error in a collective or a connection, or follows a signal from the launcher."""
    signalled_s = report.signalled.get(cause.rank)
    was_interrupted = signalled_s is not None and cause.time_s >= signalled_s
    return cause.failed is not None and (cause.failed.is_consequence or was_interrupted)


def what_happened(cause: RootCause, report: AttemptReport) -> str:
    """Return how a rank ended, as a phrase that completes a sentence: ``was killed by SIGSEGV``."""
    if cause.left_early:
        waiting = formatting.ranks(report.failed)
        return f"{report.ways_left[cause.rank]} while {waiting} still needed it in a collective operation"
    return how_died(cause.status or ExitStatus(0), is_script=report.is_script)


def how_died(status: ExitStatus, *, is_script: bool) -> str:
    """Return how a process ended without an exception: ``ended with exit code 3 before the function returned``."""
    is_early = status.code >= 0 and not is_script
    return how_ended(status) + (" before the function returned" if is_early else "")


def how_ended(status: ExitStatus) -> str:
    """Return how a process ended: ``was killed by SIGSEGV``, ``ended with exit code 3``."""
    if status.server_pid:
        server_end = how_ended(ExitStatus(status.code))
        return f"ended with its forkserver (pid {status.server_pid}), which {server_end}"
    return f"was killed by {status.signal_name}" if status.signal_name else f"ended with {status}"


def early_leavers(report: AttemptReport) -> str:
    """Return a sentence about ranks that called ``sys.exit(0)`` while others returned; empty if none or all did so.

    If a function ends with ``sys.exit(main())``, all ranks call it. In a script, a rank may exit at any time.
    """
    if report.is_script:
        return ""
    leavers = [rank for rank, event in report.returned.items() if event.left_by_exit]
    if len(leavers) in (0, len(report.returned)):
        return ""
    nothing = "its value is" if len(leavers) == 1 else "their values are"
    return f"{formatting.ranks(leavers)} called sys.exit(0) before the function returned; {nothing} None"


def what_it_means(cause: RootCause, *, is_script: bool = False) -> str:
    """Return what the cause means and what to do next; empty if a script chose its exit code."""
    status = cause.status or ExitStatus(0)
    if cause.left_early:
        return SAME_COLLECTIVES
    if status.signal_name:
        text = signal.strsignal(-status.code) or "an unknown signal"
        other = f"{text}. Look for earlier messages in the complete log, and for a process that sends this signal."
        return _MEANINGS.get(status.signal_name, other)
    if not status.is_known:
        return _UNKNOWN_STATUS
    if is_script:
        return ""
    return (
        f"Something called sys.exit({status.code}) or os._exit({status.code}). Raise an exception instead, "
        "so that its traceback appears here."
    )


def others_in_one_line(report: AttemptReport, root: RootCause) -> str:
    """Return how the other ranks ended, in one line: ``ranks 0 and 2: ...; rank 3: ...``; empty if there are none."""
    outcomes = {rank: _outcome(report, rank) for rank in report.exits if rank != root.rank}
    grouped = formatting.ranks_by_text(outcomes)
    return "; ".join(f"{formatting.ranks(ranks)}: {outcome}" for outcome, ranks in grouped.items())


def _outcome(report: AttemptReport, rank: int) -> str:
    if rank in report.returned:
        return "finished"
    if rank in report.failed and not (
        rank in report.signalled and report.failed[rank].time_s >= report.signalled[rank]
    ):
        if report.failed[rank].is_consequence:
            return "lost the connection to it"
        info = report.failed[rank].info
        lines = info.message.strip().splitlines()
        name = info.type_name.rpartition(".")[2]
        text = f"{name}: {lines[0].rstrip(':')}" if lines else name
        return text if len(text) <= 100 else text[:97] + "..."
    if rank in report.signalled:
        return "stopped by the launcher"
    return str(report.exits[rank][0])
