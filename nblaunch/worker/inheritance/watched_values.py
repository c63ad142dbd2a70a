"""How a worker detects that a function has stored results in a value.

containers      have grown, or the containers inside them have
arrays          had one value in all elements, such as 0 or NaN, but no longer have it
tables          have more rows or columns, or a column was filled like an array
tensors         have changed, if they are parameters or belong to an object, as in an average of weights
attributes      are set to a first float, or to a longer container, array, table or tensor; are used as counters
                (``self.n += 1``); new ones have the name of a result

Library objects that were trained or filled:

estimators      of scikit-learn, and of libraries that follow it: attributes whose names end with ``_``
pipelines       spaCy's: parameters of the components' models
trainers        transformers': the state, which each training replaces; Lightning's: the number of steps
tokenizers      transformers': the number of tokens
boosters        xgboost's and lightgbm's: the number of rounds

Other library objects are left out, because their attributes may be caches.
"""

from __future__ import annotations

import math
import re
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from typing import Any, NamedTuple

from nblaunch import packages
from nblaunch.user_code import module_of

HasChanged = Callable[[Any], bool]
"""Takes the current value, and returns whether it differs from the value before the call."""

_MAX_PARTS = 1 << 16
"""Maximum number of elements in a list or dictionary that is examined."""
_MAX_OUTER = 100
"""Maximum number of elements in a list whose containers are examined."""
_MAX_NESTED = 2
"""Maximum depth of containers inside containers."""
_MAX_ARRAY = 1 << 24
"""Maximum number of elements in an array that is examined, which takes 20 ms if all elements are equal."""
_MAX_COLUMNS = 500
_NUM_SAMPLES = 64
_MAX_TENSORS = 2000
_NUM_SUMMED = 8
_MAX_SUMMED_TENSOR = 1 << 16
_MAX_SUMMED = 1 << 20
"""Maximum number of tensor elements to sum in total. Summing this many may take 0.2 s on a slow machine."""
CONTAINERS = (list, dict, set, deque)
_ITERATED = (list, tuple, dict)
_NUMBERS = "biufc"
_BEST = re.compile(r"(^|_)best(_|$)", re.IGNORECASE)
_RESULT = re.compile(
    r"(^|_)(acc|auc|avg|bleu|curve|dice|error|f1|fitness|history|iou|log|loss|losses|mae|metric|mse|ppl|pred|record|"
    r"result|reward|rmse|score|stat|accurac(y|ie)|average|histories|perplexity|prediction|shadow)s?(_|$)|[a-z]_$",
    re.IGNORECASE,
)
"""Names of results; the names of scikit-learn's learnt attributes end with ``_``."""
_FOR_ITSELF = re.compile(
    r"_|.*(cache|memo|lock|seen|regist)|(device|rank|model|scaler|pool|logger|batch|inputs?|labels?|targets?)$",
    re.IGNORECASE,
)
_CLOCK = re.compile(r"(^|_)(t\d|tic|clock|time|start|started)(_|$)", re.IGNORECASE)
"""Names of attributes that hold a time."""


class Variable(NamedTuple):
    """A variable in which a function may keep results.

    Args:
        name: its name, as in ``tracker.values``.
        get: returns its value.
        has_changed: returns whether a value differs from the value before the call.
        owner: the object that has it as an attribute; None = unknown, or a variable.
        is_only_counted: whether the code only adds to it, and never reads it.
    """

    name: str
    get: Callable[[], Any]
    has_changed: Callable[[Any], bool]
    owner: Any = None
    is_only_counted: bool = False

    def is_kept(self, value: Any, kept: Set[int]) -> bool:
        """Return whether the kernel gets the variable's value.

        All small integers of a process with the same value are one object, so that the number in a counter and an
        equal one that the function returns can't be distinguished by their identity.

        Args:
            value: the value.
            kept: ids of the objects that are sent back to the kernel.
        """
        if self.owner is not None and id(self.owner) in kept:
            return True
        return id(value) in kept and not (self.is_only_counted and type(value) is int)


class Watcher:
    """Creates functions that check whether a value has changed.

    Args:
        is_forked: whether this worker may share memory with the kernel.
    """

    def __init__(self, is_forked: bool) -> None:
        self._is_forked = is_forked
        self._to_sum = _MAX_SUMMED
        self._torch: Any = sys.modules.get("torch")

    def watch(self, value: Any, *, is_attribute: bool) -> HasChanged | None:
        """Return a function that checks whether a value has changed; None if the value can't keep results."""
        try:
            if is_attribute or self._is_trainable(value):
                has_changed = self.watch_tensors(value)
                if has_changed is not None:
                    return has_changed
            if isinstance(value, CONTAINERS):
                return _watched_container(value)
            if _is_table(value):
                return _watched_table(value)
            return self._watched_array(value)
        except Exception:  # for example, a sparse tensor has no memory to ask about
            return None

    def watch_tensors(self, value: Any) -> HasChanged | None:
        """Return a function that checks whether a tensor or container of tensors has changed; None for other values."""
        is_container = isinstance(value, _ITERATED)
        tensors = list(_parts(value)) if is_container else [value]
        if not 0 < len(tensors) <= _MAX_TENSORS:
            return None
        if not all(
            packages.is_subclass(type(each), "torch.Tensor") and not each.is_shared() for each in tensors
        ):
            return None
        before = [self._state_of(each) for each in tensors]

        def has_changed(value: Any) -> bool:
            present = list(_parts(value)) if is_container else [value]
            return len(present) > len(before) or any(map(_Tensor.has_changed, before, present))

        return has_changed

    def watch_module(self, module: Any, collected: set[int]) -> Callable[[], bool] | None:
        """Return a function that checks whether a module's tensors have changed; None if there are too many.

        Args:
            module: the module.
            collected: identities of tensors that the kernel gets.
        """

        def tensors() -> dict[str, Any]:
            named = (*module.named_parameters(), *module.named_buffers())
            return {name: tensor for name, tensor in named if id(tensor) not in collected}

        with suppress(Exception):  # for example, a module whose parameters are not initialised yet
            return self._watched_module(tensors)
        return None

    def _watched_module(self, tensors: Callable[[], dict[str, Any]]) -> Callable[[], bool] | None:
        present = tensors()
        if not 0 < len(present) <= _MAX_TENSORS or any(each.is_shared() for each in present.values()):
            return None
        names = list(present)
        # An average, or a layer with statistics, changes as a whole. A trained model changes at least in its last
        # layers, even if others are frozen.
        summed = {*names[:_NUM_SUMMED], *names[-_NUM_SUMMED:]}
        before = {name: self._state_of(tensor, name in summed) for name, tensor in present.items()}
        return lambda: any(
            name in before and before[name].has_changed(each) for name, each in tensors().items()
        )

    def _state_of(self, tensor: Any, may_sum: bool = True) -> _Tensor:
        is_summed = (
            may_sum
            and tensor.device.type == "cpu"
            and tensor.numel() <= min(_MAX_SUMMED_TENSOR, self._to_sum)
            and tensor.dtype.is_floating_point
        )
        self._to_sum -= tensor.numel() if is_summed else 0
        return _Tensor(tensor, is_summed=is_summed)

    def _is_trainable(self, value: Any) -> bool:
        """Return whether a value is a parameter, or a container that begins with one."""
        first = next(iter(_parts(value)), value)
        return self._torch is not None and isinstance(first, self._torch.nn.Parameter)

    def _watched_array(self, value: Any) -> HasChanged | None:
        array = self._array(value)
        if array is None or not _is_unfilled(array):
            return None
        first = _first(array)
        return lambda value: not _is_uniform(self._array(value), first)

    def _array(self, value: Any) -> Any:
        """Return an array, or the array that shares a tensor's memory; None for other values."""
        if module_of(type(value)) == "torch" and type(value).__name__ == "Tensor":
            if value.requires_grad or value.is_shared() or value.device.type != "cpu":
                return None
            value = value.numpy()
        else:
            is_array = module_of(type(value)) == "numpy" and type(value).__name__ == "ndarray"
            if not is_array or (self._is_forked and not _owns_memory(value)):
                return None
        return value if 0 < value.size <= _MAX_ARRAY and value.dtype.kind in _NUMBERS else None


def is_for_itself(name: str) -> bool:
    """Return whether a name suggests that only the function itself uses the variable."""
    return _FOR_ITSELF.match(name) is not None


def is_new_result(attribute: str, value: Any, *, is_of_function: bool = False) -> bool:
    """Return whether an attribute that did not exist before the call holds a result.

    An object often creates attributes for its own use, such as the indices of an epoch, so the attribute's name must be
    a typical name for a result. Any attribute of a function counts, because only users set them.

    Args:
        attribute: name of the attribute.
        value: its value.
        is_of_function: whether it is an attribute of a function.
    """
    if not (is_of_function or _BEST.search(attribute) or _RESULT.search(attribute)):
        return False
    is_part_of_graph = getattr(next(iter(_parts(value)), value), "grad_fn", None) is not None
    return not is_part_of_graph and is_kept(attribute, None, value)


def is_unset(value: Any) -> bool:
    """Return whether a value is None, or a number that a sum or a search for the best value starts from."""
    if type(value) not in (bool, int, float):
        return value is None
    return math.isnan(value) or value in (0, -1, math.inf, -math.inf)


def is_kept(attribute: str, before: Any, now: Any, *, is_counted: bool = False) -> bool:
    """Return whether a function has stored a result in an attribute.

    A function may set other attributes for its own use, such as an integer that holds the rank, or a dictionary of
    options.

    Args:
        attribute: name of the attribute.
        before: its value before the call.
        now: its value after the call, which is another object.
        is_counted: whether the code uses an attribute of this name as a counter, as in ``self.n += 1``.
    """
    kind = type(now)
    if is_counted and (isinstance(now, (int, float)) or packages.is_subclass(kind, "numpy.number")):
        return bool(now != before)
    if isinstance(now, float) or packages.is_subclass(kind, "numpy.floating"):
        is_expected = is_unset(before) or _BEST.search(attribute)
        return bool(is_expected) and now != before and not _CLOCK.search(attribute)
    before = None if is_unset(before) else before
    if not _is_collection(now) or not (before is None or _is_collection(before)):
        return False
    if isinstance(now, dict) and not (_num_kept(now) or _is_of_tensors(now) or _BEST.search(attribute)):
        return False
    num_before = 0 if before is None else _length(before)
    return _length(now) > num_before or _is_of_tensors(now)


def _is_collection(value: Any) -> bool:
    is_numeric = packages.is_subclass(type(value), "torch.Tensor", "numpy.ndarray")
    return isinstance(value, CONTAINERS) or _is_table(value) or is_numeric


def _is_of_tensors(value: Any) -> bool:
    return packages.is_subclass(type(next(iter(_parts(value)), value)), "torch.Tensor")


def _length(value: Any) -> int:
    """Return the number of elements, or of an array's rows; a single number counts as one."""
    return 1 if getattr(value, "ndim", None) == 0 else len(value)


# --- containers, arrays and tables -----------------------------------------------------------------------------------


def _watched_container(value: Any) -> HasChanged:
    was_empty, size = _is_empty(value), _num_kept(value)
    return lambda value: _num_kept(value) > size or (was_empty and not _is_empty(value))


def _num_kept(value: Any, depth: int = _MAX_NESTED) -> int:
    """Return the number of elements, including elements of nested containers.

    A dictionary may hold options, so only its containers count.
    """
    if isinstance(value, dict) and len(value) <= _MAX_PARTS:
        containers = [part for part in value.values() if isinstance(part, CONTAINERS)]
        return sum(map(len, containers)) + _num_nested(containers, depth)
    return len(value) + (_num_nested(value, depth) if type(value) is list else 0)


def _num_nested(parts: list[Any], depth: int) -> int:
    """Return the number of elements of the containers in ``parts``; 0 for a long list, which holds data."""
    if not depth or len(parts) > _MAX_OUTER:
        return 0
    return sum(_num_kept(part, depth - 1) for part in parts if isinstance(part, CONTAINERS))


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(is_unset(part) or (isinstance(part, CONTAINERS) and not part) for part in value.values())
    # This includes a list of zeros, one for each epoch.
    if type(value) is list and len(value) <= _MAX_PARTS:
        return all(map(is_unset, value))
    return not value


def _first(array: Any) -> Any:
    return array.reshape(-1)[0].item()


def _is_unfilled(array: Any) -> bool:
    """Return whether all elements of an array are the same number, for which :func:`is_unset` is true."""
    return is_unset(_first(array)) and _is_uniform(array)


def _is_uniform(array: Any, first: Any = None) -> bool:
    """Return whether all elements of an array are equal, and equal to ``first`` if it is given. NaN equals NaN."""
    flat = array.reshape(-1)
    first = flat[0].item() if first is None else first
    # Most arrays hold data, and a few elements are enough to show this.
    return all(
        bool((part == first).all() if first == first else (part != part).all())
        for part in (flat[:: max(1, flat.size // _NUM_SAMPLES)], flat)
    )


def _owns_memory(array: Any) -> bool:
    """Return whether an array, or its base, has memory of its own, not a file's memory or shared memory."""
    while type(array.base) is type(array):
        array = array.base
    return bool(array.flags.owndata)


def _is_table(value: Any) -> bool:
    return type(value).__name__ in ("DataFrame", "Series") and module_of(type(value)).startswith("pandas")


def _watched_table(table: Any) -> HasChanged:
    shape = table.shape
    columns = list(_number_columns(table))
    before = {name: _first(column) for name, column in columns if _is_unfilled(column)}

    def has_changed(table: Any) -> bool:
        return any(now > was for was, now in zip(shape, table.shape, strict=True)) or any(
            name in before and not _is_uniform(column, before[name])
            for name, column in _number_columns(table)
        )

    return has_changed


def _number_columns(table: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the name and the array of each numeric column."""
    columns = [(None, table)] if table.ndim == 1 else table.items()
    for (name, column), _ in zip(columns, range(_MAX_COLUMNS), strict=False):
        if 0 < column.size <= _MAX_ARRAY and getattr(column.dtype, "kind", "O") in _NUMBERS:
            yield name, column.to_numpy()


# --- tensors ---------------------------------------------------------------------------------------------------------


class _Tensor:
    """The state of a tensor at the start of the function: torch's version counter, and the sum of its elements.

    The sum is needed because changes through ``tensor.data`` bypass the counter.

    Args:
        tensor: the tensor, which this object doesn't keep alive.
        is_summed: whether to compute the sum.
    """

    def __init__(self, tensor: Any, *, is_summed: bool) -> None:
        self._tensor, self._is_summed = weakref.ref(tensor), is_summed
        self._form = tensor.shape, tensor.device, tensor.dtype
        self._version = self._version_of(tensor)

    def has_changed(self, present: Any) -> bool:
        """Return whether the tensor has changed, or was replaced by a new one with its form, as happens to an average.

        A tensor that was only moved to a device or converted does not count as changed.
        """
        form = tuple(getattr(present, name, None) for name in ("shape", "device", "dtype"))
        if form != self._form:
            return False
        return present is not self._tensor() or self._version_of(present) != self._version

    def _version_of(self, tensor: Any) -> tuple[int, float]:
        total = float(tensor.detach().double().abs().sum()) if self._is_summed else 0.0
        return tensor._version, 0.0 if math.isnan(total) else total  # NaN differs from itself


def _parts(value: Any) -> Iterator[Any]:
    """Yield the elements of a list, tuple or dictionary."""
    if type(value) in (list, tuple):
        yield from value
    elif isinstance(value, dict):
        yield from dict.values(value)


# --- objects of libraries --------------------------------------------------------------------------------------------

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


def watch_training(value: Any) -> HasChanged | None:
    """Return a function that checks whether an object has learnt since this call; None if its kind is unknown."""
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
    """Return a digest to compare with a later one; it must reveal in-place changes to ``value``."""
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
