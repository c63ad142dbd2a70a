"""The reports of this process, which an Accelerator and hooks on other libraries share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nblaunch import context
from nblaunch.errors import user_frame
from nblaunch.events import EpochEnded
from nblaunch.progress.board_reports import BusyTime, Loop, LoopStack, LossReport
from nblaunch.user_code import is_user_file

NAN_CHECK = "nan_on_one_rank"


@dataclass(frozen=True)
class Reports:
    """The reports that this process writes to its slot of the board.

    Args:
        loops: the running loops over loaders and iterables.
        losses: the losses, and the memory of the device.
        busy_time: the time per step spent without waiting for other ranks.
        at_begin: called when another command of a session begins.
        at_end: called when the function has returned, before the last losses are shown.
    """

    loops: LoopStack
    losses: LossReport
    busy_time: BusyTime
    at_begin: list[Callable[[], None]] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)

    def report_epoch(self, loop: Loop) -> None:
        """Report the end of a loop over a training loader, after its losses have been flushed."""
        here = context.current()
        duration_s = time.monotonic() - loop.began_s
        mean = self.losses.take_mean()
        here.emit(EpochEnded(here.topology.rank, epoch=loop.epoch, loss=mean, duration_s=duration_s))

    def begin_anew(self) -> None:
        """Forget what an earlier command of a session has shown."""
        self.losses.begin_anew()
        self.loops.begin_anew()
        for begin in self.at_begin:
            begin()

    def finish(self) -> None:
        """Show the final losses and device memory at the end of the function."""
        for finish in self.at_end:
            finish()
        self.busy_time.pause()
        self.losses.show_last()


def get_reports() -> Reports:
    """Return the reports of this process; the first call creates them."""
    here = context.current()
    if here.reports is None:
        losses = LossReport(here.slot, here.backend, _report_nan)
        here.reports = Reports(LoopStack(here.slot), losses, BusyTime(here.slot))
        here.flush_losses, here.forget_losses = here.reports.finish, here.reports.begin_anew
    reports: Reports = here.reports
    return reports


def _report_nan(step: int) -> None:
    """Send the first step after which all losses of this rank are NaN; the launcher compares the ranks' steps."""
    frame = user_frame()
    context.current().observe(
        NAN_CHECK,
        f"losses have been NaN since step {step} on one rank, and since the next step on all others",
        "Check the samples that this rank has read for this step: their gradients made all weights NaN",
        frame if is_user_file(frame.f_code.co_filename) else None,
        step=step,
        value=step,
        judged_by="first",
    )
