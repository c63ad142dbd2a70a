"""Explains slow imports in a worker, because nothing else would explain why the first step is late.

    find_spec("deepspeed") ──> its loader, which measures exec_module, with all imports inside it
                           ──> 5 s or longer? ──> the package inside it that takes most of this time

Time that the import spent waiting for a processor does not count.

Each worker has to perform the imports that the kernel has not performed. A library may import others without the user's
knowledge: for example, Accelerate imports DeepSpeed if it is installed. Measuring adds only a few microseconds to an
import, because it covers packages but not their modules.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from time import monotonic
from types import ModuleType
from typing import Any

from nblaunch import env, formatting, packages
from nblaunch.host import proc
from nblaunch.user_code import is_own_file, is_user_file

CHECK = "slow_imports"
"""Name of this check in ``NBLAUNCH_CHECKS``."""

_SLOW_S = 5.0
_MAIN_PART = 0.6
"""A note names the innermost package that takes at least this fraction of the whole import."""
_MAX_REPORTS = 3
_LOADERS = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
"""File name of Python's import system, whose frames are omitted from tracebacks and from stack levels."""


def watch(is_fresh: bool, report: Callable[[str], None]) -> None:
    """Report slow imports in this process from now on, but not in processes that it forks.

    Args:
        is_fresh: whether this process can't inherit imports, because it is a fresh process or runs a script.
        report: receives a sentence for each of the first few slow imports.
    """
    if not env.is_check_off(CHECK):
        sys.meta_path.insert(0, _Watch(is_fresh, report))


@dataclass(eq=False)
class _Import:
    """The import of a package.

    Args:
        name: name of the package.
        inner: imports of other packages inside it.
        importer: the library whose code imports it; empty if the user's code does.
        seconds: duration.
    """

    name: str
    inner: list[_Import] = field(default_factory=list)
    importer: str = ""
    seconds: float = 0.0


class _Watch(importlib.abc.MetaPathFinder):
    """Finds packages through the other finders, and measures their imports in the main thread."""

    def __init__(self, is_fresh: bool, report: Callable[[str], None]) -> None:
        self._is_fresh = is_fresh
        self._report = report
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._searched: set[str] = set()
        self._running: list[_Import] = []
        self._num_reports = 0
        self._waited_s = 0.0  # before the outermost import

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if "." in fullname or fullname in self._searched or fullname in sys.modules or not self._is_here():
            return None
        spec = packages.find_elsewhere(fullname, self._searched)
        if spec is not None and type(spec.loader) in _LOADERS:
            self._measure(spec.loader, _Import(fullname))
        return spec

    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def _measure(self, loader: Any, package: _Import) -> None:
        """Make ``loader`` measure a package's execution; the loader is restored once the execution begins."""
        changed = vars(loader).get("exec_module")
        execute = loader.exec_module
        watch = self

        def exec_module(module: ModuleType) -> None:
            watch._begin(loader, changed, package)
            began_s = monotonic()
            try:
                execute(module)
            finally:
                watch._end(package, monotonic() - began_s)

        exec_module.__code__ = exec_module.__code__.replace(co_filename=_IMPORT_SYSTEM)
        loader.exec_module = exec_module

    def _begin(self, loader: Any, changed: Any, package: _Import) -> None:
        if changed is None:
            vars(loader).pop("exec_module", None)
        else:
            loader.exec_module = changed
        if not self._running:
            self._waited_s = _waited_for_processor_s()
        else:
            self._running[-1].inner.append(package)
        self._running.append(package)

    def _end(self, package: _Import, seconds: float) -> None:
        del self._running[self._running.index(package) :]
        package.seconds = seconds
        if seconds < _MAIN_PART * _SLOW_S or not self._is_here():
            return
        package.importer = _importer_of(package.name)
        if not self._running and seconds - (_waited_for_processor_s() - self._waited_s) >= _SLOW_S:
            self._explain(package)

    def _explain(self, whole: _Import) -> None:
        package = whole
        while main := next(
            (inner for inner in package.inner if inner.seconds >= _MAIN_PART * whole.seconds), None
        ):
            package = main
        is_inevitable = self._is_fresh and "torch" in (package.name, package.importer)
        if is_inevitable or self._num_reports == _MAX_REPORTS:
            return
        self._num_reports += 1
        importer = f" (imported by {package.importer})" if package.importer else ""
        advice = (
            "each worker imports it, because there is no earlier import to inherit"
            if self._is_fresh
            else f"import {package.name} before the launch, so that workers inherit it"
        )
        duration = formatting.duration(package.seconds)
        self._report(f"rank 0 spent {duration} importing {package.name}{importer}: {advice}")


def _waited_for_processor_s() -> float:
    """Return how long this thread has been ready to run while other threads ran; 0 if unknown."""
    times = proc.thread_times(os.getpid()).get(threading.get_native_id())
    return 0.0 if times is None else times.wait_s


def _importer_of(package: str) -> str:
    """Return the library whose code is importing ``package``; empty if the user's code is."""
    frame = sys._getframe(2)
    while frame is not None:
        filename = frame.f_code.co_filename
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if is_user_file(filename):
            return ""
        if (
            not filename.startswith("<frozen")
            and not is_own_file(filename)
            and name not in (package, "importlib")
        ):
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""
