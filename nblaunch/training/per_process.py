"""Keeps an Accelerator's parts per process: an object from a notebook cell has separate parts in each worker.

    accelerator = Accelerator(mixed_precision="bf16")     # in a cell: one process, rank 0 of 1

    def train():
        accelerator.process_index                         # in a worker: rebuilt with the same arguments

A worker inherits the object by fork or receives it pickled. The worker rebuilds the parts that depend on the process
when they are first used, so an unused object costs nothing. The notebook's own parts do not change; with
``engine="inline"``, the notebook's and the worker's parts exist in the same process. Registrations made in the cell
(checkpointed objects, checkpoint hooks, started trackers) also apply in workers; see :func:`_registered_in`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from nblaunch import context
from nblaunch.context import ProcessContext
from nblaunch.training.collectives import operations

_HAS_PREPARED = (
    "this Accelerator has prepared objects in the notebook for a single process, so the ranks would train "
    "separately. Call prepare only inside the function (call free_memory() in the notebook to drop the prepared "
    "objects), or create the Accelerator inside the function"
)


class _Part:
    """An attribute of :class:`PerProcessParts` with a separate value in each process."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: PerProcessParts | None, owner: type) -> Any:
        if instance is None:
            return self
        try:
            return instance._parts()[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: PerProcessParts, value: Any) -> None:
        instance._parts()[self._name] = value


def part() -> Any:
    """Declare a part of the ``Accelerator`` as a class attribute."""
    return _Part()


class PerProcessParts(ABC):
    """Base class for the ``Accelerator``: keeps its parts per process, and rebuilds them on first use in a worker."""

    _home: ProcessContext | None
    _own_parts: dict[str, Any]
    _arguments: Mapping[str, Any]
    _carried: dict[str, Any]
    _launched: tuple[Callable[[], ProcessContext | None], dict[str, Any]] = (lambda: None), {}
    """A weak reference to the launch that uses an object created elsewhere, and the object's parts in that launch."""

    def _keep_arguments(self, variables: Mapping[str, Any]) -> None:
        """Store the constructor's arguments, and make this process the object's home. The constructor calls this first.

        Args:
            variables: the constructor's local variables.
        """
        if "_own_parts" not in vars(self):
            named = {name: value for name, value in variables.items() if name not in ("self", "unsupported")}
            self._arguments = {**named, **variables["unsupported"]}
            self._home, self._own_parts, self._carried = context.current(), {}, {}

    @abstractmethod
    def _call_constructor(self, arguments: Mapping[str, Any]) -> None:
        """Build this process's parts with the Accelerator's constructor, rather than a subclass's."""

    @property
    def _operations(self) -> ModuleType:
        """The collectives. In a worker, this joins the job if the object has not been used before."""
        self._parts()
        return operations

    def _parts(self) -> dict[str, Any]:
        """Return this process's parts, building them if necessary. Called several times per step."""
        home = self._home
        if home is not None and home.is_current:
            return self._own_parts
        here = context.current()
        if not here.is_launched:
            return self._own_parts if self._home is not None else self._make_own(here)
        launch, parts = self._launched
        return parts if launch() is here else self._build_here(here)

    def _make_own(self, here: ProcessContext) -> dict[str, Any]:
        """Make this process, which has no launcher, the home of an unpickled object."""
        self._home = here
        if not self._own_parts:
            self._call_constructor(self._arguments)
            _register(self._own_parts, self._carried)
        return self._own_parts

    def _build_here(self, here: ProcessContext) -> dict[str, Any]:
        """Build and return this worker's parts.

        Raises:
            RuntimeError: objects were prepared in the notebook.
        """
        arguments, carried = self._arguments, self._carried
        if self._own_parts:
            if self._own_parts["_preparer"].has_prepared:
                raise RuntimeError(_HAS_PREPARED)
            arguments = {**arguments, **_arguments_now(self._own_parts)}
            carried = _registered_in(self._own_parts)
        parts: dict[str, Any] = {}
        # The parts are dropped with the object (each session command has its own object), and after an inline launch.
        reference = weakref.ref(self)  # a bound method would keep the parts alive until garbage collection

        def forget(_: object) -> None:
            instance = reference()
            if instance is not None:
                instance._forget_launch()

        self._launched = weakref.ref(here, forget), parts
        try:
            self._call_constructor(arguments)
            _register(parts, carried)
        except BaseException:
            self._forget_launch()
            raise
        return parts

    def _forget_launch(self) -> None:
        del self._launched

    def __reduce__(self) -> tuple[Any, ...]:
        launch, launched = self._launched
        parts = launched if launch() is context.current() else self._own_parts
        if not parts:
            return _unpickled, (type(self), self._arguments), (self._carried, {})
        arguments = {**self._arguments, **_arguments_now(parts)}
        if parts["_preparer"].has_prepared:
            return _unpickled, (type(self), arguments), ({}, parts)
        # Pass registrations into workers, but not back: a worker's own registrations may not be picklable.
        carried = _registered_in(parts) if parts is self._own_parts else {}
        return _unpickled, (type(self), arguments), (carried, {})

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        # The state is separate from the arguments, because registered objects may refer to the Accelerator, as a
        # Trainer does.
        self._carried, self._own_parts = state


def _arguments_now(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return constructor arguments with the current values of settings, which the user may have changed."""
    preparer = parts["_preparer"]
    return {
        "device_placement": preparer.device_placement,
        "split_batches": None,
        "dataloader_config": preparer.dataloader_config,
        "rng_types": preparer.rng_types,
        "step_scheduler_with_optimizer": preparer.step_scheduler_with_optimizer,
        "kwargs_handlers": list(parts["_handlers"].values()),
        "gradient_accumulation_steps": 1,
        "gradient_accumulation_plugin": preparer.accumulation.plugin,
    }


def _registered_in(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return an Accelerator's registered objects, hooks, and calls that start trackers, for :func:`_register`."""
    return {"_checkpoints": parts["_checkpoints"].handed_over(), "_trackers": list(parts["_trackers"].starts)}


def _register(parts: Mapping[str, Any], carried: Mapping[str, Any]) -> None:
    """Apply another process's registrations to this process's parts."""
    for name, registered in carried.items():
        parts[name].take_over(registered)


def _unpickled(cls: type[PerProcessParts], arguments: Mapping[str, Any]) -> PerProcessParts:
    """Return the object without building its parts, because this process may not be the one that uses it.

    The object's ``__setstate__`` adds registrations, and parts that can't be rebuilt.

    Args:
        cls: the object's class.
        arguments: its constructor's arguments.
    """
    instance = cls.__new__(cls)
    instance._home, instance._own_parts, instance._carried, instance._arguments = None, {}, {}, arguments
    return instance
