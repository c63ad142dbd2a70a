"""Docstrings of folders list exactly the modules in the folder; so does the list of the debugger's modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT

_FOLDERS = [file.parent for file in sorted(PACKAGE.rglob("__init__.py")) if file.parent != PACKAGE]
# ``board.py``, ``data/prepare.py``, ``strategies/``; no absolute paths, no parts of dotted names.
_NAMED = re.compile(r"(?<![\w/.])(?:\w+/)*\w+(?:\.py\b|/(?!\w))")


def missing(folder: Path, text: str) -> list[str]:
    """Return the names in ``text`` that ``folder`` does not have."""
    return [name for name in _NAMED.findall(text) if not (folder / name).exists()]


def unnamed(folder: Path, text: str) -> list[str]:
    """Return the modules and folders in ``folder`` that ``text`` does not name."""
    modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    # A path into a folder names that folder.
    named = _NAMED.findall(text)
    return sorted(
        (modules | folders) - {*named, *(name.partition("/")[0] + "/" for name in named if "/" in name)}
    )


def _description(folder: Path, module: str = "__init__.py") -> str:
    return ast.get_docstring(ast.parse((folder / module).read_text(encoding="utf-8"))) or ""


@pytest.mark.parametrize("folder", _FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_lists_its_modules(folder: Path) -> None:
    text = _description(folder)
    assert not missing(folder, text), "its description names what is not there"
    assert not unnamed(folder, text), (
        "its description leaves out what is there, as ``name.py`` or ``folder/``"
    )


def test_the_list_of_the_debuggers_modules_is_complete() -> None:
    assert not missing(PACKAGE, _description(PACKAGE, "debugging.py"))


def test_names_are_compared_in_both_directions(tmp_path: Path) -> None:
    for name in ("one.py", "two.py", "inner/__init__.py", "inner/three.py", "__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    text = "one.py   the first; reads /proc/stat and a.two.py/s\ngone.py  nothing\n``inner/three.py``, ``lost/``\n"
    assert missing(tmp_path, text) == ["gone.py", "lost/"]
    assert unnamed(tmp_path, text) == ["two.py"]
    assert unnamed(tmp_path, "one.py two.py") == ["inner/"]
