"""Which classes a file of a checkpoint may name: plain ones and the user's own, so that no library's code is called.

``torch.load(weights_only=True)`` makes tensors, numbers, texts and their containers. States of registered objects often
hold a little more: a path, a date, a configuration whose class a cell defined.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import importlib
import pathlib
import sys
import types
from typing import Any

from nblaunch import user_code

_PLAIN = [
    datetime.date,
    datetime.datetime,
    datetime.timedelta,
    datetime.timezone,
    decimal.Decimal,
    fractions.Fraction,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    types.SimpleNamespace,
]


def trusted_types(owner: Any = None) -> list[Any]:
    """Return what may be named beside torch's own types.

    Args:
        owner: the object whose state is read. Classes of the notebook or script are trusted, and those of the owner's
            module, unless it is a library's. What these modules have merely imported is not.
    """
    if owner is None:
        return _numpy_types()
    modules = {"__main__"}
    file = getattr(sys.modules.get(type(owner).__module__), "__file__", None)
    if file and user_code.is_user_file(file):
        modules.add(type(owner).__module__)
    return [*_numpy_types(), *_PLAIN, *(kind for name in modules for kind in _classes_of(name))]


def _classes_of(name: str) -> list[type]:
    found = list(vars(sys.modules[name]).values())
    return [value for value in found if issubclass(type(value), type) and value.__module__ == name]


def _numpy_types() -> list[Any]:
    """Return what a NumPy number or array in a state dict is made of: plain data, but torch refuses it by default."""
    import numpy

    # NumPy 1.26 has this module for what newer ones have pickled, and loads it only when it is asked for.
    multiarray: Any = importlib.import_module("numpy._core.multiarray")
    dtypes = [kind for kind in vars(numpy.dtypes).values() if isinstance(kind, type)]
    return [multiarray._reconstruct, multiarray.scalar, numpy.ndarray, numpy.dtype, *dtypes]
