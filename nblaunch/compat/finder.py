"""Imports the names in :mod:`nblaunch.compat.names` when they are first used; an import hook finds the modules.

``nblaunch.utils.operations`` is a module without a file. Its attributes are imported on first use, from the
modules that define them. If Accelerate is installed, every module also has the names that nblaunch takes from
it. An unsupported module or attribute raises an error that says what to use instead.

On systems that can't run jobs, ``import nblaunch`` works, but importing any of its names raises a ``LaunchError``.
So does importing a module after another version of nblaunch was installed (``nblaunch/installation.py``).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nblaunch import installation
from nblaunch.compat.names import DELEGATED, HOMES, PUBLIC, explanation
from nblaunch.errors import LaunchError


def install() -> None:
    """Add the finder to ``sys.meta_path``.

    It must be the first finder, because a folder of an older version (``nblaunch/utils`` with only compiled files)
    would otherwise be imported as an empty package.
    """
    sys.meta_path.insert(0, _Finder())


def submodules_of(package: str) -> list[str]:
    """Return the names of the modules directly below ``package`` in the table, relative to ``package``."""
    below = (name.removeprefix(f"{package}.") for name in HOMES if name.startswith(f"{package}."))
    return sorted(name for name in below if "." not in name)


def attribute(module: str, name: str) -> Any:
    """Return the object ``name`` of ``nblaunch`` or of a module in the table, from the module that defines it.

    Raises:
        AttributeError: the module lacks the name; the message names a replacement if there is one.
        LaunchError: no job can run on this system.
    """
    home = (PUBLIC if module == "nblaunch" else HOMES[module]).get(name)
    if home is not None:
        if system_problem() is not None and home != "nblaunch.errors":
            raise LaunchError(system_problem())
        return getattr(importlib.import_module(home), name)
    if f"{module}.{name}" in HOMES:
        return importlib.import_module(f"{module}.{name}")
    if name in DELEGATED:
        return from_accelerate(name)
    raise AttributeError(explanation(name) or f"module {module!r} has no attribute {name!r}")


class _ForwardingModule(ModuleType):
    """A module whose public names are defined in other modules."""

    def __getattr__(self, name: str) -> Any:
        value = attribute(self.__name__, name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets an imported submodule as an attribute of its parent, but ``utils.tqdm`` must remain the function.
        if not (isinstance(value, ModuleType) and name in HOMES[self.__name__]):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*HOMES[self.__name__], *submodules_of(self.__name__)})

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)  # cloudpickle handles plain modules only


class _Finder:
    """Finds the modules of the table, and raises an ImportError with an explanation for unsupported modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith("nblaunch."):
            if system_problem() is not None:
                raise LaunchError(system_problem())  # instead of an error about a missing Python module
            installation.check_import()
        if fullname in HOMES:
            # The modules are packages, so that Python asks the finders for missing submodules, and this
            # finder can raise an error that says what to use instead.
            return ModuleSpec(fullname, _Loader(), is_package=True)
        reason = explanation(fullname.rpartition(".")[2]) if fullname.startswith("nblaunch.") else ""
        if reason:
            raise ImportError(reason, name=fullname)
        return None


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _ForwardingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = HOMES[module.__name__]
        homes = ", ".join(f"``{home}``" for home in sorted(set(names.values())))
        module.__doc__ = (
            f"Names of ``{module.__name__.replace('nblaunch', 'accelerate', 1)}``; defined in {homes}."
        )
        module.__dict__["__all__"] = sorted(names)


# --- names that an installed Accelerate serves -----------------------------------------------------------------------


def from_accelerate(name: str) -> Any:
    """Return Hugging Face Accelerate's object, or a placeholder if Accelerate is not installed.

    The placeholder raises an ImportError when it is used.

    nblaunch trains models. It does not split models for inference, and lacks some helpers and constants that
    Accelerate exports. Programs that both train models and split models import such names along with those for
    training, and libraries import them without using them. Each name is therefore Accelerate's own object, and can be
    imported even if Accelerate is not installed.

    Args:
        name: a name in :data:`nblaunch.compat.names.DELEGATED`, or a function of ``accelerate.big_modeling``.
    """
    try:
        value = getattr(importlib.import_module(DELEGATED.get(name, "accelerate.big_modeling")), name)
    except (ImportError, AttributeError, RecursionError) as error:
        return _without_accelerate(name, error)
    if not str(getattr(value, "__module__", "accelerate.")).startswith("accelerate."):  # constants lack it
        # Another package, perhaps nblaunch itself, is imported under Accelerate's name.
        return _without_accelerate(name, None)
    return value


def _without_accelerate(name: str, cause: Exception | None) -> Any:
    def reject(*args: Any, **kwargs: Any) -> Any:
        raise ImportError(
            f"{name} comes from Hugging Face Accelerate, which is not installed: pip install accelerate. To train "
            "a model that does not fit on one device, nblaunch has "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()) and "
            "Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))",
            name="accelerate",
        ) from cause

    reject.__name__ = reject.__qualname__ = name
    # Libraries use isinstance() with such a class, or derive from it.
    return type(name, (), {"__init__": reject, "__doc__": reject.__doc__}) if name[0].isupper() else reject


# --- systems that can't run jobs -------------------------------------------------------------------------------------


def system_problem() -> str | None:
    """Return the reason why no job can run on this system, and what to do; None if jobs can run."""
    if hasattr(os, "fork") and sys.platform != "emscripten":
        return None
    return (
        f"nblaunch needs Linux or macOS, but this is {sys.platform}. On Windows, run `wsl --install` in a "
        "terminal, and install Jupyter and nblaunch inside WSL"
    )
