"""The outcome of a job: the error, or the workers' results, loaded into the kernel's modules and optimizers.

EndedAttempt   the last attempt with its report and the results of its ranks; conclude() -> JobOutcome
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from types import TracebackType
from typing import Any

from nblaunch import formatting, packages
from nblaunch.diagnosis.exceptions import hide_launcher, is_of_rank, rebuild
from nblaunch.diagnosis.failure import failure_of, memory_evidence
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.diagnosis.root_cause import RootCause, early_leavers, how_ended
from nblaunch.errors import CollectiveMismatch, JobCancelled, JobHung, ResultError
from nblaunch.events import JobEnded, Note, WorkerState
from nblaunch.launcher import weights
from nblaunch.launcher.attempt import Attempt
from nblaunch.launcher.weights import listed
from nblaunch.user_code import from_first_user_frame
from nblaunch.weights import TensorShard
from nblaunch.wire.argument_paths import ArgPath, is_scheduler, path_name
from nblaunch.wire.exceptions import set_attribute
from nblaunch.wire.outbox import RankResult
from nblaunch.worker.failure import describe_failure

StateDicts = dict[ArgPath, dict[str, Any]]
"""Argument path -> state dict."""

_MAX_SEARCHED = 1000  # parts of a return value
_KEEP_ADVICE = "To keep them, catch the KeyboardInterrupt in the function and return, or save checkpoints"


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of a job: how it ended, with its values or the error.

    Args:
        status: ``"done"``, ``"failed"``, ``"interrupted"``, ``"cancelled"``, or ``"lost"`` for a detached job.
        error: the exception that ``Job.result`` raises; None if there is a result. A job that is done has an error if
            it could not send a return value.
        failed_rank: the rank that failed first.
        headline: one line about the failure; empty = the error's own text.
        advice: explanation of the failure, and what to do.
        is_early: whether the job was stopped early on request.
        values: rank -> return value of each rank that returned, for a job that is done, interrupted or cancelled.
        unloaded_weights: argument path -> trained state dict that was not loaded, because it does not fit
            the kernel's module or the job is detached.
        has_lost_weights: whether workers of a successful job ended before they had sent all trained weights.
        is_released: whether values and weights were released.
    """

    status: str
    error: BaseException | None = None
    failed_rank: int | None = None
    headline: str = ""
    is_early: bool = False
    values: Mapping[int, Any] = field(default_factory=dict)
    unloaded_weights: Mapping[ArgPath, dict[str, Any]] = field(default_factory=dict)
    has_lost_weights: bool = False
    is_released: bool = False
    advice: tuple[str, ...] = ()
    _traceback: TracebackType | None = None

    @classmethod
    def of_error(cls, error: BaseException) -> JobOutcome:
        """Return the outcome of a job that ``error`` ended in this process; an interrupt has status ``interrupted``.

        :meth:`EndedAttempt.conclude` returns the outcome of interrupted workers.
        """
        return cls("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)

    @property
    def message(self) -> str:
        """The failure in one line; empty = no failure."""
        if self.headline or self.error is None:
            return self.headline
        return f"{type(self.error).__name__}: {self.error}"

    def end_event(self) -> JobEnded:
        """Return the event that reports the end to listeners."""
        return JobEnded(
            outcome=self.status,
            failed_rank=self.failed_rank,
            message=self.message,
            advice=self.advice,
            is_early=self.is_early,
            has_hung=isinstance(self.error, (JobHung, CollectiveMismatch)),
        )

    def late_interrupt(self, expression: str) -> KeyboardInterrupt:
        """Return the KeyboardInterrupt of a job that was interrupted but still succeeded.

        Args:
            expression: expression that returns the value.
        """
        loaded = "" if self.has_lost_weights else "weights are loaded, and "
        return KeyboardInterrupt(f"every rank here has returned: {loaded}{expression} returns the value")

    def with_traceback(self) -> JobOutcome:
        """Return a copy with the error's current traceback, which begins at the user's function.

        The traceback of a worker's error has the worker's frames (``diagnosis/exceptions.py``). With
        ``engine="inline"``, it begins at the function. ``WorkerDied`` and ``JobHung`` have none.
        """
        if self.error is None:
            return self
        return replace(self, _traceback=from_first_user_frame(self.error.__traceback__))

    def without_variables(self) -> JobOutcome:
        """Return a copy whose error shows the same frames but does not keep the function's variables.

        Only the error of a function that ran in this process keeps variables, which may be large tensors. The
        copy's error is another object, because the original keeps its traceback for debuggers.
        """
        tb = self._traceback
        if self.error is None or tb is None or is_of_rank(tb.tb_frame):
            return self
        failed = describe_failure(0, self.error)
        # Frames created in this thread would refer to its other frames, and IPython's frames hold a reference to the
        # original error.
        with ThreadPoolExecutor(max_workers=1) as thread:
            copied = thread.submit(rebuild, failed).result()
        return replace(self, error=copied, _traceback=copied.__traceback__)

    def released(self) -> JobOutcome:
        """Return a copy without values, weights or variables."""
        if self.error is not None:
            self.error.__traceback__ = None
        if isinstance(self.error, (ResultError, JobCancelled, KeyboardInterrupt)):
            set_attribute(self.error, "partial", None)
        return replace(self, values={}, unloaded_weights={}, is_released=True, _traceback=None)

    def raise_error(self) -> None:
        """Raise the error, if there is one, at the line that requests the result."""
        __tracebackhide__ = True
        if self.error is None:
            return
        error = self.error.with_traceback(self._traceback)
        hide_launcher(error)
        try:
            raise error
        finally:
            del error, self  # otherwise the traceback, which refers to this frame, would keep itself alive


@dataclass(frozen=True)
class EndedAttempt:
    """The last attempt of a job, which determines the job's outcome.

    Args:
        attempt: the attempt.
        report: its report.
        results: rank -> its result.
    """

    attempt: Attempt
    report: AttemptReport
    results: Mapping[int, RankResult]

    def conclude(
        self, pids: Mapping[int, int], past_failures: Sequence[str] = ()
    ) -> tuple[JobOutcome, list[Note]]:
        """Return the outcome of a job and notes about it; load its trained weights if it is done or was interrupted.

        An interrupted job gets a new KeyboardInterrupt instead of the workers' exceptions.

        Args:
            pids: rank -> process id.
            past_failures: one line for each earlier attempt that failed.
        """
        unkillable = list(self.report.unkillable.values())
        if self.report.cancelled:
            text = f"{self.attempt.spec.function_name} was cancelled; logs: {self.attempt.log.path}"
            cancelled = JobCancelled("\n".join([text, *unkillable]))
            values, notes = self.keep_values(cancelled)
            return JobOutcome("cancelled", cancelled, values=values), notes
        if self.report.interrupted:
            error = KeyboardInterrupt(*["\n".join(unkillable)] if unkillable else [])
            unfit, notes = self._load_interrupted()
            values, notes_of_values = self.keep_values(error)
            outcome = JobOutcome("interrupted", error, values=values, unloaded_weights=unfit)
            return outcome, notes + notes_of_values
        if not self.report.is_success:
            failure = failure_of(self.report, pids, self.attempt.log, self.attempt.number, past_failures)
            return JobOutcome(
                "failed", failure.error, failure.rank, failure.headline, advice=failure.advice
            ), []
        unfit, notes = self._load_weights()
        notes += self._load_optimizers()
        notes += [Note.of_job(text) for text in self._describe_uncollected()]
        if early := early_leavers(self.report):
            notes.append(Note.of_job(early, "warning"))
        values = {rank: result.value for rank, result in self.results.items()}
        error_of_value = self._result_error()
        return (
            JobOutcome(
                "done",
                error_of_value,
                is_early=self.report.stopped_early,
                values=values,
                unloaded_weights=unfit,
                has_lost_weights=bool(self._unsent()),
            ),
            notes,
        )

    def _describe_uncollected(self) -> list[str]:
        """Describe the modules that the function trained although they are not in its arguments."""
        has_trained = any(reading.loss is not None for reading in self.report.last_readings)
        if not has_trained or not self.attempt.spec.sync_weights or self.attempt.plan.modules:
            return []
        text = weights.describe_uncollected_modules(
            self.attempt.spec.function, self.attempt.spec.function_name
        )
        return [text] if text else []

    # --- trained weights ---------------------------------------------------------------------------------------------

    def _load_interrupted(self) -> tuple[StateDicts, list[Note]]:
        """Load the trained weights of an interrupted job, with one note; return the same as :meth:`_load_weights`."""
        modules = self.attempt.plan.modules
        if not modules:
            return {}, [Note.of_job(text) for text in self._describe_uncollected()]
        if loss := self._describe_loss():
            return {}, [Note.of_job(loss, "warning")]
        if self.attempt.ranks[0] not in self.report.announced:
            return {}, []
        where, what = self._describe_interrupt()
        unfit, notes = self._load_weights(what)
        notes = [replace(note, text=f"{where}: {note.text}") for note in notes[:1]] + notes[1:]
        return unfit, notes + self._load_optimizers()

    def _load_weights(self, what: str = "trained weights") -> tuple[StateDicts, list[Note]]:
        """Load the workers' weights, which notes call ``what``; return the weights that did not fit, and the notes."""
        modules, first_rank = self.attempt.plan.modules, self.attempt.ranks[0]
        if first_rank not in self.results:
            return {}, []
        unsent = self._unsent()
        lost: dict[ArgPath, str] = {}
        unread: set[ArgPath] = set()
        for rank, result in sorted(self.results.items(), reverse=True):
            lost |= {path: f"rank {rank}: {error}" for path, error in result.state_errors.items()}
            unread |= result.state_errors.keys() - result.states.keys()
        lost = {path: reason for path, reason in (lost | unsent).items() if path in modules}
        wanted = modules.keys() - unsent.keys() - unread  # all shards, or none
        sent = [self.results[rank].states for rank in self.attempt.ranks if rank in self.results]
        back = weights.merge_ranks(
            [{path: states[path] for path in states.keys() & wanted} for states in sent]
        )
        elsewhere = self._changed_elsewhere()
        if self.attempt.spec.is_detached:
            full = {path: weights.assembled(state, modules[path]) for path, state in back.items()}
            return full, weights.notes_of_detached(modules, full, lost, elsewhere)
        loaded, notes = weights.load_back(modules, back, lost, what, elsewhere)
        unfit = {
            path: weights.assembled(state, modules[path])
            for path, state in back.items()
            if path not in loaded
        }
        return unfit, notes

    def _changed_elsewhere(self) -> dict[ArgPath, list[int]]:
        """Return the modules that changed only on ranks that do not send them, with these ranks.

        Ranks that have returned tensors are left out, because those tensors may be the weights.
        """
        ranks: dict[ArgPath, list[int]] = {}
        for rank, returned in sorted(self.report.returned.items()):
            for path in returned.changed:
                ranks.setdefault(path, []).append(rank)
        announced = self.report.announced
        return {
            path: [rank for rank in changed_on if not _holds_tensors(self.results.get(rank))]
            for path, changed_on in ranks.items()
            if path in self.attempt.plan.modules
            and not any(path in announced.get(rank, ()) for rank in changed_on)
        }

    def _load_optimizers(self) -> list[Note]:
        """Load the states of optimizers and schedulers into the kernel's objects; return notes."""
        result = self.results.get(self.attempt.ranks[0])
        if result is None:
            return []
        unsent, notes = self._unsent(), []
        loaded: set[int] = set()
        # Load optimizers first, because a scheduler continues from its optimizer's learning rates.
        for path, optimizer in sorted(
            self.attempt.plan.optimizers.items(), key=lambda item: is_scheduler(item[1])
        ):
            kind = "scheduler" if is_scheduler(optimizer) else "optimizer"
            name = f"{path_name(path)} ({type(optimizer).__name__})"
            problem = unsent.get(path) or result.state_errors.get(path, "")
            if not problem and is_scheduler(optimizer) and id(optimizer.optimizer) not in loaded:
                problem = "the state of its optimizer was not copied back either"
            if not problem and path not in result.states:
                continue
            problem = problem or _load_optimizer(optimizer, result.states[path])
            if problem:
                notes.append(
                    Note.of_job(f"the state of the {kind} {name} was not copied back: {problem}", "warning")
                )
                continue
            loaded.add(id(optimizer))
            notes.append(Note.of_job(f"copied the state of the {kind} back into {name}"))
        return notes

    def _unsent(self) -> dict[ArgPath, str]:
        """Return, by argument path, why a state that a rank announced was not sent, for ranks whose function has
        returned.
        """
        reasons: dict[ArgPath, str] = {}
        for rank, announced in sorted(self.report.announced.items()):
            sent = self.report.sent_states.get(rank, {})
            missing = [path for path in announced if path not in sent]
            reasons |= dict.fromkeys(missing, self._death_while_sending(rank)) if missing else {}
            for path, event in sent.items():
                if event.error:
                    reasons[path] = f"rank {rank} could not send them ({event.error})"
        return reasons

    def _death_while_sending(self, rank: int) -> str:
        status, time_s = self.report.exits[rank]
        evidence = memory_evidence(self.report, RootCause(rank, status=status, time_s=time_s))
        what = f"rank {rank} {how_ended(status)} while sending them"
        return ". ".join([what, *(line.rstrip(".") for line in evidence[:1])])

    # --- return values -----------------------------------------------------------------------------------------------

    def keep_values(self, error: BaseException) -> tuple[dict[int, Any], list[Note]]:
        """Set ``error.partial`` to the values of ranks that returned before others were stopped.

        Return these values and a note.
        """
        wanted = self.attempt.ranks if self.attempt.spec.return_all else self.attempt.ranks[:1]
        ranks = [rank for rank in wanted if rank in self.report.returned and rank in self.results]
        if not ranks:
            return {}, []
        values = {rank: self.results[rank].value for rank in ranks}
        set_attribute(error, "partial", values)
        text = (
            f"{formatting.ranks(ranks)} had returned: {type(error).__name__}.partial has the values, by rank"
        )
        return values, [Note.of_job(text)]

    def _result_error(self) -> ResultError | None:
        """Return the error for a return value that could not be sent as a whole; it contains the parts that could."""
        for rank, result in sorted(self.results.items()):
            unpicklable = self.report.returned[rank].value_location.unpicklable
            if unpicklable:
                why = f"can't be pickled: {'; '.join(unpicklable)}. The rest is in this error's .partial"
            elif result.value_error:
                why = f"can't be rebuilt in this process: {result.value_error}"
            else:
                continue
            return ResultError(
                f"the function finished on every rank, but rank {rank}'s return value {why}; the trained "
                "weights were kept. Return tensors, numbers or plain containers.",
                partial=result.value,
            )
        return None

    # --- interrupted jobs --------------------------------------------------------------------------------------------

    # Each interrupted rank reports its last step and sends its modules. If every rank holds the whole model, the first
    # rank of this machine is enough. Shards fit together only if all ranks were at the same step.

    def _describe_loss(self) -> str:
        """Return a sentence that says why the weights of an interrupted job are lost; empty if they are not lost."""
        first = self.attempt.ranks[0]
        ranks = self.attempt.ranks if _are_shards(self.results.get(first)) else [first]
        reason = next(filter(None, (self._why_unsent(rank) for rank in ranks)), "")
        if not reason and len(steps := self._steps(ranks)) > 1:
            reason = f"ranks hold shards of them, and stopped after different steps ({', '.join(steps)})"
        if not reason or not all(self._has_begun(rank) for rank in ranks):
            return ""
        named = listed(self.attempt.plan.modules, list(self.attempt.plan.modules))
        return f"interrupted: the changes that workers made to {named} are lost: {reason}. {_KEEP_ADVICE}"

    def _steps(self, ranks: Sequence[int]) -> list[str]:
        steps = {self.report.interruptions[rank].step for rank in ranks if rank in self.report.interruptions}
        return [f"{step:,}" for step in sorted(steps)]

    def _describe_interrupt(self) -> tuple[str, str]:
        """Return where the job was interrupted, and which weights it sent."""
        event = self.report.interruptions.get(self.attempt.ranks[0])
        if event is None:
            return "interrupted after the function had returned on the first rank", "trained weights"
        if event.step == 0:
            return "interrupted before the first optimizer step", "the weights at that moment"
        return f"interrupted after optimizer step {event.step:,}", "the weights of that step"

    def _has_begun(self, rank: int) -> bool:
        """Return whether a rank's function had begun when the interrupt arrived."""
        if rank in self.report.announced:
            return True
        failed = self.report.failed.get(rank)
        # On a KeyboardInterrupt in the function, the worker would have announced its states.
        if failed is not None:
            return failed.info.type_name != KeyboardInterrupt.__name__
        states = {reading.rank: reading.state for reading in self.report.last_readings}
        return states.get(rank) is not WorkerState.STARTING

    def _why_unsent(self, rank: int) -> str:
        """Return the reason why a rank has not sent its states; empty if it has."""
        event = self.report.interruptions.get(rank)
        if rank in self.report.returned or (event is not None and not event.is_cut):
            return ""
        if event is not None:
            step = f"optimizer step {event.step + 1:,}"
            return f"rank {rank} was interrupted during {step}, which did not finish in time"
        failed = self.report.failed.get(rank)
        if failed is not None:
            return f"rank {rank} raised {failed.info.type_name} when it was interrupted"
        status, _ = self.report.exits[rank]
        return f"rank {rank} {how_ended(status)} before it left the function"


def _load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> str:
    """Load a state into an optimizer or scheduler; return why that failed, or an empty string."""
    try:
        optimizer.load_state_dict(dict(state))
    except Exception as error:  # the state of another model, or the optimizer rejects it
        return f"it does not fit: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}"
    return ""


def _are_shards(result: RankResult | None) -> bool:
    states = result.states.values() if result is not None else ()
    return any(isinstance(value, TensorShard) for state in states for value in state.values())


def _holds_tensors(result: RankResult | None) -> bool:
    """Return whether a rank's return value is or contains tensors or modules."""
    pending, num_seen = [] if result is None else [result.value], 0
    while pending and num_seen < _MAX_SEARCHED:
        value, num_seen = pending.pop(), num_seen + 1
        if packages.is_subclass(type(value), "torch.Tensor", "torch.nn.Module"):
            return True
        if issubclass(type(value), (list, tuple, dict)):
            parts = dict.values(value) if issubclass(type(value), dict) else value
            pending.extend(islice(parts, _MAX_SEARCHED))
    return False
