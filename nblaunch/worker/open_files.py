"""Files that the function leaves open. Python closes such files when a script exits, but ``os._exit`` does not.

``inheritance/files.py`` handles the kernel's files. They are in the heap that is frozen before the function
begins, so the garbage collector does not list them.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable
from typing import Any

_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)
_WITH_AN_END = (("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"), ("zipfile", "ZipFile"))
"""Modules and classes of files that can't be read until they are closed, when the end of the file is written."""

_bases_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__

_imported_in = os.getpid()
_mark: list[None] = []
"""An object that belongs to the process that imported this module, usually the kernel. Forked workers have a copy."""


def leave_out_present_objects() -> None:
    """Exclude all existing objects from the search for open files, which would visit every object."""
    gc.freeze()


def write_left_open() -> None:
    """Flush the files that this process opened. An error in one file is printed and does not affect the others."""
    objects = gc.get_objects()
    if os.getpid() != _imported_in and id(_mark) in set(map(id, objects)):
        return  # the function has unfrozen the heap, so the list would include the kernel's files
    # Compare type(), id() and bases directly. isinstance() or a hash would run code of proxy objects and classes, and
    # issubclass() with an abstract class such as GzipFile writes to every class that it tests.
    kinds_of_all = list(map(type, objects))
    classes = dict(zip(map(id, kinds_of_all), kinds_of_all, strict=True))
    wanted = {id(kind) for kind in (*_BUFFERED, *_classes_with_an_end())}
    kinds = {number for number, kind in classes.items() if not wanted.isdisjoint(map(id, _bases_of(kind)))}
    if not kinds:
        return
    files = [obj for obj in objects if id(type(obj)) in kinds]
    texts = [file for file in files if isinstance(file, io.TextIOWrapper)]
    buffers = [file for file in files if isinstance(file, _BUFFERED[1:])]
    others = [file for file in files if not isinstance(file, _BUFFERED)]
    for file in (*texts, *buffers):
        _attempt(file.flush, file)
    for file in others:
        _attempt(file.close, file)
    for file in buffers:  # again, because the text files have written to them
        _attempt(file.flush, file)


def _classes_with_an_end() -> tuple[type, ...]:
    classes = (getattr(sys.modules.get(module), name, None) for module, name in _WITH_AN_END)
    return tuple(kind for kind in classes if isinstance(kind, type))


def _attempt(write: Callable[[], object], file: Any) -> None:
    try:
        write()
    except OSError as error:
        with contextlib.suppress(Exception):  # raised by a user's class
            print(f"{file!r:.200} was left open and could not be written: {error}", file=sys.stderr)
    except BaseException:  # closed, or only partly constructed
        return
