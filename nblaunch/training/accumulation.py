"""Gradient accumulation: when gradients are synchronised and the optimizer steps, by :class:`AccumulationState`.

Every Accelerator has its own. It counts micro-steps and knows the loader that is being read, from the stack of those of
the process (:class:`LoaderStack`). It neither touches gradients nor communicates. ``gradients.py`` acts on what
it decides (the strategy's ``no_sync`` where a micro-step begins, ``num_steps`` as divisor of losses), and so does the
optimizer wrapper.

    micro-step        1   2   3   4   5   6 (last batch of the loader)
    num_steps = 4     .   .   .   S   .   S      S = sync_gradients: gradients are reduced, the optimizer steps
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nblaunch import context, user_code
from nblaunch.training.options import GradientAccumulationPlugin


def _current_command() -> tuple[int, int]:
    """Return what distinguishes the cell, or the command of a session, that runs from those before it."""
    shell = user_code.ipython_shell()
    return context.current().num_commands, 0 if shell is None else shell.execution_count


class LoaderStack:
    """The prepared loaders that a process is reading, outermost first."""

    def __init__(self) -> None:
        # Weak: a loader that the user drops in the middle of an epoch must go, with the data it holds.
        self._entries: list[tuple[tuple[int, int], weakref.ref[Any]]] = []

    def enter(self, loader: Any) -> None:
        """Make ``loader`` the active one: it begins an epoch, until it ends or another one begins inside."""
        self._entries.append((_current_command(), weakref.ref(loader)))

    def leave(self, loader: Any) -> None:
        """Forget ``loader``, whose epoch ended or was abandoned; the one around it, if any, is active again."""
        for position in range(len(self._entries) - 1, -1, -1):
            if self._entries[position][1]() is loader:
                del self._entries[position]
                return

    def forget_earlier_commands(self) -> None:
        """Forget the loaders of earlier cells, which a traceback or a variable keeps in the middle of their epoch."""
        now = _current_command()
        self._entries = [entry for entry in self._entries if entry[0] == now]

    @property
    def innermost(self) -> Any:
        """The active loader; None outside of any."""
        while self._entries:
            loader = self._entries[-1][1]()
            if loader is not None:
                return loader
            self._entries.pop()
        return None

    def entered(self) -> list[Any]:
        """Return all of them, outermost first."""
        found = (reference() for _, reference in self._entries)
        return [loader for loader in found if loader is not None]


class AccumulationState:
    """The accumulation window of an Accelerator, and the prepared loaders that are being read.

    Loops around the Accelerator are among them. What an earlier cell, or command of a session, has left in the
    middle is not.

    ``sync_gradients`` is True where the current micro-step ends in an optimizer step. ``step`` counts micro-steps
    since the last end of a loader. ``are_gradients_reduced``: the user has averaged gradients
    over ranks, which the next step leaves out. ``plugin`` has the settings; another one may be assigned.

    Args:
        loaders: those of the process; None: a lone window, that knows no loader.
        plugin: the settings.
    """

    def __init__(
        self, loaders: LoaderStack | None = None, plugin: GradientAccumulationPlugin | None = None
    ) -> None:
        self.plugin = plugin or GradientAccumulationPlugin()
        self.step = 0
        self.sync_gradients = True
        self.are_gradients_reduced = False
        self._is_joining = False
        self._stack = loaders or LoaderStack()
        self._stack.forget_earlier_commands()

    @property
    def num_steps(self) -> int:
        """Micro-steps per optimizer step; may be set, for the windows that follow."""
        return self.plugin.num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self.plugin = dataclasses.replace(self.plugin, num_steps=num_steps)  # the user's own stays as it is

    def is_of(self, loaders: LoaderStack) -> bool:
        """Return whether the window is of the process that reads these loaders."""
        return self._stack is loaders

    def advance(self) -> None:
        """Begin one more micro-step: decide whether it ends in an optimizer step."""
        is_last = self.plugin.sync_with_dataloader and self.end_of_dataloader
        self.step += 1
        self.sync_gradients = self.step % self.num_steps == 0
        if is_last:
            self.step = 0  # the next epoch starts a fresh window
            self.sync_gradients = self.sync_gradients or not self._ends_alone

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Let ranks reach the end of a loader at different micro-steps in the block, and reduce in the same ones.

        Where ranks have unequal numbers of batches, the end closes no window there.
        """
        before, self._is_joining = self._is_joining, True
        try:
            yield
        finally:
            self._is_joining = before

    @property
    def _ends_alone(self) -> bool:
        """Whether other ranks have more or fewer batches of the active loader, and join."""
        return self._is_joining and bool(self.active_loader.is_uneven)

    def __reduce__(self) -> tuple[Any, ...]:
        # What is pickled with an optimizer finds the window of the process that it arrives in.
        return _of_this_process, ()

    @property
    def active_loader(self) -> Any:
        """The loader that is being read, the innermost of several; None outside of any."""
        return self._stack.innermost

    @property
    def loaders(self) -> list[Any]:
        """All loaders that are being read, outermost first."""
        return self._stack.entered()

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
