"""Things that a fresh process lacks: modules that it would not find, and variables that only strings name.

A cell may have changed the working directory or ``sys.path`` since it imported one of the user's modules, or may itself
have loaded the module from a file. The module's functions are pickled by name, so a worker must import the module from
the kernel's file.

A call is sent with the variables that the function's code names. ``numexpr.evaluate("2 * a")``,
``frame.query("x > @a")`` and ``eval("a")``, however, look up a name only when they run.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import re
import sys
import traceback
import zipimport
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing import spawn
from types import ModuleType
from typing import Any, NamedTuple

from nblaunch.user_code import is_user_file

_UNDEFINED = re.compile(r"name '(\w+)' is not defined")
_names: frozenset[str] = frozenset()


class Place(NamedTuple):
    """The location of a module.

    Args:
        file: "" for a namespace package.
        folders: where Python looks for the modules of a package; None if the module is not a package.
        archive: the zip file that contains the module, with the folder inside the file; "" if there is none.
    """

    file: str
    folders: tuple[str, ...] | None
    archive: str


def places_of_this_process() -> dict[str, Place]:
    """Return name -> place of the user's loaded modules that an import would no longer find in their places."""
    loaded = {name: place for name, module in list(sys.modules.items()) if (place := _place(name, module))}
    astray = {name for name, place in loaded.items() if "." not in name and _found(name) != place}
    return {name: place for name, place in loaded.items() if name.partition(".")[0] in astray}


def find_at(places: Mapping[str, Place]) -> None:
    """Import modules from their ``places``, here and in processes that ``multiprocessing`` starts here."""
    if not places:
        return
    sys.meta_path.insert(0, _Finder(places))
    prepare = spawn.get_preparation_data

    def prepare_with_places(name: str) -> dict[str, Any]:
        data = prepare(name)
        data["sys_path"] = [*data.get("sys_path", sys.path), *_search_paths(places)]
        return data

    spawn.get_preparation_data = prepare_with_places


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = self._places.get(fullname)
        if place is None:
            return None
        if place.archive:
            return PathFinder.find_spec(fullname, [place.archive])
        if not place.file:
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = list(place.folders or ())
            return spec
        if not os.path.exists(place.file):
            return None
        folders = None if place.folders is None else list(place.folders)
        spec_of_file = importlib.util.spec_from_file_location(
            fullname, place.file, submodule_search_locations=folders
        )
        if spec_of_file is not None:
            return spec_of_file
        # The file has no Python suffix.
        loader = SourceFileLoader(fullname, place.file)
        return importlib.util.spec_from_file_location(fullname, place.file, loader=loader)


def _place(name: str, module: Any) -> Place | None:
    """Return the place of a user's loaded module; None for other modules, and for modules without a file."""
    spec = getattr(module, "__spec__", None)
    if not isinstance(module, ModuleType) or not isinstance(spec, ModuleSpec) or spec.name != name:
        return None
    place = _place_of(spec)
    if place is None:
        return None
    named = [place.file] if place.file else [os.path.join(folder, "") for folder in place.folders or ()]
    return place if named and all(map(is_user_file, named)) else None


def _found(name: str) -> Place | None:
    """Return where an import would find a module now."""
    try:
        spec = PathFinder.find_spec(name)
    except Exception:  # raised by a user's finder
        return None
    return None if spec is None else _place_of(spec)


def _place_of(spec: ModuleSpec) -> Place | None:
    locations = spec.submodule_search_locations
    folders = None if locations is None else tuple(map(os.path.abspath, locations))
    if isinstance(spec.loader, zipimport.zipimporter):
        loader: Any = spec.loader
        return Place(str(spec.origin), folders, os.path.join(loader.archive, loader.prefix))
    if spec.has_location and spec.origin is not None:
        return Place(os.path.abspath(spec.origin), folders, "")
    return Place("", folders, "") if folders else None


def _search_paths(places: Mapping[str, Place]) -> Iterator[str]:
    """Yield the entries for ``sys.path`` that let other processes find the outermost of these modules."""
    entries: dict[str, None] = {}
    for name, place in places.items():
        if "." in name:
            continue
        if place.archive:
            entries[place.archive.rstrip(os.sep)] = None
        elif place.folders is None:
            entries[os.path.dirname(place.file)] = None
        else:
            entries.update(dict.fromkeys(map(os.path.dirname, place.folders)))
    yield from entries


# --- variables -------------------------------------------------------------------------------------------------------


def names_of_this_process() -> frozenset[str]:
    """Return the names of the notebook's variables."""
    return frozenset(name for name in list(vars(sys.modules["__main__"])) if not name.startswith("_"))


def remember(names: Collection[str]) -> None:
    """Remember the names of the kernel's variables, in a process that has not been forked from the kernel."""
    global _names
    _names = frozenset(names)


def is_fresh_process() -> bool:
    """Return whether this process, or the one that forked it, is an interpreter that was started for the launch."""
    return bool(_names)


def explain(error: BaseException) -> tuple[str, ...]:
    """Return a sentence if ``error`` was raised because this process lacks one of the notebook's variables."""
    name = _missing_name(error)
    if name not in _names or name in vars(sys.modules["__main__"]):
        return ()
    return (
        f"The notebook has a variable {name}, but this fresh process does not, because only variables that the "
        "function's code names are sent, and names in strings do not count. Pass the variable as an argument.",
    )


def explain_in_session(message: str) -> tuple[str, ...]:
    """Return a sentence if ``message``, from a NameError on a session's rank, names one of this kernel's variables."""
    match = _UNDEFINED.match(message)
    if match is None or match[1] not in names_of_this_process():
        return ()
    return (
        f"The notebook has a variable {match[1]}, but this rank does not: ranks have the variables that the notebook "
        f"had when the session started. Send it with session.put({match[1]}={match[1]})",
    )


def _missing_name(error: BaseException) -> str | None:
    if isinstance(error, NameError):
        match = _UNDEFINED.search(str(error))
        return match[1] if match else None
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        names = vars(sys.modules["__main__"])
        if frames and any(value is names for value in frames[-1].f_locals.values()):
            return error.args[0]
    return None
