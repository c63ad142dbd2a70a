"""Failures that collectives explain: a backend's error or abort, or a rank that returns while others wait."""

from __future__ import annotations

import re

from nblaunch import formatting
from nblaunch.diagnosis.disagreements import Explanation, place
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.diagnosis.root_cause import RootCause, own_failures
from nblaunch.diagnosis.stalls import Standing, explain_stall
from nblaunch.errors import DistributedOperationException

_COLLECTIVE_FILES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/torch/autograd/graph.py")
"""Files that raise an exception when a collective fails."""

_PASSED = re.compile(r"^  rank (\d+): (.*)$", re.MULTILINE)
"""The value that a rank passed, in the message of ``training/collectives/operations.py``."""


def explain_failure(report: AttemptReport, root: RootCause | None) -> Explanation | None:
    """Return which calls differ, or which rank arrived alone; None if another failure explains the end.

    Args:
        report: facts of the attempt.
        root: its root cause, judged only by signals and exceptions.
    """
    if report.disagreement is not None:
        has_own = any(not _may_come_from_collective(cause) for cause in own_failures(report))
        return None if has_own else report.disagreement
    if root is None or not _may_come_from_collective(root):
        return None
    readings = {reading.rank: reading.step for reading in report.last_readings}
    return explain_stall(Standing(report.calls, report.returned.keys(), steps=readings))


def explain_rejection(report: AttemptReport, root: RootCause) -> Explanation | None:
    """Return which ranks passed different values to a collective that nblaunch rejected; None for other failures."""
    if root.failed is None or not root.failed.info.type_name.endswith(DistributedOperationException.__name__):
        return None
    passed = {int(rank): text for rank, text in _PASSED.findall(root.failed.info.message)}
    named = {rank: report.calls[rank].last for rank in passed if rank in report.calls}
    texts = {
        rank: f"{call.site.name or call.site.kind} of {passed[rank]} ({place(call)})"
        for rank, call in named.items()
        if call is not None
    }
    grouped = formatting.ranks_by_text(passed)
    if len(grouped) < 2 or texts.keys() != passed.keys():
        return None
    largest = max(grouped.values(), key=len)
    faulty = tuple(sorted(set(passed) - set(largest))) if 2 * len(largest) > len(passed) else ()
    sides = sorted(formatting.ranks_by_text(texts).items(), key=lambda side: not set(side[1]) <= set(faulty))
    return Explanation("; ".join(f"{formatting.ranks(ranks)} {text}" for text, ranks in sides), faulty)


def _may_come_from_collective(cause: RootCause) -> bool:
    """Return whether a collective may have caused a failure: an error, an abort, a return while others wait."""
    if cause.left_early:
        return True
    if cause.failed is None:
        return cause.status is not None and cause.status.signal_name == "SIGABRT"
    if cause.failed.is_consequence:
        return True
    frames = cause.failed.info.frames
    return bool(frames) and any(part in frames[-1].filename for part in _COLLECTIVE_FILES)
