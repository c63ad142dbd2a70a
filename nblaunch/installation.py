"""nblaunch's own files, which ``pip install -U`` may replace while a process is running them.

Most modules are imported when they are first needed. After such an update, a process would mix modules from both
versions, and send the old version's messages to new interpreters. Therefore:

* :func:`check_import` runs before each import of an nblaunch module, and :func:`check_new_process` before each start
  of a new interpreter. They raise an error instead of mixing two versions.
* The process of a detached job must survive any later installation, so it calls :func:`keep_modules`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from nblaunch.errors import LaunchError

_PACKAGE = __name__.rpartition(".")[0]
_FOLDER = os.path.dirname(__file__)
_INIT = os.path.join(_FOLDER, "__init__.py")
_VERSION = re.compile(r"^__version__ = [\"'](.*)[\"']", re.MULTILINE)

Stamp = tuple[int, int, int]


def _stamp(path: str) -> Stamp | None:
    """Return a value that changes when a file is replaced; None if there is no such file, for example in an archive."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


_first_stamp = _stamp(_INIT)
_same_version = {_first_stamp}
"""Stamps of the installations seen so far that have the same version as this process."""


_keeps_modules = False


def check_import() -> None:
    """Raise an error if a module from another version would be imported.

    Raises:
        LaunchError: the installed version is not the one that this process runs, or none is installed.
    """
    if not _keeps_modules:
        check_new_process()


def check_new_process() -> None:
    """Raise an error if a fresh interpreter would run another version.

    Raises:
        LaunchError: the installed version is not the one that this process runs, or none is installed.
    """
    if _first_stamp is None or (stamp := _stamp(_INIT)) in _same_version:
        return
    version = ""
    with suppress(OSError):
        match = _VERSION.search(Path(_INIT).read_text(encoding="utf-8", errors="replace"))
        version = match[1] if match else "of an unknown version"
    running = sys.modules[_PACKAGE].__version__
    if version == running:
        _same_version.add(stamp)
        return
    what = f"replaced by nblaunch {version}" if version else "removed"
    raise LaunchError(
        f"this process is running nblaunch {running}, but its files in {_FOLDER} were {what} after it started. "
        "Modules from two versions do not work together. Restart the kernel, or start the program again"
    )


def keep_modules() -> None:
    """Let this process and its forks import modules as they are now, even if their files are replaced later.

    This function reads all source files, which takes a few milliseconds, and keeps them in memory: about 3 MB.
    """
    global _keeps_modules
    sys.meta_path.insert(0, _KeptModules())
    _keeps_modules = True


class _KeptModules:
    """Finds modules whose files were replaced or removed after this object was made."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[str, Stamp, bytes]] = {}
        for folder, _, names in os.walk(_FOLDER):
            for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
                stamp = _stamp(path)
                if stamp is not None:
                    self._files[_module_of(path)] = path, stamp, Path(path).read_bytes()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._files:
            return None
        file, stamp, source = self._files[fullname]
        if _stamp(file) == stamp and _stamp(_INIT) == _first_stamp:
            return None
        is_package = os.path.basename(file) == "__init__.py"
        return spec_from_file_location(
            fullname,
            file,
            loader=_KeptLoader(fullname, file, source),
            submodule_search_locations=[os.path.dirname(file)] if is_package else None,
        )


class _KeptLoader(SourceFileLoader):
    """Loads a module from source that is kept in memory."""

    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self._source = source

    def path_stats(self, path: Any) -> Any:
        raise OSError("the bytecode next to the file may belong to another version")

    def get_data(self, path: Any) -> bytes:
        return self._source


def _module_of(path: str) -> str:
    parts = os.path.relpath(path, os.path.dirname(_FOLDER)).removesuffix(".py").split(os.sep)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
