"""The classes that a checkpoint file may name when it is read. They hold only data, so the file can't run code."""

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

# Classes that a registered object's file may name, in addition to torch's own types.
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
    """Allow ``torch.load`` with ``weights_only=True`` to create objects of these classes within the block."""
    trusted = torch.serialization.get_safe_globals()
    # Leave out classes that the user has registered, because torch forgets all classes passed here when the
    # block ends.
    with torch.serialization.safe_globals([kind for kind in kinds if kind not in trusted]):
        yield


def trusted_types(owner: Any = None) -> list[Any]:
    """Return the classes that a file may name in addition to torch's own types.

    Creating instances of these classes does not run any library's code.

    Args:
        owner: the registered object, model or optimizer that the state belongs to. Trusted classes are those that the
            notebook or script defines, and those that the owner's module defines, unless it belongs to a library.
            Classes that these modules only import are not trusted.
    """
    if owner is None:
        return _numpy_types()
    modules = {"__main__"}
    if user_code.has_user_class(owner):
        modules.add(type(owner).__module__)
    # Copy the values in one call, because other threads may define names in the meantime.
    values = [(name, value) for name in modules for value in list(vars(sys.modules[name]).values())]
    defined_here = [
        value for name, value in values if issubclass(type(value), type) and value.__module__ == name
    ]
    return [*_numpy_types(), *_PLAIN, *defined_here]


def _numpy_types() -> list[Any]:
    """Return the types in a pickled NumPy number or array. They are plain data, but torch rejects them by default."""
    import numpy

    # NumPy 1.26 has this module to read pickles from newer versions, and imports it only on request.
    multiarray: Any = importlib.import_module("numpy._core.multiarray")
    dtypes = [kind for kind in vars(numpy.dtypes).values() if isinstance(kind, type)]
    made_by = [multiarray._reconstruct, multiarray.scalar]
    # A file contains the module names of the NumPy version that wrote it: 1 or 2.
    others = [_renamed(maker, name) for maker in made_by for name in _MULTIARRAY if name != maker.__module__]
    return [*made_by, *others, numpy.ndarray, numpy.dtype, *dtypes]


_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")


@cache  # torch stores these functions by name, but removes them by identity
def _renamed(function: Any, module_name: str) -> Any:
    """Return a copy of ``function`` with the module name that files from another NumPy version contain."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__module__, call.__qualname__ = module_name, function.__name__
    return call
