"""The weights of an interrupted job: the weights of its last optimizer step, or the reason why they are lost.

Each interrupted rank reports its last step and sends its modules (:class:`nblaunch.events.Interrupted`). If every rank
holds the whole model, the first rank of this machine is enough. Shards fit together only if all ranks were at the same
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.diagnosis.root_cause import how_ended
from nblaunch.events import WorkerState
from nblaunch.launcher.attempt import Attempt
from nblaunch.launcher.weights import listed
from nblaunch.weights.sharded import TensorShard
from nblaunch.wire.outbox import RankResult

_ADVICE = (
    "To keep them, catch the KeyboardInterrupt in the function and return, or save checkpoints with "
    "accelerator.save_state()"
)


def describe_loss(attempt: Attempt, report: AttemptReport, rank_results: Mapping[int, RankResult]) -> str:
    """Return a sentence that says why the weights of an interrupted job are lost; empty if they are not lost."""
    first = attempt.ranks[0]
    ranks = attempt.ranks if _are_shards(rank_results.get(first)) else [first]
    reason = next(filter(None, (_reason_of(report, rank) for rank in ranks)), "")
    if not reason and len(steps := _steps(report, ranks)) > 1:
        reason = f"ranks hold shards of them, and stopped after different steps ({', '.join(steps)})"
    if not reason or not all(_has_begun(report, rank) for rank in ranks):
        return ""
    named = listed(attempt.plan.modules, list(attempt.plan.modules))
    return f"interrupted: the changes that workers made to {named} are lost: {reason}. {_ADVICE}"


def can_load(attempt: Attempt, report: AttemptReport) -> bool:
    """Return whether the first rank of this machine sends its states."""
    return attempt.ranks[0] in report.announced


def _steps(report: AttemptReport, ranks: Sequence[int]) -> list[str]:
    steps = {report.interruptions[rank].step for rank in ranks if rank in report.interruptions}
    return [f"{step:,}" for step in sorted(steps)]


def described(attempt: Attempt, report: AttemptReport) -> tuple[str, str]:
    """Return where the job was interrupted, and which weights it sent."""
    event = report.interruptions.get(attempt.ranks[0])
    if event is None:
        return "interrupted after the function had returned on the first rank", "trained weights"
    if event.step == 0:
        return "interrupted before the first optimizer step", "the weights of that moment"
    return f"interrupted after optimizer step {event.step:,}", "the weights of that step"


def _are_shards(result: RankResult | None) -> bool:
    states = result.states.values() if result is not None else ()
    return any(isinstance(value, TensorShard) for state in states for value in state.values())


def _has_begun(report: AttemptReport, rank: int) -> bool:
    """Return whether the function of a rank had begun when the interrupt arrived."""
    if rank in report.announced:
        return True
    failed = report.failed.get(rank)
    if failed is not None:  # a KeyboardInterrupt of the function itself is announced
        return failed.info.type_name != KeyboardInterrupt.__name__
    states = {reading.rank: reading.state for reading in report.last_readings}
    return states.get(rank) is not WorkerState.STARTING


def _reason_of(report: AttemptReport, rank: int) -> str:
    """Return why a rank has not sent its states; empty if it has."""
    event = report.interruptions.get(rank)
    if rank in report.returned or (event is not None and not event.is_cut):
        return ""
    if event is not None:
        step = f"optimizer step {event.step + 1:,}"
        return f"rank {rank} was interrupted in {step}, which did not end in time"
    failed = report.failed.get(rank)
    if failed is not None:
        return f"rank {rank} raised {failed.info.type_name} when it was interrupted"
    status, _ = report.exits[rank]
    return f"rank {rank} {how_ended(status)} before it left the function"
