"""Gradient accumulation: when gradients are synchronised and the optimizer steps, by :class:`AccumulationState`.

Every Accelerator has its own. It counts micro-steps and knows the loader that is being read, from the stack of those of
the process (:class:`LoaderStack`). It neither touches gradients nor communicates. ``gradients.py`` acts on what
it decides (``rescale`` and the strategy's ``no_sync`` where a micro-step begins, ``divisor`` in ``backward``), and so
does the optimizer wrapper.

    micro-step        1   2   3   4   5   6 (last batch of the loader)
    num_steps = 4     .   .   .   S   .   S      S = sync_gradients: gradients are reduced, the optimizer steps
    divisor           4   4   4   4   4   4      of the losses; with average_tail the tail ends as a mean of 2:
                      4   4   4   4   4   2      what 5 left is multiplied by 4 / 2 before 6 is added
"""

from __future__ import annotations

import weakref
from typing import Any

from nblaunch import context, user_code
from nblaunch.training.options import GradientAccumulationPlugin

Command = tuple[int, int]


def current_command() -> Command:
    """Return a number of the notebook's cell, or of the session's command, that runs: larger than those before it."""
    shell = user_code.ipython_shell()
    return context.current().num_commands, 0 if shell is None else shell.execution_count


class LoaderStack:
    """The prepared loaders that a process is reading, outermost first.

    Each is kept with the number of the command that began to read it, see :func:`current_command`: one whose iterator a
    traceback or a variable keeps is here still when the cell that left it is over.
    """

    def __init__(self) -> None:
        # Weak: a loader that the user drops in the middle of an epoch must go, with the data it holds.
        self._entries: list[tuple[Command, weakref.ref[Any]]] = []

    def enter(self, loader: Any) -> None:
        """Make ``loader`` the active one: it begins an epoch, until it ends or another one begins inside."""
        self._entries.append((current_command(), weakref.ref(loader)))

    def leave(self, loader: Any) -> None:
        """Forget ``loader``, whose epoch ended or was abandoned; the one around it, if any, is active again."""
        for position in range(len(self._entries) - 1, -1, -1):
            if self._entries[position][1]() is loader:
                del self._entries[position]
                return

    def innermost(self, since: Command) -> Any:
        """Return the innermost loader that was entered in the command ``since`` or later; None outside of any."""
        while self._entries:
            command, reference = self._entries[-1]
            loader = reference()
            if loader is not None:
                return loader if command >= since else None
            self._entries.pop()
        return None

    def entered(self, since: Command = (0, 0)) -> list[Any]:
        """Return all of them that were entered in the command ``since`` or later, outermost first."""
        found = (reference() for command, reference in self._entries if command >= since)
        return [loader for loader in found if loader is not None]


class AccumulationState:
    """The accumulation window of an Accelerator, and the prepared loaders that are being read.

    Loops around the Accelerator are among them. What an earlier cell, or command of a session, has left in the
    middle is known to Accelerators of that time alone.

    ``sync_gradients`` is True where the current micro-step ends in an optimizer step. ``step`` counts micro-steps
    since the last window that the end of a loader closed. ``are_gradients_reduced``: the user has averaged gradients
    over ranks, which the next step leaves out. ``rescale`` is what gradients that are there already are to
    be multiplied by before the current micro-step adds its own.

    Args:
        loaders: those of the process; None: a lone window, that knows no loader.
        plugin: the settings.
    """

    def __init__(
        self, loaders: LoaderStack | None = None, plugin: GradientAccumulationPlugin | None = None
    ) -> None:
        self.configure(plugin or GradientAccumulationPlugin())
        self.step = 0
        self.sync_gradients = True
        self.are_gradients_reduced = False
        self.rescale = 1.0
        self._tail: int | None = None
        self._stack = loaders or LoaderStack()
        self._since = current_command()

    def configure(self, plugin: GradientAccumulationPlugin) -> None:
        """Use these settings from now on."""
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

    @property
    def active_loader(self) -> Any:
        """The loader that is being read, the innermost of several; None outside of any."""
        return self._stack.innermost(self._since)

    @property
    def loaders(self) -> list[Any]:
        """All loaders that are being read, outermost first."""
        return self._stack.entered(self._since)

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
    shared = context.current().training
    return AccumulationState() if shared is None else shared.accumulation
