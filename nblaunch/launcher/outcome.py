"""JobOutcome: how a job ended, with the values of its ranks or its error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from nblaunch.diagnosis.rendering import hide_launcher
from nblaunch.errors import ResultError
from nblaunch.user_code import from_first_user_frame
from nblaunch.wire.argument_paths import ArgPath


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended.

    Args:
        status: ``"done"``, ``"failed"``, ``"interrupted"``, ``"cancelled"``, or ``"lost"`` of a detached job.
        error: what the job's result raises; None if there is a result. A job that is done has one, too, where a return
            value could not travel.
        failed_rank: the rank with the root cause of a failure.
        headline: one line about the failure; empty = the error's own text.
        is_early: it was done before its time, because that was requested.
        values: rank -> what its function returned, of a job that is done.
        unloaded_weights: argument path -> trained state dict that no module has taken: it does not fit the kernel's any
            more, or the job is detached.
        is_released: the values and weights that there were have been given up.
    """

    status: str
    error: BaseException | None = None
    failed_rank: int | None = None
    headline: str = ""
    is_early: bool = False
    values: Mapping[int, Any] = field(default_factory=dict)
    unloaded_weights: Mapping[ArgPath, dict[str, Any]] = field(default_factory=dict)
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
        return replace(self, _traceback=from_first_user_frame(self.error.__traceback__))

    def released(self) -> JobOutcome:
        """Return the same without values, weights and variables."""
        if self.error is not None:
            self.error.__traceback__ = None
        if isinstance(self.error, ResultError):
            self.error.partial = None
        return replace(self, values={}, unloaded_weights={}, is_released=True, _traceback=None)

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
