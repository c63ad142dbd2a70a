"""A Python script as the function of a launch. Every worker runs it as ``python script.py`` would.

The script is ``__main__``, with its own ``sys.argv``, ``sys.path[0]`` and ``__file__``. Thus ``__main__`` guards
work, the script's objects can be pickled, and data loaders that spawn their workers find the script again.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import random
import sys
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Script:
    """A script or a module with its arguments, which a worker calls.

    Args:
        target: path of a script as the user typed it, or name of a module.
        arguments: the arguments that follow the target on the command line.
        is_module: whether ``target`` is a module, as for ``python -m``.
        folder: the caller's working directory, where modules are searched first.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    folder: str = ""

    def __repr__(self) -> str:
        return f"-m {self.target}" if self.is_module else self.target

    def __call__(self) -> None:
        random.seed()  # fresh workers of a kernel share its random state; ranks of a script must not
        _search_first(self.folder if self.is_module else os.path.dirname(os.path.realpath(self.target)))
        if self.is_module:
            spec = find_module(self.target)
            code = _code_of(spec)
            path = spec.origin or ""
            main = _become_main(path, spec)
        else:
            path = os.path.abspath(self.target)
            with io.open_code(path) as file:
                # Don't inherit this module's future statements, which would turn annotations into strings.
                code = compile(file.read(), path, "exec", dont_inherit=True)
            main = _become_main(path, None)
        sys.argv[:] = [path if self.is_module else self.target, *self.arguments]
        exec(code, main.__dict__)


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


def _search_first(folder: str) -> None:
    """Replace the launcher's folder at the start of ``sys.path``. With ``python -P``, there is none."""
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
