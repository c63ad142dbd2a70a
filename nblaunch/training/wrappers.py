"""What stands around a person's module: wrappers that communicate, and those of :func:`torch.compile`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn.parallel import DataParallel, DistributedDataParallel

from nblaunch.training import compiling

_communicating: Any = (DistributedDataParallel, DataParallel)


def add_wrapper(kind: type) -> None:
    """Have :func:`unwrap` know a class whose instances hold the person's module as ``.module``."""
    global _communicating
    if kind not in _communicating:
        _communicating += (kind,)


def unwrap(model: Any) -> Any:
    """The module inside any number of wrappers that communicate, whoever put them there; it may be a compiled one."""
    while isinstance(model, _communicating):
        model = model.module
    return model


def layers(model: Any) -> Iterator[Any]:
    """``model`` and all that is inside it, down to the person's own module, whatever the order of the wrappers."""
    yield model
    while (inner := _inside(model)) is not model:
        yield (model := inner)


def bare_module(model: Any) -> Any:
    """The person's own module: the one whose names are on disk."""
    *_, bare = layers(model)
    return bare


def _inside(model: Any) -> Any:
    return model.module if isinstance(model, _communicating) else compiling.inner_of(model)
