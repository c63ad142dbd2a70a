"""Detects which objects of libraries a function has trained or filled.

estimators      of scikit-learn, and of libraries that follow it: attributes whose names end with ``_``
pipelines       spaCy's: parameters of the components' models
trainers        transformers': the state, which each training replaces; Lightning's: the number of steps
tokenizers      transformers': the number of tokens
boosters        xgboost's and lightgbm's: the number of rounds

Other objects of libraries are left out, because their attributes may be caches.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from nblaunch.user_code import module_of

_MAX_DEPTH = 4
"""Maximum depth of estimators inside estimators."""
_MAX_ITEMS = 100
_MAX_CHECKED_BYTES = 1 << 20
"""Only the first and last elements of a larger array are read, so changes between them are not found."""

_MEASURES: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("transformers", "PreTrainedTokenizerBase"): len,
    ("transformers", "Trainer"): lambda trainer: _Same(trainer.state),
    ("pytorch_lightning", "Trainer"): lambda trainer: trainer.global_step,
    ("lightning", "Trainer"): lambda trainer: trainer.global_step,
    ("sklearn", "BaseEstimator"): lambda estimator: list(_learnt(estimator, _MAX_DEPTH)),
    ("spacy", "Language"): lambda pipeline: list(_parameters(pipeline)),
    ("xgboost", "Booster"): lambda booster: booster.num_boosted_rounds(),
    ("lightgbm", "Booster"): lambda booster: booster.current_iteration(),
}
"""Package and name of a class -> function that returns a value that differs once an object has learnt."""


def watch(value: Any) -> Callable[[Any], bool] | None:
    """Return a function that checks whether an object has learnt since now; None if its kind is unknown."""
    for kind in type(value).__mro__:
        measure = _MEASURES.get((module_of(kind).partition(".")[0], kind.__name__))
        if measure is not None:
            before = measure(value)
            return lambda value: measure(value) != before
    return None


def _learnt(estimator: Any, depth: int) -> Iterator[tuple[Any, ...]]:
    """Yield the learnt attributes of an estimator and of the estimators inside it, in a comparable form."""
    for name, value in vars(estimator).items():
        is_learnt = name.endswith("_") and not name.startswith("_") and not name.endswith("vocabulary_")
        if is_learnt or name == "_Booster":
            yield name, _digest(value)
        elif depth:
            for part in _estimators_in(value):
                yield from _learnt(part, depth - 1)


def _estimators_in(value: Any) -> Iterator[Any]:
    """Yield the estimators in a parameter, which may be an estimator or a list of named steps (tuples)."""
    sklearn: Any = sys.modules["sklearn.base"]
    parts = value[:_MAX_ITEMS] if type(value) is list else [value]
    for part in parts:
        for each in part if type(part) is tuple else [part]:
            if isinstance(each, sklearn.BaseEstimator):
                yield each


def _digest(value: Any) -> Any:
    """Return a digest to compare with a later one; it must show changes to ``value`` in place."""
    numpy = sys.modules["numpy"]
    if type(value) is numpy.ndarray and value.dtype.kind in "biufc":
        return value.shape, _checksum(value)
    if type(value) in (int, float, str):
        return value
    if type(value) is list:  # warm_start adds trees to a forest's list
        return len(value), _Same(value)
    return _Same(value)


class _Same:
    """Compares an object by identity, and keeps it alive so that no other object gets the same identity."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def _parameters(pipeline: Any) -> Iterator[tuple[str, str, int]]:
    """Yield the component, the name and a checksum of each parameter of a spaCy pipeline."""
    for component, pipe in pipeline.pipeline:
        model: Any = getattr(pipe, "model", None)
        for node in model.walk() if hasattr(model, "walk") else ():
            for name in node.param_names:
                if node.has_param(name):
                    yield component, name, _checksum(node.get_param(name))


def _checksum(array: Any) -> int:
    """Return a checksum of an array; if it is large, only of its first and last elements."""
    flat = array.reshape(-1)
    if flat.nbytes > _MAX_CHECKED_BYTES:
        half = _MAX_CHECKED_BYTES // flat.itemsize // 2
        return zlib.crc32(flat[:half].tobytes(), zlib.crc32(flat[-half:].tobytes()))
    return zlib.crc32(flat.tobytes())
