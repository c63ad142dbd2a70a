"""A Python script as the function of a launch: in every worker it runs as ``python script.py`` would run it.

It is ``__main__``, with its own ``sys.argv``, ``sys.path[0]`` and ``__file__``, so that guards work, objects of it can
be pickled, and data loaders that spawn their workers find it again.
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
    """A script or a module, and its arguments. Called in a worker.

    Args:
        target: path of a script as it was given, or name of a module.
        arguments: what follows it on the command line.
        is_module: ``target`` is a module, as for ``python -m``.
        folder: the working folder of the caller, in which the module is looked for.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    folder: str = ""

    def __repr__(self) -> str:
        return f"-m {self.target}" if self.is_module else self.target

    def __call__(self) -> None:
        random.seed()  # a fresh worker draws what its kernel would have drawn; ranks of a script are not related so
        _search_first(self.folder if self.is_module else os.path.dirname(os.path.realpath(self.target)))
        if self.is_module:
            spec = find_module(self.target)
            code = _code_of(spec)
            path = spec.origin or ""
            main = _become_main(path, spec)
        else:
            path = os.path.abspath(self.target)
            with io.open_code(path) as file:
                # Not with the future statements of this module, by which annotations would be texts.
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
    except ModuleNotFoundError as error:  # a package on the way there
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
    """Replace the launcher's own first entry, as each program has its own. ``python -P`` has none."""
    if getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        return
    sys.path[:1] = [folder]


def _become_main(path: str, spec: importlib.machinery.ModuleSpec | None) -> ModuleType:
    """Replace ``__main__``, the program that this interpreter was started with, by a new one."""
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
