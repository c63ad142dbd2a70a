"""Atomic writes of folders: a crash at any moment leaves the old files or the new ones, never a mixture.

All files are first written to another path and forced to disk. Then a rename, which is atomic in the file system, moves
them into place. (``host/files.py`` replaces single files in the same way.)

    a new folder       .name.partial/ ─────────── rename ──> name/
    an existing one    name/.partial/ ─────────── rename ──> name/.committed/ ── each file moved up ──> name/

The last row is a journal: once ``.committed`` exists, the new files are valid, and :func:`finish_commit` moves the
remaining ones up. Files in an existing folder that are not replaced stay unchanged. Only one process writes; callers
choose which one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from nblaunch.host.files import sync_file, sync_folder

_PARTIAL = ".partial"
_COMMITTED = ".committed"
_OBSOLETE = ".obsolete.json"
_DOOMED = ".doomed"


class Staging:
    """A temporary ``folder``, in which callers write files that :meth:`commit` moves to ``target``.

    ``folder`` exists from :meth:`create` to :meth:`commit`.
    """

    def __init__(self, target: Path) -> None:
        if target.exists() and not target.is_dir():
            raise ValueError(f"{target} is a file; a folder is needed")
        self.target = target
        # If the target exists, create the folder inside it, because the target may be a mount point.
        self.folder = target / _PARTIAL if target.is_dir() else target.with_name(f".{target.name}{_PARTIAL}")

    def create(self) -> None:
        """Create the empty folder; remove anything that a killed process left there."""
        finish_commit(self.target)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def commit(self, obsolete: Iterable[str] = ()) -> None:
        """Move the files into place, and remove the ``obsolete`` files of an existing target."""
        (self.folder / _OBSOLETE).write_text(json.dumps(sorted(obsolete)))
        for path in self.folder.rglob("*"):
            sync_folder(path) if path.is_dir() else sync_file(path)
        sync_folder(self.folder)
        if self.target.is_dir():
            os.rename(self.folder, self.target / _COMMITTED)
            sync_folder(self.target)
            finish_commit(self.target)
        else:
            (self.folder / _OBSOLETE).unlink()
            os.rename(self.folder, self.target)
            sync_folder(self.target.parent)

    def drop(self) -> None:
        """Remove the folder with all files in it. Does nothing after :meth:`commit`."""
        shutil.rmtree(self.folder, ignore_errors=True)


def finish_commit(target: Path) -> None:
    """Finish an interrupted commit to an existing folder; do nothing if there is none."""
    committed = target / _COMMITTED
    if not committed.is_dir():
        return
    with suppress(FileNotFoundError):  # this list is removed last, so without it the commit is complete
        for name in json.loads((committed / _OBSOLETE).read_text()):
            with suppress(FileNotFoundError):
                (target / name).unlink()
    for path in sorted(committed.rglob("*")):
        place = target / path.relative_to(committed)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        elif path.name != _OBSOLETE:
            with suppress(FileNotFoundError):  # another rank may have moved it
                os.replace(path, place)
    sync_folder(target)
    shutil.rmtree(committed, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Create a folder if it does not exist; raise ValueError if ``path`` is a file."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"{path} is a file; a folder is needed") from None


def remove_folder(path: Path) -> None:
    """Remove a folder; rename it first, so that no process finds it partially removed."""
    doomed = path.with_name(f".{path.name}{_DOOMED}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove incomplete folders that killed processes left in ``folder``, if ``is_ours`` accepts their names."""
    for path in folder.glob(".*"):
        name, dot, suffix = path.name[1:].rpartition(".")
        if dot + suffix in (_PARTIAL, _DOOMED) and is_ours(name) and not path.is_symlink() and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def files_below(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file in a folder and its subfolders, by its relative path."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _OBSOLETE
    }
