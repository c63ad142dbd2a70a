"""Files that the function leaves open. Python closes a script's at its end, which ``os._exit`` leaves out.

Files of the kernel are the business of ``inheritance/written_files.py``. They are in the heap that is frozen for the
fork, which the collector does not list.
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
"""Modules and classes of files that can't be read without what closing writes."""

_bases_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__

_imported_in = os.getpid()
_mark: list[None] = []
"""Lies among the kernel's objects, in the process that imported this module and in processes forked from it."""


def write_left_open() -> None:
    """Write what is buffered for files that this process has opened; an error of one is shown, and changes nothing."""
    objects = gc.get_objects()
    if os.getpid() != _imported_in and id(_mark) in set(map(id, objects)):
        return  # the function has unfrozen the heap: the kernel's files are among them
    # type(), id() and the bases themselves: isinstance() or a hash would run code of objects and classes that pretend
    # to be others, and issubclass() of an abstract class, as GzipFile is, writes to every class that it is asked about.
    kinds_of_all = list(map(type, objects))
    classes = dict(zip(map(id, kinds_of_all), kinds_of_all, strict=True))
    wanted = {id(kind) for kind in (*_BUFFERED, *_classes_with_an_end())}
    kinds = {number for number, kind in classes.items() if not wanted.isdisjoint(map(id, _bases_of(kind)))}
    if not kinds:
        return
    files = [one for one in objects if id(type(one)) in kinds]
    texts = [one for one in files if isinstance(one, io.TextIOWrapper)]
    buffers = [one for one in files if isinstance(one, _BUFFERED[1:])]
    others = [one for one in files if not isinstance(one, _BUFFERED)]
    for file in (*texts, *buffers):
        _attempt(file.flush, file)
    for file in others:
        _attempt(file.close, file)
    for file in buffers:  # to which those have written
        _attempt(file.flush, file)


def _classes_with_an_end() -> tuple[type, ...]:
    classes = (getattr(sys.modules.get(module), name, None) for module, name in _WITH_AN_END)
    return tuple(kind for kind in classes if isinstance(kind, type))


def _attempt(write: Callable[[], object], file: Any) -> None:
    try:
        write()
    except OSError as error:
        with contextlib.suppress(Exception):  # of a class of the user's own
            print(f"{file!r:.200} was left open and could not be written: {error}", file=sys.stderr)
    except BaseException:  # closed, or half made
        return
