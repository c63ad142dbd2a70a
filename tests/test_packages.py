"""Installed packages, and changes to modules when they are imported."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from nblaunch.packages import call_before, defines_replacements, is_installed, replacement_of, when_imported


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


def test_modules_are_changed_on_import(package: str) -> None:
    finders = list(sys.meta_path)
    when_imported(f"{package}.inner", change)
    assert f"{package}.inner" not in sys.modules
    inner = importlib.import_module(f"{package}.inner")
    assert (inner.value, importlib.import_module(package).value) == ("changed", "package")
    assert sys.meta_path == finders
    # The module looks unchanged.
    assert inner.__loader__ is inner.__spec__.loader
    assert inner.__spec__.loader.get_source(inner.__name__) == "value = 'inner'\n"


def test_loaded_modules_are_changed_at_once(package: str) -> None:
    inner = importlib.import_module(f"{package}.inner")
    when_imported(f"{package}.inner", change)
    assert inner.value == "changed"


def test_failing_imports_still_fail(package: str) -> None:
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


NAME = "a_package_of_this_test"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the folder of a notebook, which Python searches first."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_packages_modules_and_extensions_count_as_installed() -> None:
    assert all(
        is_installed(name) for name in ("torch", "cloudpickle", "typing_extensions", "sys", "zipimport")
    )
    assert not is_installed(NAME)
    assert NAME not in sys.modules


def test_a_package_counts_as_soon_as_it_is_installed(folder: Path) -> None:
    assert not is_installed(NAME)
    (folder / NAME).mkdir()
    (folder / NAME / "__init__.py").touch()
    importlib.invalidate_caches()
    assert is_installed(NAME)


def test_a_folder_of_that_name_does_not_count_as_installed(folder: Path) -> None:
    (folder / NAME / "run-1").mkdir(parents=True)
    assert not is_installed(NAME)
    importlib.import_module(NAME)  # a library may check for it this way
    assert not is_installed(NAME)
    del sys.modules[NAME]


def test_a_module_made_by_hand_counts_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, made)
    assert is_installed(NAME)
    made.__spec__ = ModuleSpec(NAME, None)
    assert is_installed(NAME)
    monkeypatch.setitem(sys.modules, NAME, None)  # None forbids an import
    assert not is_installed(NAME)


def test_a_method_calls_a_hook_first_and_stays_as_it_is() -> None:
    class Pool:
        seen = ""

        def submit(self, task: str, *, times: int = 1) -> str:
            """Run a task."""
            return self.seen + task * times

    before = inspect.signature(Pool.submit)
    call_before(Pool, "submit", lambda pool: setattr(pool, "seen", "seen "))
    assert Pool().submit("a", times=2) == "seen aa"
    assert (Pool.submit.__name__, inspect.signature(Pool.submit)) == ("submit", before)


class Model:
    """A library's class whose warnings name the line that calls its methods."""

    def forward(self) -> None:
        warnings.warn("forward", stacklevel=2)

    def train(self) -> None:
        self.save()

    def save(self) -> None:
        warnings.warn("save", stacklevel=3)


@defines_replacements
def replace_method(cls: type, name: str) -> None:
    method = getattr(cls, name)

    @replacement_of(method)
    def call(model: object) -> None:
        method(model)

    setattr(cls, name, call)


def test_warnings_name_the_line_that_calls_a_library_not_the_hook() -> None:
    replace_method(Model, "forward")
    call_before(Model, "save", lambda model: None)
    replace_method(Model, "train")
    replace_method(Model, "train")
    model, first = Model(), inspect.currentframe().f_lineno  # type: ignore[union-attr]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.forward()
        model.train()
    places = [(Path(warning.filename).name, warning.lineno - first) for warning in caught]
    assert places == [("test_packages.py", 3), ("test_packages.py", 4)]


def test_tracebacks_show_the_lines_of_hooks() -> None:
    class Broken:
        def run(self) -> None:
            raise ValueError("broken")

    call_before(Broken, "run", lambda broken: None)
    with pytest.raises(ValueError, match="broken") as raised:
        Broken().run()
    text = "".join(traceback.format_exception(raised.value))
    assert "in call\n    return method(self, *args, **kwargs)\n" in text
