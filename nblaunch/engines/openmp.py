"""Pausing OpenMP's thread pools before a fork.

After any parallel CPU operation the process has a pool of OpenMP threads. A fork copies the pool's bookkeeping but not
its threads, so that a child's first parallel operation waits for ever for threads that do not exist
(pytorch/pytorch#17199, gcc bug 58378). ``omp_pause_resource_all`` (OpenMP 5.0, section 3.2.44) gives the pools up;
parent and child then start fresh ones when they next need them.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

_PAUSE_HARD = 2  # omp_pause_hard; source: OpenMP 5.0, section 3.2.43
_OWN_MAPS = Path("/proc/self/maps")
_LIBRARY = re.compile(r"/lib(?:gomp|omp|iomp5)(?:-[0-9a-f]+)?\.(?:so|dylib)[.0-9]*$")


def pause_pools() -> bool:
    """Give up the OpenMP pools of the calling thread in every OpenMP library that this process has loaded.

    Returns:
        True if a child may use all its threads: every library was paused, or none is loaded. False if some library
        could not be; then children must keep to one thread.
    """
    return all(_pause(library) for library in _loaded_libraries(_OWN_MAPS))


def _loaded_libraries(maps: Path) -> tuple[str, ...]:
    """Paths of loaded OpenMP libraries. torch, scikit-learn and others each bring a copy of their own."""
    global _known
    num_loads = _count_loads()
    key = (maps, num_loads)
    if num_loads is None or _known is None or _known[0] != key:
        _known = (key, _find_libraries(maps))
    return _known[1]


def _find_libraries(maps: Path) -> tuple[str, ...]:
    try:
        text = maps.read_text()
    except OSError:
        torch = sys.modules.get("torch")
        folder = Path(torch.__file__ or "").parent / "lib" if torch is not None else None
        return tuple(str(path) for path in folder.glob("lib*omp*")) if folder else ()
    paths = {line[line.index("/") :] for line in text.splitlines() if "omp" in line and "/" in line}
    return tuple(sorted(path for path in paths if _LIBRARY.search(path)))


_known: tuple[tuple[Path, int | None], tuple[str, ...]] | None = None
"""The libraries found last, and when: reading the maps of a process with torch in it takes a millisecond."""


class _LoadInfo(ctypes.Structure):
    """Source: dl_iterate_phdr(3), ``struct dl_phdr_info`` up to ``dlpi_adds``."""

    _fields_: ClassVar = [
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("num_headers", ctypes.c_uint16),
        ("num_loads", ctypes.c_ulonglong),
    ]


_VISITOR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_LoadInfo), ctypes.c_size_t, ctypes.c_void_p)


def _count_loads() -> int | None:
    """How many libraries this process has ever loaded; None where the system does not count them."""
    try:
        iterate = ctypes.CDLL(None).dl_iterate_phdr
    except (OSError, AttributeError):
        return None
    counts: list[int] = []

    def visit(info: Any, size: int, data: object) -> int:
        if size >= ctypes.sizeof(_LoadInfo):
            counts.append(info.contents.num_loads)
        return 1  # one is enough: the count is the same in all

    iterate(_VISITOR(visit), None)
    return counts[0] if counts else None


def _pause(library: str) -> bool:
    try:
        # RTLD_NOLOAD: the very copy that is in use, never a second one.
        handle = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return handle.omp_pause_resource_all(_PAUSE_HARD) == 0
    except (OSError, AttributeError):
        return False
