"""The user's modules that a fresh process would not find, or would find in another file.

A cell may have changed the working directory or ``sys.path`` since it imported a module, or may itself have loaded the
module from a file. Functions of the module are pickled by name, so a worker must import the module from the
kernel's file.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import zipimport
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing import spawn
from types import ModuleType
from typing import Any, NamedTuple

from nblaunch.user_code import is_user_file


class Place(NamedTuple):
    """The location of a module.

    Args:
        file: "" for a namespace package.
        folders: where Python looks for the modules of a package; None if the module is not a package.
        archive: the zip file that contains it, with the folder inside; "" if none.
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
    """Yield the entries of ``sys.path`` that let other processes find the outermost of these modules."""
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
