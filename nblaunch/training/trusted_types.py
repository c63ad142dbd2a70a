"""Which classes a checkpoint file may name when it is read: only classes of data, so that no code of its writer
runs."""

from __future__ import annotations

import datetime
import decimal
import fractions
import importlib
import io
import pathlib
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from nblaunch import user_code

# Which classes a file may name beside torch's own types, when it has the state of a registered object.
_PLAIN = [
    datetime.date,
    datetime.datetime,
    datetime.timedelta,
    datetime.timezone,
    decimal.Decimal,
    fractions.Fraction,
    io.BytesIO,  # extra states of TransformerEngine
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    types.SimpleNamespace,
]


@contextmanager
def trusting(kinds: Sequence[Any]) -> Iterator[None]:
    """Let ``torch.load`` with ``weights_only=True`` make these, too, in the block."""
    trusted = torch.serialization.get_safe_globals()
    # Without those that the user has registered: at the end, torch forgets all that it is given here.
    with torch.serialization.safe_globals([kind for kind in kinds if kind not in trusted]):
        yield


def trusted_types(owner: Any = None) -> list[Any]:
    """Return the classes that a file may name beside torch's own types: no library's code is called to make them.

    Args:
        owner: the registered object, model or optimizer whose state is read. Classes of the notebook or script are
            trusted, and so are the classes of the owner's module, unless it belongs to a library. What these modules
            have merely imported is not.
    """
    if owner is None:
        return _numpy_types()
    modules = {"__main__"}
    file = getattr(sys.modules.get(type(owner).__module__), "__file__", None)
    if file and user_code.is_user_file(file):
        modules.add(type(owner).__module__)
    # Copied at once: other threads may define names meanwhile.
    values = [(name, value) for name in modules for value in list(vars(sys.modules[name]).values())]
    defined_here = [
        value for name, value in values if issubclass(type(value), type) and value.__module__ == name
    ]
    return [*_numpy_types(), *_PLAIN, *defined_here]


def _numpy_types() -> list[Any]:
    """Return what a NumPy number or array in a state dict is made of: plain data, but torch refuses it by default."""
    import numpy

    # NumPy 1.26 has this module for what newer ones have pickled, and loads it only when it is asked for.
    multiarray: Any = importlib.import_module("numpy._core.multiarray")
    dtypes = [kind for kind in vars(numpy.dtypes).values() if isinstance(kind, type)]
    made_by = [multiarray._reconstruct, multiarray.scalar]
    # A file has the names of the NumPy that wrote it, which is 1 or 2.
    others = [_renamed(maker, name) for maker in made_by for name in _MULTIARRAY if name != maker.__module__]
    return [*made_by, *others, numpy.ndarray, numpy.dtype, *dtypes]


_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")


@cache  # torch keeps what it is given by name and forgets it by identity
def _renamed(function: Any, module_name: str) -> Any:
    """Return ``function`` as torch finds it in a file that names its module so."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__module__, call.__qualname__ = module_name, function.__name__
    return call
