"""Sends the user's modules (as text) and variables to the nodes, and lists the packages that the nodes must have.

    kernel   user_modules()  ── text of each ──>  node   install(): makes them importable, with the kernel's file names
             required()      ── names ─────────>         missing(): lists absent ones, before any rank starts

Modules are sent as text and imported on the node, rather than pickled by value inside the call. Their classes keep
their names, so returned exceptions and results have the kernel's own classes. As with ``forkserver``, changes that
cells made to a module after its import are not sent.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import pickletools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from nblaunch import formatting
from nblaunch.engines.messages import ModuleSource
from nblaunch.errors import LaunchError
from nblaunch.user_code import is_user_file

_MAX_BYTES = 64 << 20
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "NBLAUNCH_", "ACCELERATE_", "PARALLELISM_CONFIG_")
_OTHERS = ("OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "TOKENIZERS_PARALLELISM")
_STAY = ("NBLAUNCH_LOG_DIR", "NBLAUNCH_CONFIG_FILE", "NBLAUNCH_XLA_CACHE", "TORCH_HOME")
"""Variables that hold paths on the launching machine."""

# --- in the launching process ------------------------------------------------------------------------------------


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for nodes on other machines: library settings, but no paths or secrets."""
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(_PREFIXES) or name in _OTHERS) and name not in _STAY
    }


def user_modules(folder: str | None) -> list[ModuleSource]:
    """Return the user's modules: loaded modules with their packages, and modules in the notebook's folder.

    Args:
        folder: folder of the notebook; None if it was removed.

    Raises:
        LaunchError: the modules are too large to send.
    """
    modules: dict[str, tuple[str, bool]] = {}
    for name, module in list(sys.modules.items()):
        file = _source_of(name, module)
        if file is None or name.partition(".")[0] in ("__main__", "nblaunch"):
            continue
        is_package = hasattr(module, "__path__")
        modules[name] = (file, is_package)
        if is_package:
            modules.update(_inside(name, os.path.dirname(file)))
    if folder is not None and any(entry in ("", folder) for entry in sys.path):
        # The function may import them at run time.
        for path in Path(folder).glob("*.py"):
            if path.stem.isidentifier():
                modules.setdefault(path.stem, (str(path), False))
    sources = [
        ModuleSource(name, file, text, is_package)
        for name, (file, is_package) in sorted(modules.items())
        if (text := _text_of(file)) is not None
    ]
    num_bytes = sum(len(source.text) for source in sources)
    if num_bytes > _MAX_BYTES:
        largest = max(sources, key=lambda source: len(source.text))
        raise LaunchError(
            "this notebook's modules, which the nodes need, are too large to send: "
            f"{formatting.size(num_bytes)} in total ({largest.filename} is the largest). Install them on the nodes"
        )
    return sources


def _source_of(name: str, module: Any) -> str | None:
    """Return the file of a user's module; None for any other module."""
    spec = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not isinstance(file, str) or not file.endswith(".py"):
        return None
    if not isinstance(spec, ModuleSpec) or spec.name != name or not spec.has_location:
        return None
    file = os.path.abspath(file)
    return file if is_user_file(file) else None


def _inside(package: str, folder: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Yield the modules in a package's folder, including subpackages."""
    for path in Path(folder).rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        if not all(part.isidentifier() for part in parts):
            continue
        is_package = parts[-1] == "__init__"
        name = ".".join([package, *(parts[:-1] if is_package else parts)])
        yield name, (str(path), is_package)


def _text_of(file: str) -> str | None:
    try:
        return Path(file).read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None  # removed, or in another encoding; a node that needs it reports that it is missing


def required(pickles: Iterable[bytes], sent: Iterable[ModuleSource]) -> list[str]:
    """Return the top-level modules that unpickling imports, except those that are sent."""
    top = {name.partition(".")[0] for pickle in pickles for name in _named_modules(pickle)}
    return sorted(top - {source.name.partition(".")[0] for source in sent} - {"__main__", "builtins"})


def _named_modules(pickled: bytes) -> Iterator[str]:
    """Yield the modules that a pickle names: modules of classes and functions, and modules that cloudpickle imports."""
    memo: list[_Pushed] = []
    before: _Pushed = None
    last: _Pushed = None
    for opcode, arg, _ in pickletools.genops(pickled):
        if opcode.name in ("FRAME", "PROTO"):
            continue
        if opcode.name == "MEMOIZE":
            memo.append(last)
            continue
        pushed: _Pushed = None
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            pushed = str(arg)
        elif opcode.name in ("BINGET", "LONG_BINGET") and isinstance(arg, int) and arg < len(memo):
            pushed = memo[arg]
        elif opcode.name == "STACK_GLOBAL" and isinstance(before, str) and isinstance(last, str):
            yield before
            pushed = (before, last)
        if last == _IMPORT and isinstance(pushed, str):
            yield pushed
        before, last = last, pushed


_Pushed = str | tuple[str, str] | None
"""The value that a pickle operation pushes: a string, a global as (module, name), or None for anything else."""

_IMPORT = ("cloudpickle.cloudpickle", "subimport")


# --- on a node ---------------------------------------------------------------------------------------------------


def install(sources: Sequence[ModuleSource], folder: Path) -> None:
    """Make the modules that were sent importable, ahead of modules that are installed here.

    Args:
        sources: the modules.
        folder: an empty folder, which receives the modules as files for fresh processes.
    """
    files: dict[str, tuple[Path, ModuleSource]] = {}
    for source in sources:
        parts = source.name.split(".")
        path = folder.joinpath(*parts, "__init__.py") if source.is_package else folder.joinpath(*parts)
        path = path if source.is_package else path.with_name(f"{parts[-1]}.py")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(source.text.encode())
        files[source.name] = (path, source)
    if files:
        sys.meta_path.insert(0, _Finder(files))
        sys.path.append(str(folder))


class _Loader(SourceFileLoader):
    """Loads a module from its local file, under its file name in the launching process."""

    def __init__(self, name: str, path: str, filename: str) -> None:
        super().__init__(name, path)
        self._filename = filename

    def get_code(self, fullname: str) -> CodeType | None:
        code: CodeType = self.source_to_code(self.get_data(self.path), self._filename)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, files: Mapping[str, tuple[Path, ModuleSource]]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._files:
            return None
        file, source = self._files[fullname]
        return importlib.util.spec_from_file_location(
            fullname,
            file,
            loader=_Loader(fullname, str(file), source.filename),
            submodule_search_locations=[str(file.parent)] if source.is_package else None,
        )


def missing(names: Iterable[str]) -> list[str]:
    """Return the modules in ``names`` that can't be found on this node."""
    return [name for name in names if not _is_found(name)]


def _is_found(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def adopt_paths(path: Sequence[str], folder: str | None) -> None:
    """Make imports search the launching process's user folders that exist on this machine."""
    if folder is not None and os.path.isdir(folder):
        os.chdir(folder)
    for entry in path:
        is_new = isinstance(entry, str) and os.path.isabs(entry) and entry not in sys.path
        if is_new and os.path.isdir(entry) and is_user_file(os.path.join(entry, "")):
            sys.path.append(entry)
