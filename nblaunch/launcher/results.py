"""What is left of a job that has ended: its outcome, the values and weights of its ranks, and what it logged."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nblaunch.diagnosis.failure import failure_of, memory_evidence
from nblaunch.diagnosis.rendering import hide_launcher
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.diagnosis.root_cause import RootCause, early_leavers, how_ended
from nblaunch.errors import JobCancelled, ResultError
from nblaunch.events import Metric, Note
from nblaunch.launcher import weights
from nblaunch.launcher.assignments import Attempt
from nblaunch.wire.modules import ArgPath
from nblaunch.wire.outbox import Outcome
from nblaunch.wire.pickle_errors import captured_variables
from nblaunch.worker.failure import without_own_frames

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended.

    Args:
        status: ``"done"``, ``"failed"``, ``"interrupted"`` or ``"cancelled"``.
        error: what the job's result raises; None if there is one.
        failed_rank: the rank with the root cause of a failure.
        headline: one line about the failure; empty = the error's own text.
        is_early: it was done before its time, because that was requested.
        values: rank -> what its function returned, of a job that is done.
        weights: argument path -> trained state dict of a module that did not fit the kernel's any more.
        is_released: the values and weights that there were have been given up.
    """

    status: str
    error: BaseException | None = None
    failed_rank: int | None = None
    headline: str = ""
    is_early: bool = False
    values: Mapping[int, Any] = field(default_factory=dict)
    weights: Mapping[ArgPath, dict[str, Any]] = field(default_factory=dict)
    is_released: bool = False
    _traceback: TracebackType | None = None

    @classmethod
    def of_error(cls, error: BaseException) -> JobOutcome:
        """Return the outcome of a job that ``error`` ended in this process, or that was interrupted."""
        return cls("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)

    @property
    def message(self) -> str:
        """The failure in one line; empty where there is none."""
        if self.headline or self.error is None:
            return self.headline
        return f"{type(self.error).__name__}: {self.error}"

    def with_traceback(self) -> JobOutcome:
        """Return the same with the traceback that the error has now, from the user's function on.

        An error of another process has none; one of the function run inline begins at the function.
        """
        if self.error is None:
            return self
        return replace(self, _traceback=without_own_frames(self.error.__traceback__))

    def released(self) -> JobOutcome:
        """Return the same without values, weights and variables."""
        if self.error is not None:
            self.error.__traceback__ = None
        if isinstance(self.error, ResultError):
            self.error.partial = None
        return replace(self, values={}, weights={}, is_released=True, _traceback=None)

    def raise_error(self) -> None:
        """Raise the error at the line of the cell that asks for the result, if there is one."""
        __tracebackhide__ = True
        if self.error is None:
            return
        error = self.error.with_traceback(self._traceback)
        hide_launcher(error)
        try:
            raise error
        finally:
            del error  # or the traceback, which refers to this frame, would keep itself alive


def conclude(
    attempt: Attempt,
    report: AttemptReport,
    outcomes: Mapping[int, Outcome],
    pids: Mapping[int, int],
    past_failures: list[str],
) -> tuple[JobOutcome, list[Note]]:
    """Load the trained weights into the kernel's modules, and return the outcome of the job with notes about it.

    Args:
        attempt: the last one.
        report: how it went.
        outcomes: rank -> what it left.
        pids: rank -> process id.
        past_failures: one line for each attempt that failed before.
    """
    unkillable = list(report.unkillable.values())
    if report.cancelled:
        text = f"{attempt.spec.function_name} was cancelled; logs: {attempt.log.path}"
        return JobOutcome("cancelled", JobCancelled("\n".join([text, *unkillable]))), []
    if report.interrupted:
        error = KeyboardInterrupt(*["\n".join(unkillable)] if unkillable else [])
        return JobOutcome("interrupted", error), []
    if not report.is_success:
        failure = failure_of(report, pids, attempt.log, attempt.number, past_failures)
        return JobOutcome("failed", failure.error, failure.rank, failure.headline), []
    kept, notes = _load_weights(attempt, report, outcomes)
    notes += [Note.of_job(text) for text in _uncollected(attempt, report)]
    if early := early_leavers(report):
        notes.append(Note.of_job(early, "warning"))
    values = {rank: outcome.value for rank, outcome in outcomes.items()}
    error_of_value = _result_error(report, outcomes)
    return (
        JobOutcome("done", error_of_value, is_early=report.stopped_early, values=values, weights=kept),
        notes,
    )


# --- trained weights -------------------------------------------------------------------------------------------------
def _load_weights(
    attempt: Attempt, report: AttemptReport, outcomes: Mapping[int, Outcome]
) -> tuple[dict[ArgPath, dict[str, Any]], list[Note]]:
    """Load what workers trained into the kernel's modules; return what did not fit them, and notes."""
    modules, first_rank = attempt.plan.modules, attempt.ranks[0]
    if first_rank not in outcomes:
        return {}, []
    unsent = _unsent(report)
    back = weights.join([outcomes[rank].weights for rank in attempt.ranks if rank in outcomes])
    back = {path: state for path, state in back.items() if path not in unsent}  # all shards, or none
    loaded = weights.load_back(modules, back, outcomes[first_rank].weights_errors)
    notes = [Note.of_job(line) for line in loaded.lines]
    notes += [
        Note.of_job(line, "warning") for line in (*loaded.warnings, *weights.unsent_lines(modules, unsent))
    ]
    # What is in the kernel's module need not be in memory once more, for as long as this job is the last one.
    kept = {
        path: weights.assembled(state, modules[path])
        for path, state in back.items()
        if path not in loaded.paths
    }
    return kept, notes


def _unsent(report: AttemptReport) -> dict[ArgPath, str]:
    """Return why ranks whose function returned did not send weights that they had announced, by argument path."""
    reasons: dict[ArgPath, str] = {}
    for rank, finished in sorted(report.finished.items()):
        sent = report.weights.get(rank, {})
        missing = [path for path in finished.sends if path not in sent]
        reasons |= dict.fromkeys(missing, _death_while_sending(report, rank)) if missing else {}
        for path, event in sent.items():
            if event.error:
                reasons[path] = f"rank {rank} could not send them ({event.error})"
    return reasons


def _death_while_sending(report: AttemptReport, rank: int) -> str:
    status, time_s = report.exits[rank]
    evidence = memory_evidence(report, RootCause(rank, status=status, time_s=time_s))
    what = f"rank {rank} {how_ended(status)} while it sent them"
    return ". ".join([what, *(line.rstrip(".") for line in evidence[:1])])


# --- return values ---------------------------------------------------------------------------------------------------
def _result_error(report: AttemptReport, outcomes: Mapping[int, Outcome]) -> ResultError | None:
    """Return what to raise when a return value could not travel whole; the parts that could are kept in the error."""
    for rank, outcome in sorted(outcomes.items()):
        unpicklable = report.finished[rank].contents.unpicklable
        if unpicklable:
            why = f"can't be pickled: {'; '.join(unpicklable)}. Everything else of it is in this error's .partial"
        elif outcome.value_error:
            why = f"can't be rebuilt in this process: {outcome.value_error}"
        else:
            continue
        return ResultError(
            f"the function finished on every rank, but rank {rank}'s return value {why}; the trained weights were "
            "kept. Return tensors, numbers and plain containers.",
            partial=outcome.value,
        )
    return None


# --- modules that were trained, but not passed -----------------------------------------------------------------------
def _uncollected(attempt: Attempt, report: AttemptReport) -> list[str]:
    """Describe the modules that the function of a job without modules in its arguments has trained."""
    has_trained = any(sample.loss is not None for sample in report.last_samples)
    if not has_trained or not attempt.spec.sync_weights or attempt.plan.modules:
        return []
    text = describe_uncollected(attempt.spec.function, attempt.spec.function_name)
    return [text] if text else []


def describe_uncollected(function: Callable[..., Any], name: str) -> str:
    """Describe the modules that a function takes from the notebook without getting them in ``args``.

    Workers train such a module like any other, but its weights were not asked for, and end with the workers. Only what
    is in plain sight is found: closures, global names, the object of a bound method, the arguments of a ``partial``.

    Args:
        function: what the workers ran.
        name: by which the user knows it.

    Returns:
        A sentence; empty where there is no such module.
    """
    modules = _modules(function)
    if not modules:
        return ""
    named = ", ".join(f"{where} ({type(module).__name__})" for where, module in modules.items())
    verb, them = ("was", "it") if len(modules) == 1 else ("were", "them")
    return (
        f"{named} of the notebook {verb} used by {name} without being in args: what workers changed in {them} is gone "
        f"with them. For trained weights pass {them} as an argument, as in "
        f"notebook_launcher({name.rpartition('.')[2]}, (model,))"
    )


def _modules(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the trainable modules that ``function`` uses by itself, each once, by the name it has there."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    found: dict[str, Any] = {}
    for where, value in _reached(function):
        is_module = issubclass(type(value), torch.nn.Module)  # a proxy's own idea of its class may raise
        if (
            is_module
            and not any(value is other for other in found.values())
            and weights.trainable_bytes(value)
        ):
            found[where] = value
    return found


def _reached(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        for position, value in enumerate(function.args):
            yield f"argument {position} of the partial", value
        yield from function.keywords.items()
        yield from _reached(function.func)
        return
    owner = getattr(function, "__self__", None) if inspect.ismethod(function) else function
    if owner is not None and not inspect.isroutine(owner) and not inspect.isclass(owner):
        yield "self", owner
        yield from ((f"self.{name}", value) for name, value in getattr(owner, "__dict__", {}).items())
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(plain):
        yield from captured_variables(plain)


# --- what it logged --------------------------------------------------------------------------------------------------
_ABOUT = ("step", "time_s", "rank", "attempt")


def row_of(metric: Metric, attempt: int) -> dict[str, Any]:
    """Return a call of ``accelerator.log`` as a row: step, wall clock in seconds, rank, attempt, values by name.

    A value that is called as one of these takes its place, except that a step given to ``log`` is the step.
    """
    about = {"step": metric.step, "time_s": metric.time_s, "rank": metric.rank, "attempt": attempt}
    return {**about, **metric.values, **({} if metric.step is None else {"step": metric.step})}


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return a table with one row per step and one column per value, in the order in which they came.

    Values that were logged for a step in several calls share its row. The index is the step; rows without one are not
    joined, and have no number there. The last column is ``time_s``, of the row's last call; before it stand ``rank``
    and ``attempt`` where there is more than one.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "metrics_frame needs pandas (pip install pandas); job.metrics has the same as a list of dicts"
        ) from error
    joined = _joined(rows)
    names = dict.fromkeys(name for row in joined for name in row if name not in _ABOUT)
    several = [name for name in ("rank", "attempt") if len({row[name] for row in joined}) > 1]
    steps = [row["step"] for row in joined]
    is_counted = all(isinstance(step, int) for step in steps)
    index = pandas.Index(steps, name="step", dtype="int64" if is_counted else "float64")
    return pandas.DataFrame(joined, columns=[*names, *several, "time_s"], index=index)


def _joined(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join the rows of a step, where its first one stood."""
    joined: dict[Any, dict[str, Any]] = {}
    for number, row in enumerate(rows):
        is_counted = row["step"] is not None
        key = ("step", row["attempt"], row["rank"], row["step"]) if is_counted else ("row", number)
        joined.setdefault(key, {}).update(row)
    return list(joined.values())
