"""Variables of a launched function that are copied to each worker, although users may expect them to be shared.

iterators           A generator or an iterator over a data loader gives every rank the same values, and no rank advances
                    the kernel's iterator. The user may intend this, or may be training every rank on the same
                    batches by mistake. Attributes of objects are included if the class is the user's.
compressors         ``zstandard`` keeps a part of a file in memory, like the writers in
                    ``worker/inheritance/unfinished_files.py``. Its classes are written in C, so a worker can't replace
                    their write methods with ones that raise an error.
writable maps       A ``numpy.memmap`` becomes an array in a fresh process, and changes to it do not reach the file.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator
from types import AsyncGeneratorType, GeneratorType
from typing import Any

from nblaunch import packages
from nblaunch.spec import LaunchSpec
from nblaunch.user_code import has_user_class, used_by

_EMPTY: tuple[Iterable[Any], ...] = ([], (), {}, {}.values(), {}.items(), set(), range(0))
_ITERATORS = (
    map,
    zip,
    filter,
    enumerate,
    *map(type, map(iter, _EMPTY)),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type) and hasattr(kind, "__next__")),
)
_COUNTERS = (itertools.count, itertools.repeat)
"""Iterators that only count or repeat one value; they are not reported."""

_SAME_VALUES = (
    "{name}: each rank has a copy of this {kind}, which continues from the kernel's position, so all ranks get "
    "the same values. To give each rank a different part, create it inside the function, depending on the rank"
)
_LOST = (
    "{name} compresses into a file that a cell has opened, and each rank has a copy of its state. Writes by "
    "ranks damage the file: open a file inside the function, one for each rank"
)
_NOT_IN_FILE = (
    "{name} maps {file} for writing, and workers of start_method={method!r} get a copy of its data. Their "
    "changes to {name} never reach the file: open the map inside the function"
)


def warnings_about(spec: LaunchSpec, num_processes: int, start_method: str) -> list[str]:
    """Return a sentence for each variable that the user may wrongly expect the workers to share.

    Args:
        spec: the launch.
        num_processes: number of workers.
        start_method: start method of the workers.
    """
    if num_processes < 2 or start_method == "inline":
        return []
    values = {id(value): (name, value) for name, value in _variables(spec)}
    return [text for name, value in values.values() if (text := _warning(name, value, start_method))]


def _variables(spec: LaunchSpec) -> Iterator[tuple[str, Any]]:
    arguments = ((f"args[{position}]", value) for position, value in enumerate(spec.args))
    for name, value in (*used_by(spec.function), *arguments):
        yield name, value
        if has_user_class(value):
            yield from (
                (f"{name}.{attribute}", part)
                for attribute, part in list(_attributes(value).items())
                if not issubclass(type(part), _COUNTERS)
            )


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return dict(getattr(value, "__dict__", {}))
    except Exception:  # raised by a property of the user's class
        return {}


def _warning(name: str, value: Any, start_method: str) -> str | None:
    kind = _kind_of_iterator(value)
    if kind is not None:
        return _SAME_VALUES.format(name=name, kind=kind)
    if start_method != "fork":
        return (
            _NOT_IN_FILE.format(name=name, file=value.filename, method=start_method)
            if _is_writable_map(value)
            else None
        )
    is_compressed = _compresses(value.buffer if issubclass(type(value), io.TextIOWrapper) else value)
    return _LOST.format(name=name) if is_compressed else None


def _kind_of_iterator(value: Any) -> str | None:
    # isinstance() would ask a proxy for its class, which raises an error if the proxy's object is missing.
    if issubclass(type(value), GeneratorType):
        return None if value.gi_frame is None else "generator"  # exhausted
    if issubclass(type(value), (AsyncGeneratorType, *_ITERATORS)):
        return "iterator"
    is_of_loader = packages.is_subclass(
        type(value), "torch.utils.data.dataloader._SingleProcessDataLoaderIter"
    )
    return "iterator of a DataLoader" if is_of_loader else None


def _is_writable_map(value: Any) -> bool:
    return packages.is_subclass(type(value), "numpy.memmap") and value.mode in ("r+", "w+")


def _compresses(value: Any) -> bool:
    return packages.is_subclass(type(value), "zstandard.ZstdCompressionWriter") and not value.closed
