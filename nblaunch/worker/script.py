"""A Python script as a launch's function. Every worker runs it as ``python script.py`` would.

The script is ``__main__``, with its own ``sys.argv``, ``sys.path[0]`` and ``__file__``. Thus ``__main__`` guards
work, the script's objects can be pickled, and data loaders that spawn their workers find the script again.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import random
import sys
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Script:
    """A script or a module with its arguments, which a worker calls.

    Args:
        target: path to a script, or to a folder or zip file with a ``__main__.py``, as the user typed it; or a module's
            name.
        arguments: the arguments that follow the target on the command line.
        is_module: whether ``target`` names a module, as for ``python -m``.
        folder: the caller's working directory, where modules are searched for first.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    folder: str = ""

    def __repr__(self) -> str:
        return f"-m {self.target}" if self.is_module else self.target

    def __call__(self) -> None:
        random.seed()  # a kernel's fresh workers share its random state; a script's ranks must not
        spec: importlib.machinery.ModuleSpec | None
        if self.is_module:
            _search_first(self.folder)
            spec = find_module(self.target)
        elif (spec := find_main(os.path.abspath(self.target))) is not None:
            _search_first(os.path.abspath(self.target))
        else:
            _search_first(os.path.dirname(os.path.realpath(self.target)))
        path = os.path.abspath(self.target) if spec is None else spec.origin or ""
        code = _code_in(path) if spec is None else _code_of(spec)
        main = _become_main(path, spec)
        sys.argv[:] = [path if self.is_module else self.target, *self.arguments]
        exec(code, main.__dict__)


def find_main(path: str) -> importlib.machinery.ModuleSpec | None:
    """Return the ``__main__`` of a folder or zip file, which ``python path`` runs; None for a script."""
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    return spec if spec is not None and spec.has_location else None


def find_module(name: str) -> importlib.machinery.ModuleSpec:
    """Return what ``python -m name`` runs: the module, or a package's ``__main__``.

    Raises:
        ImportError: the module does not exist, or can't be run.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:  # a parent package
        raise ImportError(f"no module named {name!r} ({error})") from error
    if spec is not None and spec.submodule_search_locations is not None:
        return find_module(f"{name}.__main__")
    if spec is None:
        raise ImportError(f"no module named {name!r}")
    return spec


def _code_of(spec: importlib.machinery.ModuleSpec) -> CodeType:
    loader: Any = spec.loader
    code: CodeType | None = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise ImportError(f"{spec.name} has no Python code to run")
    return code


def _code_in(path: str) -> CodeType:
    """Return the code of a script, which may already be compiled."""
    with io.open_code(path) as file:
        if (code := pkgutil.read_code(file)) is not None:
            return code
        file.seek(0)
        # Don't inherit this module's future statements, which would turn annotations into strings.
        return compile(file.read(), path, "exec", dont_inherit=True)


def _search_first(folder: str) -> None:
    """Replace the launcher's folder at the start of ``sys.path``. With ``python -P``, that folder is not there."""
    if getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        return
    sys.path[:1] = [folder]


def _become_main(path: str, spec: importlib.machinery.ModuleSpec | None) -> ModuleType:
    """Replace ``__main__``, the program that started this interpreter, with a new module."""
    main = ModuleType("__main__")
    main.__file__ = path
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if spec is not None:
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        main.__dict__["__cached__"] = spec.cached
    else:
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__["__cached__"] = None
        main.__package__ = None
    sys.modules["__main__"] = main
    return main
