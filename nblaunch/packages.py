"""Installed packages, and hooks on the first import of a module. This module imports no package.

A hook changes a library right after its import.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import linecache
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, TypeVar

Change = Callable[[ModuleType], None]

_Function = TypeVar("_Function", bound=Callable[..., Any])

UNCOUNTED = " (importlib._bootstrap)"
"""Suffix of the file name of each replacement's code.

``warnings.warn(..., stacklevel=2)`` does not count frames whose file name contains ``importlib`` and
``_bootstrap``. A library's warning therefore names the line that calls the library, as it would without the
replacement.
"""

_OWNER = "_nblaunch_process"
"""Name of the attribute in which an object stores the id of the process that owns it."""


def is_installed(package: str) -> bool:
    """Return whether ``package`` is installed, or is a module without a file in ``sys.modules``.

    The result is not cached, because users install packages from cells. A folder of this name without ``__init__``
    does not count, although Python would import it as a namespace package: wandb and others create such folders next
    to the notebook.

    Args:
        package: name of the top-level module.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a file may have no specification
        return True
    return spec is not None and (spec.origin is not None or spec.submodule_search_locations is None)


def version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed, or not by pip."""
    import importlib.metadata  # imported here, because it takes 10 ms

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_mismatch(package: str) -> str | None:
    """Return a sentence if ``package`` needs a different torch; None if torch fits or the requirement is unknown."""
    import importlib.metadata

    torch, installed = version("torch"), version(package)
    if torch is None or installed is None:
        return None
    bounds = [
        bound
        for need in importlib.metadata.requires(package) or ()
        if re.match(r"torch\b(?!-)", need)
        for bound in re.findall(r"([<>]=?)\s*([\d.]+)", need)
    ]
    if all(_fits(release(torch), sign, release(limit)) for sign, limit in bounds):
        return None
    wanted = " and ".join(sign + limit for sign, limit in sorted(bounds, reverse=True))
    return f"{package} {installed} needs torch {wanted}, but torch {torch} is installed"


def release(version: str) -> tuple[int, ...]:
    """Return the numbers in a version: ``"2.9.0+cpu"`` becomes (2, 9, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def _fits(present: tuple[int, ...], sign: str, limit: tuple[int, ...]) -> bool:
    return {">=": present >= limit, "<=": present <= limit, ">": present > limit, "<": present < limit}[sign]


def is_subclass(kind: type, *names: str) -> bool:
    """Return whether ``kind`` is a class with one of these names, such as ``"torch.nn.Module"``, or derived from one.

    Nothing is imported, because no class is derived from a class that is not loaded. Pass ``type(value)`` to test a
    value: ``isinstance`` would read its ``__class__``, which raises an error in a proxy without an object.
    """
    for name in names:
        module, _, attribute = name.rpartition(".")
        base = getattr(sys.modules.get(module), attribute, None)
        if isinstance(base, type) and issubclass(kind, base):
            return True
    return False


def when_imported(name: str, change: Change) -> None:
    """Call ``change(module)`` now if the module is loaded, or else right after its import."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
        return
    _finder.changes.setdefault(name, []).append(change)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def observe_when_imported(name: str, change: Change) -> None:
    """Like :func:`when_imported`, but for a change that the user's program does not need.

    If the change does not fit the installed release of the library, a warning says so, and the library runs unchanged.
    """

    def change_if_possible(module: ModuleType) -> None:
        try:
            change(module)
        except Exception as error:
            library = name.partition(".")[0]
            warnings.warn(
                f"nblaunch does not support the installed release of {library} ({type(error).__name__}: {error}). "
                f"{library} runs unchanged, without nblaunch's additions",
                stacklevel=2,
            )

    when_imported(name, change_if_possible)


def replacement_of(original: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Return a decorator that gives the name and signature of ``original`` to its replacement in a worker.

    Warnings from ``original`` still name its caller's line (:data:`UNCOUNTED`).

    ``functools.wraps`` also copies documentation and annotations. Each attribute that it reads changes a reference
    count in memory that a worker shares with the kernel, so with it, every hook would cause several more pages to be
    copied.
    """
    names = ("__module__", "__name__", "__qualname__")

    def name(replacement: _Function) -> _Function:
        functools.update_wrapper(replacement, original, assigned=names, updated=())
        _leave_uncounted(replacement)
        return replacement

    return name


def replaces(owner: Any, name: str, *others: Any) -> Callable[[_Function], _Function]:
    """Return a decorator that replaces ``owner.name`` with a function, in this process; see :func:`replacement_of`.

    Args:
        owner: a class or module.
        name: name of its function.
        others: modules that may have imported the function under the same name.
    """
    original = getattr(owner, name)

    def put(replacement: _Function) -> _Function:
        replacement_of(original)(replacement)
        setattr(owner, name, replacement)
        for other in others:
            if getattr(other, name, None) is original:
                setattr(other, name, replacement)
        return replacement

    return put


_uncounted: dict[int, tuple[CodeType, CodeType]] = {}
"""Id of a replacement's code object -> this object, and its copy with the changed file name."""


def _leave_uncounted(replacement: Any) -> None:
    """Make warnings skip the frames of a replacement when they count stack levels."""
    code = getattr(replacement, "__code__", None)
    if code is not None:
        replacement.__code__ = _uncounted_code(code, replacement.__globals__)


def _uncounted_code(code: CodeType, variables: dict[str, Any]) -> CodeType:
    if id(code) not in _uncounted:
        filename = code.co_filename + UNCOUNTED
        _uncounted[id(code)] = code, code.replace(co_filename=filename)
        linecache.lazycache(filename, variables)  # so that tracebacks show the lines
    return _uncounted[id(code)][1]


def defines_replacements(function: _Function) -> _Function:
    """Prepare the code of the replacements that the decorated function defines.

    Every worker calls the function. The code is prepared before the fork, because this preparation changes reference
    counts on many pages, which each worker would otherwise have to copy.
    """
    for constant in function.__code__.co_consts:
        if isinstance(constant, CodeType):
            _uncounted_code(constant, function.__globals__)
    return function


@defines_replacements
def call_before(cls: Any, name: str, act: Callable[[Any], None]) -> None:
    """Call ``act(instance)`` before each call to a method of ``cls``, in this process."""
    method = getattr(cls, name)

    @replaces(cls, name)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        act(self)
        return method(self, *args, **kwargs)


def mark_as_own(instance: Any) -> None:
    """Mark a library's object that this process has created or made usable, as opposed to an inherited one."""
    setattr(instance, _OWNER, os.getpid())


def is_own(instance: Any) -> bool:
    """Return whether this process, rather than one that it was forked from, has marked the object."""
    return vars(instance).get(_OWNER) == os.getpid()


_acting = threading.RLock()
"""Held while an object is being made usable, because several threads may start to use it at the same time."""

if hasattr(os, "register_at_fork"):  # Windows has no forks; there, the package only says what it needs
    os.register_at_fork(after_in_child=_acting._at_fork_reinit)  # type: ignore[attr-defined]


def before_first_use(
    cls: Any, methods: Iterable[str], act: Callable[[Any], object], *, includes_new: bool = False
) -> None:
    """Call ``act(instance)`` before the first method call on an inherited object, once; then mark the object.

    Other threads that call these methods wait until ``act`` has returned.

    Args:
        cls: a class of a library.
        methods: names of the methods; those that this release of the library lacks are skipped.
        act: called with the object.
        includes_new: whether to do the same with objects that this process creates from now on.
    """

    def act_once(instance: Any) -> None:
        if is_own(instance):
            return
        with _acting:
            if not is_own(instance):
                act(instance)
                mark_as_own(instance)

    if not includes_new:
        call_before(cls, "__init__", mark_as_own)
    for name in methods:
        if hasattr(cls, name):
            call_before(cls, name, act_once)


def find_elsewhere(fullname: str, searched: set[str]) -> ModuleSpec | None:
    """Find a module through all finders except the caller, which is a finder that only observes imports.

    Args:
        fullname: name of the module.
        searched: names that the calling finder is looking for; it must return None for them.
    """
    searched.add(fullname)
    try:
        return importlib.util.find_spec(fullname)
    finally:
        searched.discard(fullname)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules through the other finders, and makes their loaders apply the changes, until no changes are left."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Change]] = {}
        """Name of a module -> its changes, in the order in which they are made."""
        self._searched: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.changes or fullname in self._searched:
            return None
        spec = find_elsewhere(fullname, self._searched)
        if spec is not None and spec.loader is not None:
            self._finish_after(spec.loader)
        return spec

    def _finish_after(self, loader: Any) -> None:
        """Let ``loader`` make the changes once it has executed the module."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._finish(module)

        loader.exec_module = exec_module

    def _finish(self, module: ModuleType) -> None:
        changes = self.changes.pop(module.__name__, [])
        if not self.changes and self in sys.meta_path:
            sys.meta_path.remove(self)
        for change in changes:
            change(module)


_finder = _Finder()
