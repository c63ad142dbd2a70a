"""Gradient accumulation: :class:`AccumulationState` decides when gradients are synchronised and optimizers step.

Every Accelerator has its own. It counts micro-steps, and asks the process's stack of loaders (:class:`LoaderStack`)
which loader is being read. It neither touches gradients nor communicates. ``gradients.py`` and prepared optimizers
apply its decisions: for example, they enter the strategy's ``no_sync`` at the start of a micro-step, and divide losses
by ``num_steps``.

    micro-step        1   2   3   4   5   6 (last batch of the loader)
    num_steps = 4     .   .   .   S   .   S      S = sync_gradients: gradients are reduced, the optimizer steps

Models that are accumulated separately each have a :class:`Window`, which decides when their optimizers step:

    accumulate(D)     .       S       .       S
    accumulate(G)         .       S       .       S
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from nblaunch import context, user_code
from nblaunch.training.options import GradientAccumulationPlugin


def _current_command() -> tuple[int, int]:
    """Return numbers that identify the running cell, or the running command of a session."""
    shell = user_code.ipython_shell()
    return context.current().num_commands, 0 if shell is None else shell.execution_count


class _Entry(NamedTuple):
    """A loader that is being read.

    Args:
        command: the command that began to read it.
        loader: a weak reference to it.
        num_read: id of each enclosing loader -> how many of its batches had been read when this loader was entered.
    """

    command: tuple[int, int]
    loader: weakref.ref[Any]
    num_read: dict[int, int]


def _num_read(loader: Any) -> int:
    """Return how many batches of the epoch a prepared loader has returned; 0 for a loader of another class."""
    loop = getattr(loader, "_loop", None)
    return 0 if loop is None else int(loop.step)


class LoaderStack:
    """The prepared loaders that a process is reading, outermost first."""

    def __init__(self) -> None:
        # The references are weak: a loader that the user drops in the middle of an epoch must be freed with its data.
        self.entries: list[_Entry] = []
        """The loaders, as a plain attribute for code that runs at every step."""

    def enter(self, loader: Any) -> None:
        """Make ``loader`` the active one. Call it at the start of an epoch."""
        outer = [(each, _num_read(each)) for each in self.entered()]
        self.entries.append(
            _Entry(_current_command(), weakref.ref(loader), {id(each): number for each, number in outer})
        )

    def leave(self, loader: Any) -> None:
        """Forget ``loader``, whose epoch has ended or was left early. The enclosing loader, if any, is active again."""
        for position in range(len(self.entries) - 1, -1, -1):
            if self.entries[position].loader() is loader:
                del self.entries[position]
                return

    def forget_earlier_commands(self) -> None:
        """Forget loaders that earlier cells left in the middle of an epoch, and that a traceback or a variable keeps
        alive.
        """
        now = _current_command()
        self.entries = [entry for entry in self.entries if entry.command == now]

    @property
    def innermost(self) -> Any:
        """The active loader; None if no loader is being read."""
        while self.entries:
            loader = self.entries[-1].loader()
            if loader is not None:
                return loader
            self.entries.pop()
        return None

    def ending(self) -> Any:
        """Return a loader whose last batch is in use: the active loader, or one that is read alternately with it.

        Return None if there is no such loader. The loader of an enclosing loop does not count.
        """
        active = self.innermost
        if active is None or active.end_of_dataloader:
            return active
        is_in_turns = self._is_in_turns
        return next(
            (loader for loader in self.entered() if loader.end_of_dataloader and is_in_turns(loader)), None
        )

    def in_turns(self) -> list[Any]:
        """Return the other loaders that are read alternately with the active one, as in ``zip(a, b)``."""
        return [loader for loader in self.entered() if self._is_in_turns(loader)]

    def _is_in_turns(self, loader: Any) -> bool:
        """Return whether ``loader`` has been read since the loop over the active loader began."""
        return _num_read(loader) > self.entries[-1].num_read.get(id(loader), _num_read(loader))

    def entered(self) -> list[Any]:
        """Return all loaders being read, outermost first."""
        loaders = (entry.loader() for entry in self.entries)
        return [loader for loader in loaders if loader is not None]


class Window:
    """One accumulation window: the micro-steps since its models' gradients were last synchronised.

    Args:
        modules: the user's modules; empty: the window does not belong to particular models.

    ``step`` counts micro-steps since a loader last ended, and ``size`` counts them since the last synchronisation.
    ``is_short`` is True if the window ends with fewer micro-steps than usual, for example at the end of a loader.
    ``passed`` has weak references to the models, or to their wrappers, that the user passed last.
    """

    def __init__(self, modules: Sequence[torch.nn.Module] = ()) -> None:
        self.step = 0
        self.size = 0
        self.sync_gradients = True
        self.is_short = False
        self.passed: list[weakref.ref[Any]] = []
        self._modules = [weakref.ref(module) for module in modules]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The window's models that still exist."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def is_of(self, modules: Sequence[torch.nn.Module]) -> bool:
        """Return whether the window belongs to exactly these models."""
        references = self._modules
        if len(references) != len(modules):
            return False
        return all(reference() is module for reference, module in zip(references, modules, strict=True))

    def take_over(self, modules: Sequence[torch.nn.Module]) -> None:
        """Assign the window to these models."""
        self.passed = []
        self._modules = [weakref.ref(module) for module in modules]

    @property
    def parameters(self) -> set[int]:
        """The ids of the models' parameters."""
        return {id(parameter) for module in self.modules for parameter in module.parameters()}


class AccumulationState:
    """The accumulation windows of an Accelerator, and the prepared loaders being read.

    The loaders include those whose loops began before the Accelerator was created, but not those that an earlier cell
    or session command left in the middle of an epoch.

    ``sync_gradients`` is True if the current micro-step ends in an optimizer step. ``step`` counts micro-steps since
    a loader last ended. Both belong to the window that was entered last. ``are_gradients_reduced`` is True if the user
    has already averaged gradients over ranks, so that the next step must not average them again. ``plugin`` has the
    settings, and can be assigned. ``entered`` is the window of the innermost open micro-step.

    Args:
        loaders: the loaders that the process is reading; None: no loaders.
        plugin: the settings.
    """

    def __init__(
        self, loaders: LoaderStack | None = None, plugin: GradientAccumulationPlugin | None = None
    ) -> None:
        self.plugin = plugin or GradientAccumulationPlugin()
        self.are_gradients_reduced = False
        self.has_named_short_window = False
        self.current = Window()
        self.windows = [self.current]
        """All windows. If there is only one, :meth:`window_for` is not needed."""
        self.entered: Window | None = None
        self._of_optimizers: weakref.WeakKeyDictionary[Any, list[Window]] = weakref.WeakKeyDictionary()
        self._is_joining = False
        self.loaders = loaders or LoaderStack()
        self.loaders.forget_earlier_commands()

    @property
    def step(self) -> int:
        """Micro-steps of the current window since a loader last ended. An assignment sets it for all windows."""
        return self.current.step

    @step.setter
    def step(self, step: int) -> None:
        for window in self.windows:
            window.step = step

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends in an optimizer step; settable."""
        return self.current.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.current.sync_gradients = value

    @property
    def num_steps(self) -> int:
        """Number of micro-steps per optimizer step; settable, for later windows."""
        return self.plugin.num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self.plugin = dataclasses.replace(self.plugin, num_steps=num_steps)  # don't change the user's plugin

    @property
    def open_window(self) -> Window | None:
        """A window whose gradients no optimizer step has used yet; None if all windows have ended."""
        return next((window for window in self.windows if window.size and not window.sync_gradients), None)

    def enter(self, window: Window) -> Window | None:
        """Begin a micro-step of ``window``: decide whether it ends in an optimizer step. Called in every micro-step.

        Return the enclosing window, for :meth:`leave`; None if there is none.
        """
        plugin, entries = self.plugin, self.loaders.entries
        window.size = 1 if window.sync_gradients else window.size + 1
        window.step += 1
        window.sync_gradients = window.step % plugin.num_steps == 0
        if entries:
            loader = entries[-1].loader()
            if loader is None or len(entries) > 1:
                loader = self.loaders.ending()
            if loader is not None and loader.end_of_dataloader and plugin.sync_with_dataloader:
                window.step = 0  # the next epoch starts a fresh window
                # In ``join_uneven_inputs``, ranks may read unequal numbers of batches from the loader.
                ends_alone = self._is_joining and bool(loader.is_uneven)
                window.sync_gradients = window.sync_gradients or not ends_alone
        window.is_short = window.sync_gradients and window.size < plugin.num_steps
        outer, self.entered = self.entered, window
        self.current = window
        return outer

    def leave(self, outer: Window | None) -> None:
        """End the current micro-step, and return to the enclosing window ``outer``."""
        self.entered = outer
        if outer is not None:
            self.current = outer

    def window_of(self, modules: Sequence[torch.nn.Module]) -> Window:
        """Return the window of exactly these models; create it if there is none.

        Raises:
            RuntimeError: some of the models are in the middle of another window.
        """
        if self.current.is_of(modules):
            return self.current
        self.windows = [window for window in self.windows if window.modules or window is self.current]
        for window in self.windows:
            if window.is_of(modules):
                return window
        related = [
            window
            for window in self.windows
            if any(module is accumulated for module in modules for accumulated in window.modules)
        ]
        for window in related:
            if not window.sync_gradients:
                raise RuntimeError(_changed(window, modules))
        self._of_optimizers.clear()
        self.windows = [window for window in self.windows if window not in related]
        nameless = next((window for window in self.windows if not window.modules), None)
        if nameless is not None and self.entered is None:
            nameless.take_over(modules)  # its counts may come from a checkpoint
            return nameless
        made = related[0] if len(related) == 1 else Window()
        made.take_over(modules)
        self.windows.append(made)
        return made

    def window_for(self, optimizer: Any) -> Window:
        """Return the window that decides when an optimizer steps: the window of the models whose parameters it has.

        Args:
            optimizer: a prepared optimizer, with a method ``has_any(ids of parameters)``.

        Raises:
            RuntimeError: the optimizer has parameters of several models whose windows end at different micro-steps.
        """
        if len(self.windows) == 1:
            return self.current
        windows = self._of_optimizers.get(optimizer)
        if windows is None:
            windows = [window for window in self.windows if optimizer.has_any(window.parameters)]
            self._of_optimizers[optimizer] = windows
        if len({window.sync_gradients for window in windows}) > 1:
            names = " and ".join(_named(window.modules) for window in windows)
            raise RuntimeError(
                f"an optimizer has parameters of models that are accumulated separately, by {names}, and their "
                "windows end at different micro-steps. Pass all of the optimizer's models to one block, "
                "accelerator.accumulate(first, second), or give each model its own optimizer"
            )
        return windows[0] if windows and self.current not in windows else self.current

    @property
    def syncs_each_batch(self) -> bool:
        """Whether ranks average gradients in every micro-step.

        False in ``join_uneven_inputs``: a rank without data contributes zeros, so gradients that were already averaged
        in earlier micro-steps would be averaged with zeros.
        """
        return self.plugin.sync_each_batch and not self._is_joining

    def forget_owners(self) -> None:
        """Forget which windows belong to which optimizers, because an optimizer's parameters have changed."""
        self._of_optimizers.clear()

    def gradient_factor(self, optimizer: Any) -> float:
        """Return the factor that turns gradients divided by ``num_steps`` into the mean over the optimizer's window."""
        window = self.window_for(optimizer)
        return self.num_steps / window.size if window.sync_gradients and window.size else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of all windows, for a rank that has taken fewer micro-steps."""
        return {"windows": [(window.step, window.size, window.sync_gradients) for window in self.windows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counts of all windows that have begun here to another rank's counts."""
        for window, (step, size, sync_gradients) in zip(self.windows, state["windows"], strict=False):
            window.step, window.size, window.sync_gradients = step, size, sync_gradients

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Make all ranks reduce gradients in the same micro-steps of the block, even if some loaders end early.

        If ranks have unequal numbers of batches, the end of a loader does not close a window in the block.
        """
        before, self._is_joining = self._is_joining, True
        try:
            yield
        finally:
            self._is_joining = before

    def __reduce__(self) -> tuple[Any, ...]:
        # An unpickled optimizer uses the window of the process that unpickled it.
        return _of_this_process, ()

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of the active loader."""
        loader = self.loaders.innermost
        return loader is not None and bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Number of real rows in the last global batch of the active loader: 0 means all of them, -1 unknown."""
        loader = self.loaders.innermost
        return -1 if loader is None else int(loader.remainder)


def _named(modules: Sequence[torch.nn.Module]) -> str:
    return f"accumulate({', '.join(type(module).__name__ for module in modules)})"


def _changed(window: Window, modules: Sequence[torch.nn.Module]) -> str:
    return (
        f"{_named(modules)} was entered in the middle of the window of {_named(window.modules)}, after "
        f"{window.size} micro-steps. Gradients of a model that is passed to only one of the two would not be averaged "
        "over ranks. Keep passing the same models until accelerator.sync_gradients is True, which ends the window"
    )


def _of_this_process() -> AccumulationState:
    shared = context.current().training
    return AccumulationState() if shared is None else shared.accumulation
