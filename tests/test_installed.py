"""What is installed, and what only looks like it."""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from nblaunch.installed import is_installed

NAME = "a_package_of_this_test"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a notebook, which is the first where Python looks."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_packages_modules_and_extensions_are() -> None:
    assert all(
        is_installed(name) for name in ("torch", "cloudpickle", "typing_extensions", "sys", "zipimport")
    )
    assert not is_installed(NAME)
    assert NAME not in sys.modules


def test_what_was_just_installed_is(folder: Path) -> None:
    assert not is_installed(NAME)
    (folder / NAME).mkdir()
    (folder / NAME / "__init__.py").touch()
    importlib.invalidate_caches()
    assert is_installed(NAME)


def test_a_folder_that_was_named_after_it_is_not(folder: Path) -> None:
    (folder / NAME / "run-1").mkdir(parents=True)
    assert not is_installed(NAME)
    importlib.import_module(NAME)  # as a library may do that tries whether it is there
    assert not is_installed(NAME)
    del sys.modules[NAME]


def test_what_was_made_by_hand_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, made)
    assert is_installed(NAME)
    made.__spec__ = ModuleSpec(NAME, None)
    assert is_installed(NAME)
    monkeypatch.setitem(sys.modules, NAME, None)  # what forbids an import
    assert not is_installed(NAME)
