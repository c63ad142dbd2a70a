"""Gradient accumulation: when gradients are synchronised and the optimizer steps, by :class:`AccumulationState`.

It counts micro-steps and knows the loader that is being read. It neither touches gradients nor communicates: the
strategy's ``no_sync`` and the optimizer wrapper act on what it decides.

    micro-step        1   2   3   4   5   6 (last batch of the loader)
    num_steps = 4     .   .   .   S   .   S      S = sync_gradients: gradients are reduced, the optimizer steps
    divisor           4   4   4   4   4   4      of the losses; with average_tail the tail ends as a mean of 2:
                      4   4   4   4   4   2      what 5 left is multiplied by 4 / 2 before 6 is added
"""

from __future__ import annotations

import weakref
from typing import Any

from nblaunch import context
from nblaunch.training.options import GradientAccumulationPlugin


class AccumulationState:
    """The accumulation window of one process, and the stack of prepared loaders that it is reading.

    ``sync_gradients`` is True where the current micro-step ends in an optimizer step. ``step`` counts micro-steps
    since the last window that the end of a loader closed. ``rescale`` is what gradients that are there already are to
    be multiplied by before the current micro-step adds its own.
    """

    def __init__(self) -> None:
        self.plugin = GradientAccumulationPlugin()
        self.num_steps = 1
        self.step = 0
        self.sync_gradients = True
        self.rescale = 1.0
        self._tail: int | None = None
        # Weak: a loader that the user drops in the middle of an epoch must go, with the data it holds.
        self._loaders: list[weakref.ref[Any]] = []

    def configure(self, plugin: GradientAccumulationPlugin) -> None:
        """Use these settings from now on; the latest Accelerator wins."""
        self.plugin = plugin
        self.num_steps = plugin.num_steps

    def set_num_steps(self, num_steps: int) -> None:
        """Change the window's length, for the windows that follow.

        Raises:
            ValueError: less than 1.
            TypeError: not a whole number.
        """
        GradientAccumulationPlugin(num_steps=num_steps)
        self.num_steps = num_steps

    @property
    def divisor(self) -> int:
        """What losses of the current micro-step are divided by, so that a window yields the mean of its losses."""
        return self._tail or self.num_steps

    def advance(self) -> None:
        """Begin one more micro-step: decide whether it ends in an optimizer step."""
        self._tail, self.rescale = None, 1.0
        loader = self.active_loader if self.plugin.sync_with_dataloader else None
        if loader is not None and loader.end_of_dataloader:
            micro_steps = self.step % self.num_steps + 1
            if self.plugin.average_tail and micro_steps < self.num_steps:
                self._tail, self.rescale = micro_steps, self.num_steps / micro_steps
            self.step = 0  # the next epoch starts a fresh window
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0

    def __reduce__(self) -> tuple[Any, ...]:
        # What is pickled with an optimizer finds the window of the process that it arrives in.
        return _of_this_process, ()

    # --- loaders being read --------------------------------------------------------------------------------------

    def enter(self, loader: Any) -> None:
        """Make ``loader`` the active one: it begins an epoch, until it ends or another one begins inside."""
        self._loaders.append(weakref.ref(loader))

    def leave(self, loader: Any) -> None:
        """Forget ``loader``, whose epoch ended or was abandoned; the one around it, if any, is active again."""
        for position in range(len(self._loaders) - 1, -1, -1):
            if self._loaders[position]() is loader:
                del self._loaders[position]
                return

    @property
    def active_loader(self) -> Any:
        """The loader that is being read, the innermost of several; None outside of any."""
        while self._loaders:
            loader = self._loaders[-1]()
            if loader is not None:
                return loader
            self._loaders.pop()
        return None

    @property
    def loaders(self) -> list[Any]:
        """All loaders that are being read, outermost first."""
        return [loader for reference in self._loaders if (loader := reference()) is not None]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in the user's hands is the last one of the active loader."""
        loader = self.active_loader
        return loader is not None and bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Real rows in the last global batch of the active loader: 0 = all of them, -1 = not known."""
        loader = self.active_loader
        return -1 if loader is None else int(loader.remainder)


def _of_this_process() -> AccumulationState:
    session = context.current().training
    return AccumulationState() if session is None else session.accumulation
