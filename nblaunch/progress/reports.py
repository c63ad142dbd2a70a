"""The reports of this process, which an Accelerator and hooks on other libraries share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nblaunch import context
from nblaunch.events import EpochEnded
from nblaunch.progress.board_reports import BusyTime, Loop, LoopStack, LossReport


@dataclass(frozen=True)
class Reports:
    """What this process shows on its slot of the board.

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
        """Report the end of a loop over a training loader, whose losses were flushed."""
        here = context.current()
        duration_s = time.monotonic() - loop.began_s
        mean = self.losses.take_mean()
        here.emit(EpochEnded(here.topology.rank, time.time(), loop.epoch, mean, duration_s))

    def begin_anew(self) -> None:
        """Forget what an earlier command of a session has shown."""
        self.losses.begin_anew()
        self.loops.begin_anew()
        for begin in self.at_begin:
            begin()

    def finish(self) -> None:
        """Show the losses and the memory of the device as they are at the end of the function."""
        for finish in self.at_end:
            finish()
        self.busy_time.pause()
        self.losses.show_last()


def get_reports() -> Reports:
    """Return the reports of this process; the first call makes them."""
    here = context.current()
    if here.reports is None:
        losses = LossReport(here.slot, here.backend)
        here.reports = Reports(LoopStack(here.slot), losses, BusyTime(here.slot))
        here.flush_losses, here.forget_losses = here.reports.finish, here.reports.begin_anew
    reports: Reports = here.reports
    return reports
