"""Parts per process of an Accelerator: one that was made in a notebook cell has others in each worker.

    accelerator = Accelerator(mixed_precision="bf16")     # in a cell: one process, rank 0 of 1

    def train():
        accelerator.process_index                         # in a worker: built once more, with the same arguments

A worker inherits the object by fork or receives it pickled. The parts that depend on the process are built at their
first use there, so that an object that is not used costs nothing. The notebook's own parts stay as they were; with
``engine="inline"`` both exist in one process. What was registered in the cell (objects and hooks of checkpoints, the
start of trackers) is carried over to them: see :func:`_registered_in`.
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
    "this Accelerator of the notebook has prepared objects for one process, so the ranks would train separately. "
    "Call prepare only inside the function (free_memory() in the notebook drops the prepared objects), or create "
    "the Accelerator there"
)


class _Part:
    """An attribute of :class:`PerProcessParts` with a value per process."""

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
    """Return a part, to be declared in the class of the ``Accelerator`` with its type."""
    return _Part()


class PerProcessParts(ABC):
    """Base of the ``Accelerator``: keeps its parts per process, and builds them at their first use in a worker."""

    _home: ProcessContext | None
    _own_parts: dict[str, Any]
    _arguments: Mapping[str, Any]
    _carried: dict[str, Any]
    _launched: tuple[Callable[[], ProcessContext | None], dict[str, Any]] = (lambda: None), {}
    """A launch that did not make the object, while it lives, and the parts there: of a worker, or inline."""

    def _keep_arguments(self, variables: Mapping[str, Any]) -> None:
        """Keep the arguments of the constructor, which calls this first: this process is the object's own.

        Args:
            variables: the local ones of the constructor.
        """
        if "_own_parts" not in vars(self):
            named = {name: value for name, value in variables.items() if name not in ("self", "unsupported")}
            self._arguments = {**named, **variables["unsupported"]}
            self._home, self._own_parts, self._carried = context.current(), {}, {}

    @abstractmethod
    def _call_constructor(self, arguments: Mapping[str, Any]) -> None:
        """Build the parts of this process with the Accelerator's constructor, not a subclass's."""

    @property
    def _operations(self) -> ModuleType:
        """The collectives, once this process has joined its job: in a worker, one of them may be the first use."""
        self._parts()
        return operations

    def _parts(self) -> dict[str, Any]:
        """Return the parts of this process; build them where there are none. Called several times a step."""
        home = self._home
        if home is not None and home.is_current:
            return self._own_parts
        here = context.current()
        if not here.is_launched:
            return self._own_parts if self._home is not None else self._make_own(here)
        launch, parts = self._launched
        return parts if launch() is here else self._build_here(here)

    def _make_own(self, here: ProcessContext) -> dict[str, Any]:
        """Make this process the object's own: it has no launcher, and the object was unpickled in it."""
        self._home = here
        if not self._own_parts:
            self._call_constructor(self._arguments)
            _register(self._own_parts, self._carried)
        return self._own_parts

    def _build_here(self, here: ProcessContext) -> dict[str, Any]:
        """Build and return the parts of this worker.

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
        # They go with the object, of which a session has one per command, and with an inline launch, once it is over.
        reference = weakref.ref(self)  # a bound method would keep the parts until the collector comes

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
        # Only on the way into a worker: what one has registered may be unfit to leave it.
        carried = _registered_in(parts) if parts is self._own_parts else {}
        return _unpickled, (type(self), arguments), (carried, {})

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        # Apart from the arguments: what was registered may refer to the Accelerator, as a Trainer does.
        self._carried, self._own_parts = state


def _arguments_now(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the constructor for what was assigned to an Accelerator since, in place of the first ones."""
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
    """Return what was registered with an Accelerator, for :func:`_register`."""
    return {"_checkpoints": parts["_checkpoints"].handed_over(), "_trackers": list(parts["_trackers"].starts)}


def _register(parts: Mapping[str, Any], carried: Mapping[str, Any]) -> None:
    """Register objects with the parts of this process that were registered in another process."""
    for name, registered in carried.items():
        parts[name].take_over(registered)


def _unpickled(cls: type[PerProcessParts], arguments: Mapping[str, Any]) -> PerProcessParts:
    """Return the object without parts: the process that loads a call may not be the one that runs it.

    Its ``__setstate__`` adds what is carried over, and those parts that can't be built anew.

    Args:
        cls: its class.
        arguments: of its constructor.
    """
    instance = cls.__new__(cls)
    instance._home, instance._own_parts, instance._carried, instance._arguments = None, {}, {}, arguments
    return instance
