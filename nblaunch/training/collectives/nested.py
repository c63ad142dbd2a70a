"""Functions that walk nested batches and outputs, and replace their leaves. Nothing here communicates.

Sequences, mappings, dataclasses and attrs classes are containers. A container keeps its class, its keys and its
attributes (``default_factory``, ``maxlen``, attributes of a subclass), whatever its constructor's arguments are,
because a copy of the container gets the new contents. A container that can't be copied is created with its
constructor, and the result is checked.
"""

from __future__ import annotations

import array
import copy
import dataclasses
from collections import UserList, UserString, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from nblaunch import formatting


class Leaf:
    """Base class for objects that are leaves even though they are dataclasses or sequences."""

    __slots__ = ()


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the items of ``generator`` in a sequence of the same type as ``obj``, for example a named tuple."""
    return rebuilt_sequence(obj, list(generator))


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Replace every leaf of ``data`` with ``function(leaf)``; :func:`children` defines leaves."""
    parts = children(data)
    if parts is None:
        return function(data)
    return rebuilt(data, [map_leaves(function, part) for part in parts])


def leaves(data: Any) -> Iterator[Any]:
    """Yield the leaves of ``data`` in order."""
    parts = children(data)
    if parts is None:
        yield data
    else:
        for part in parts:
            yield from leaves(part)


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Replace every tensor in ``data`` with ``function(tensor)``; other leaves are kept."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, data)


def is_namedtuple(data: Any) -> bool:
    """Return whether ``data`` is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether ``tensor`` is a tensor."""
    return isinstance(tensor, torch.Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return ``data`` with ``func(leaf, *args, **kwargs)`` in place of its leaves.

    Args:
        func: function of one leaf.
        data: nested lists, tuples and mappings.
        test_type: decides which leaves are replaced; by default tensors.
        error_on_other_type: raise an error for leaves that ``test_type`` rejects.

    Raises:
        TypeError: ``test_type`` rejects a leaf, and ``error_on_other_type`` is True.
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            name = getattr(func, "__name__", repr(func))
            raise TypeError(
                f"Unsupported types ({type(leaf)}) passed to `{name}`: in nested lists, tuples and dicts it accepts "
                f"only leaves for which {test_type.__name__} is true"
            )
        return leaf

    return map_leaves(apply, data)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Return ``tensor`` with every leaf that has a ``to`` method moved to ``device``; other leaves stay unchanged.

    If an object has its own ``to`` (a tokenizer's batch, a graph, a packed sequence), that method moves the whole
    object, even if it is a mapping or a tuple.

    Args:
        tensor: tensor or nested structure.
        device: destination.
        non_blocking: copy asynchronously if memory is pinned.
        skip_keys: mapping keys whose values stay where they are.
    """
    if isinstance(tensor, torch.Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    is_mapping = isinstance(tensor, Mapping)
    # A named tuple may have a field named "to".
    if callable(getattr(tensor, "to", None)) and not (is_mapping and skipped):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # a ``to`` without ``non_blocking``
            return tensor.to(device)
    parts = children(tensor)
    if parts is None:
        return tensor
    keys = list(tensor.keys()) if is_mapping else [None] * len(parts)
    moved = [
        part if key in skipped else send_to_device(part, device, non_blocking, skipped)
        for key, part in zip(keys, parts, strict=True)
    ]
    return rebuilt(tensor, moved)


def convert_to_fp32(tensor: Any) -> Any:
    """Return a tensor or nested structure with fp16 and bf16 tensors converted to fp32; the rest stays unchanged."""
    half = (torch.float16, torch.bfloat16)
    return map_tensors(lambda leaf: leaf.float() if leaf.dtype in half else leaf, tensor)


def count_rows(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor; 0 if it has no tensor.

    This function is called in every step, so it tries the first leaf first, which is a tensor in most batches. It does
    not test whether a container is empty, because some batches have no truth value (``tensordict.TensorDict``).
    """
    first = batch
    while not isinstance(first, torch.Tensor):
        if isinstance(first, (list, tuple)):
            first = next(iter(first), None)
        elif isinstance(first, Mapping):
            first = next(iter(first.values()), None)
        else:
            return find_batch_size(batch) or 0
    return first.size(0) if first.dim() else 1


# --- several batches, parts of batches -------------------------------------------------------------------------------


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join batches of the same structure along dimension ``dim``. A single batch is returned unchanged.

    Raises:
        TypeError: a leaf is not a tensor.
        RuntimeError: shapes don't match.
    """
    first = data[0]
    if len(data) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    check_independent("concatenate", first)
    if isinstance(first, Mapping):
        keys = list(first.keys())
        return rebuilt(first, [concatenate([item[key] for item in data], dim) for key in keys])
    columns = [children(item) for item in data]
    if columns[0] is None:
        raise TypeError(f"can join only tensors in lists, tuples and mappings, not {formatting.kind(first)}")
    return rebuilt(first, [concatenate(parts, dim) for parts in zip(*columns, strict=True)])


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return ``tensor[tensor_slice]`` for every tensor; the other arguments are ignored."""
    check_independent("slice_tensors", data)
    return map_tensors(lambda tensor: tensor[tensor_slice], data)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return tensors with zeros added in dimension ``dim`` until its size is a multiple of ``num_processes``.

    Args:
        tensor: tensor or nested structure of tensors.
        batch_size: size in ``dim`` of the tensors to pad; other tensors stay unchanged.
        num_processes: the divisor.
        dim: the dimension.
    """
    missing = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if not missing or leaf.ndim <= dim or leaf.shape[dim] != batch_size:
            return leaf
        shape = [*leaf.shape[:dim], missing, *leaf.shape[dim + 1 :]]
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    return map_tensors(pad, tensor)


def find_batch_size(data: Any) -> int | None:
    """Return the size of the first dimension of the first tensor that has dimensions; None if there is none."""
    return next(
        (leaf.shape[0] for leaf in leaves(data) if isinstance(leaf, torch.Tensor) and leaf.ndim), None
    )


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor; None if there is none."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, torch.Tensor)), None)


def listify(data: Any) -> Any:
    """Convert tensors to lists of Python numbers; bf16 tensors, which NumPy does not support, are also converted."""
    return map_tensors(lambda tensor: tensor.detach().tolist(), data)


# --- structure without contents --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorInformation(Leaf):
    """The shape and type of a tensor that another process will fill."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorInformation:
        """Return the shape and type of ``tensor``."""
        return cls(tensor.shape, tensor.dtype)

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        """Return a tensor of this kind with arbitrary contents."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether ``tensor_info`` is a :class:`TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """Return ``data`` with a :class:`TensorInformation` in place of every tensor."""
    return map_tensors(TensorInformation.of, data)


def initialize_tensors(data_structure: Any, device: torch.device | None = None) -> Any:
    """Return the structure that :func:`get_data_structure` described; its tensors have arbitrary contents."""
    return recursively_apply(TensorInformation.empty, data_structure, device, test_type=is_tensor_information)


# --- containers ------------------------------------------------------------------------------------------------------

# Sequences of characters and numbers, which can't contain tensors.
_LEAVES = (
    torch.Tensor, str, UserString, bytes, bytearray, memoryview, range, array.array, torch.Size, type, Leaf,
)  # fmt: skip


def children(data: Any) -> Sequence[Any] | None:
    """Return the direct contents of a container, in order; None if ``data`` is a leaf."""
    kind = type(data)
    if kind is list or kind is tuple:
        return data
    if kind is dict:
        return list(data.values())
    if isinstance(data, _LEAVES):
        return None
    if isinstance(data, Mapping):
        return list(data.values())
    if isinstance(data, Sequence):
        return list(data)
    names = _field_names(data)
    return None if names is None else [getattr(data, name) for name in names]


def rebuilt(data: Any, values: list[Any]) -> Any:
    """Return a container like ``data`` with ``values`` in place of its children; ``data`` stays unchanged.

    Raises:
        TypeError: the container can't be copied with new contents.
    """
    kind = type(data)
    if kind is list:
        return values
    if kind is tuple:
        return tuple(values)
    if isinstance(data, Mapping):
        # Some mappings, such as ``tensordict.TensorDict``, iterate over rows instead of keys.
        keys = data.keys()
        contents = dict(zip(keys, values, strict=True))
        if kind is dict:
            return contents
        return _filled(data, contents) if isinstance(data, MutableMapping) else _constructed(data, contents)
    if isinstance(data, Sequence):
        return rebuilt_sequence(data, values)
    return _rebuilt_fields(data, values)


def rebuilt_sequence(data: Any, values: list[Any]) -> Any:
    """Return a sequence of the same kind as ``data`` that contains ``values``; its length may differ."""
    if isinstance(data, tuple):
        return _rebuilt_tuple(data, values)
    if isinstance(data, (list, deque, UserList)):
        made: Any = copy.copy(data)
        made.clear()
        made.extend(values)
        return made
    if isinstance(data, MutableSequence) and not _holds(data, values):
        return _filled(data, dict(enumerate(values)))
    return _constructed(data, values)


def check_independent(operation: str, data: Any) -> None:
    """Raise TypeError for a container whose tensors depend on each other and can't be joined or cut one by one."""
    for part in children(data) or ():
        check_independent(operation, part)
    if isinstance(data, PackedSequence):
        raise TypeError(
            f"{operation} can't join or cut a PackedSequence, because its rows are time steps, not samples. Pass "
            "the result of torch.nn.utils.rnn.pad_packed_sequence"
        )


def _field_names(data: Any) -> list[str] | None:
    """Return the names of the fields of a dataclass or an attrs class; None if ``data`` is of another kind."""
    if dataclasses.is_dataclass(data):
        return [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)]
    attributes = getattr(type(data), "__attrs_attrs__", None)
    return None if attributes is None else [attribute.name for attribute in attributes]


def _rebuilt_fields(data: Any, values: list[Any]) -> Any:
    names = _field_names(data) or []
    if all(getattr(data, name) is value for name, value in zip(names, values, strict=True)):
        return data
    made = copy.copy(data)  # its constructor may take other arguments, or none
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # also works for frozen classes
    return made


def _rebuilt_tuple(data: tuple[Any, ...], values: list[Any]) -> Any:
    kind: Any = type(data)
    try:
        made = tuple.__new__(kind, values)  # the class's own __new__ may take other arguments, or change them
    except TypeError:
        made = kind(values)  # Python rejects the above for classes in torch.return_types
    if hasattr(data, "__dict__"):
        vars(made).update(vars(data))
    return made


def _filled(data: Any, contents: dict[Any, Any]) -> Any:
    """Return a copy of a mutable container with ``contents`` assigned to its keys or positions."""
    before = {key: data[key] for key in contents}
    made = _copied(data)
    try:
        for key, value in contents.items():
            made[key] = value
    except Exception as error:
        raise _not_rebuilt(data, f"{type(error).__name__}: {error}") from error
    if not all(data[key] is value for key, value in before.items()):
        for key, value in before.items():
            data[key] = value
        raise _not_rebuilt(data, "copy.copy returns a copy that shares its contents; define __copy__")
    length = len(made.keys() if isinstance(made, Mapping) else made)
    if type(made) is not type(data) or length != len(contents):
        raise _not_rebuilt(data, f"copy.copy returns {formatting.kind(made)} of length {length}")
    return made


def _copied(data: Any) -> Any:
    """Return a copy that shares no contents; if the container wraps another one, copy that one as well."""
    made = copy.copy(data)
    if not isinstance(data, (dict, list)) and not hasattr(type(data), "__copy__"):
        for name, value in vars(made).items() if hasattr(made, "__dict__") else ():
            if isinstance(value, (dict, list)):
                vars(made)[name] = copy.copy(value)
    return made


def _constructed(data: Any, contents: Any) -> Any:
    """Call an immutable container's class with ``contents``, and return the result after checking its contents."""
    if _holds(data, contents):
        return data
    try:
        made = type(data)(contents)
    except Exception as error:
        raise _not_rebuilt(data, f"{type(error).__name__}: {error}") from error
    if not _holds(made, contents):
        raise _not_rebuilt(data, "its constructor changes these contents")
    return made


def _not_rebuilt(data: Any, reason: str) -> TypeError:
    return TypeError(
        f"can't create {formatting.kind(data)} with other tensors in it ({reason}). Pass a dict, list or tuple "
        "instead"
    )


def _holds(data: Any, contents: Any) -> bool:
    """Return whether a container has exactly these values, at the same keys or positions."""
    if len(data) != len(contents):
        return False
    if isinstance(contents, dict):
        return all(key in data and data[key] is value for key, value in contents.items())
    return all(ours is value for ours, value in zip(data, contents, strict=True))
