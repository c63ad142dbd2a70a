"""Changing modules when they are imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nblaunch.worker.imports import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "nblaunch_test_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("value = 'package'\n")
    (folder / "inner.py").write_text("value = 'inner'\n")
    (folder / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield folder.name
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def change(module: ModuleType) -> None:
    module.value = "changed"  # type: ignore[attr-defined]


def test_a_module_is_changed_when_it_comes(package: str) -> None:
    finders = list(sys.meta_path)
    when_imported(f"{package}.inner", change)
    assert f"{package}.inner" not in sys.modules
    inner = importlib.import_module(f"{package}.inner")
    assert (inner.value, importlib.import_module(package).value) == ("changed", "package")
    assert sys.meta_path == finders
    # It looks as if nobody had meddled.
    assert inner.__loader__ is inner.__spec__.loader
    assert inner.__spec__.loader.get_source(inner.__name__) == "value = 'inner'\n"


def test_a_loaded_module_is_changed_now(package: str) -> None:
    inner = importlib.import_module(f"{package}.inner")
    when_imported(f"{package}.inner", change)
    assert inner.value == "changed"


def test_a_module_that_fails_or_is_not_there_fails_as_ever(package: str) -> None:
    when_imported(f"{package}.broken", change)
    when_imported(f"{package}.missing", change)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(f"{package}.broken")
    with pytest.raises(ModuleNotFoundError, match="missing"):
        importlib.import_module(f"{package}.missing")


def test_looking_for_a_module_does_not_import_it(package: str) -> None:
    when_imported(f"{package}.inner", change)
    assert importlib.util.find_spec(f"{package}.inner") is not None
    assert f"{package}.inner" not in sys.modules
    assert importlib.import_module(f"{package}.inner").value == "changed"
