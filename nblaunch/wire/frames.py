"""Whose code a file is: the user's, a library's, or nblaunch's own."""

from __future__ import annotations

import sysconfig
from pathlib import Path

_OWN_FOLDER = str(Path(__file__).resolve().parent.parent)
_LIBRARY_FOLDERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def is_own_file(filename: str) -> bool:
    """Whether the file is part of nblaunch."""
    return filename.startswith(_OWN_FOLDER)


def is_user_file(filename: str) -> bool:
    """Whether the file is a notebook cell or a module of the user's: neither installed nor part of Python."""
    return not filename.startswith((*_LIBRARY_FOLDERS, _OWN_FOLDER, "<frozen", "<string>"))
