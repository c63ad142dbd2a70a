"""How objects of the notebook itself travel.

To a fresh interpreter, functions and classes of ``__main__`` go by value, since it has no such cells. Back to the
kernel they go by *reference*: an exception class or a result class defined in a cell must arrive as that very class,
or ``except MyError`` would not catch it. (For workers that got the class by value, cloudpickle's own tracking gives
back the kernel's class.)
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from typing import Any

import cloudpickle


class NotebookPickler(cloudpickle.CloudPickler):
    """cloudpickle, with a choice of how ``__main__`` is treated.

    Args:
        stream: where to write.
        main_by_reference: name functions and classes that this process's ``__main__`` holds, rather than copying them.
        options: for the pickler.
    """

    def __init__(self, stream: io.BytesIO, *, main_by_reference: bool, **options: Any) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL, **options)
        self._main = sys.modules.get("__main__") if main_by_reference else None

    def reducer_override(self, obj: Any) -> Any:
        if self._main is not None and isinstance(obj, (type, types.FunctionType)) and self._is_of_main(obj):
            return obj.__qualname__
        return super().reducer_override(obj)

    def _is_of_main(self, obj: Any) -> bool:
        if obj.__module__ != "__main__":
            return False
        found: Any = self._main
        for name in obj.__qualname__.split("."):  # Outer.Inner is looked up in steps
            found = getattr(found, name, None)
        return found is obj


def to_bytes(value: Any, *, main_by_reference: bool, max_bytes: int | None = None) -> bytes:
    """``value`` pickled.

    Raises:
        OverflowError: it takes more than ``max_bytes``, found out before all of it was written.
        Exception: it can't be pickled.
    """
    stream = io.BytesIO() if max_bytes is None else _BoundedStream(max_bytes)
    NotebookPickler(stream, main_by_reference=main_by_reference).dump(value)
    return stream.getvalue()


class _BoundedStream(io.BytesIO):
    """Refuses to grow beyond ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._max_bytes:
            raise OverflowError(f"more than {self._max_bytes} bytes")
        return super().write(data)
