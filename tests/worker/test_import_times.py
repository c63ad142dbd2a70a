"""Slow imports in workers: a note names the package, and imports behave as before."""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.host import proc
from nblaunch.worker import import_times
from tests.kernels import Kernel

PACKAGES = {
    "slow_inner": "",
    "slow_outer": "import slow_inner\n",
    "slow_lazy": "def load():\n    import slow_outer\n    return slow_outer\n",
    "slow_broken": "1 / 0\n",
    "slow_warning": "import warnings\nwarnings.warn('old', DeprecationWarning, stacklevel=2)\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    for name, text in PACKAGES.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    return folder


@pytest.fixture
def notes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Watch the imports of this process; every import counts as slow."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(import_times, "_SLOW_S", 0.0)
    monkeypatch.setattr(import_times, "_MAIN_PART", 0.0)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    found: list[str] = []
    import_times.watch(False, found.append)
    yield found
    for name in PACKAGES:
        sys.modules.pop(name, None)


def test_the_innermost_slow_package_is_named_with_its_importer(notes: list[str]) -> None:
    importlib.import_module("slow_lazy").load()
    texts = [note.partition(": ")[0].partition("importing ")[2] for note in notes]
    assert texts == ["slow_lazy", "slow_inner (imported by slow_outer)"]
    assert "import slow_inner before the launch, so that workers inherit it" in notes[1]


def test_modules_look_as_if_nothing_had_measured_them(notes: list[str]) -> None:
    module = importlib.import_module("slow_outer")
    assert module.__loader__ is module.__spec__.loader  # type: ignore[union-attr]
    assert "exec_module" not in vars(module.__loader__)
    assert importlib.reload(module) is module


def test_errors_and_warnings_of_imports_have_no_frames_of_the_watch(notes: list[str]) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        import slow_broken  # type: ignore[import-not-found]  # noqa: F401
    files = [Path(frame.filename).name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert files == ["test_import_times.py", "__init__.py"]
    assert "slow_broken" not in sys.modules
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import slow_warning  # type: ignore[import-not-found]  # noqa: F401
    assert [Path(warning.filename).name for warning in caught] == ["test_import_times.py"]
    with pytest.raises(ModuleNotFoundError, match="slow_missing"):
        importlib.import_module("slow_missing")


def test_an_import_is_not_slow_because_others_use_the_processor(
    notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1.0, 1e6)
    times = {threading.get_native_id(): proc.ThreadTimes(0.0, 0.0)}
    monkeypatch.setattr(proc, "thread_times", lambda pid: times)
    importlib.import_module("slow_inner")
    assert len(notes) == 1
    monkeypatch.setattr(
        proc, "thread_times", lambda pid: {threading.get_native_id(): proc.ThreadTimes(0.0, next(clock))}
    )
    importlib.import_module("slow_outer")
    assert len(notes) == 1


def test_a_note_names_the_package_that_a_library_imports(kernel: Kernel, folder: Path) -> None:
    (folder / "slow_inner" / "__init__.py").write_text("import time\ntime.sleep(0.2)\n")
    kernel.run(
        f"""
import sys
from nblaunch import notebook_launcher
from nblaunch.worker import import_times
import_times._SLOW_S = 0.2
sys.path.insert(0, {str(folder)!r})
def train():
    import slow_lazy
    slow_lazy.load()"""
    )
    launch = "notebook_launcher(train, num_processes=2, backend='cpu')"
    shown = " ".join(kernel.run(launch).shown.split())
    assert (
        shown.count("importing slow_inner (imported by slow_outer): import slow_inner before the launch") == 1
    )
    kernel.run("%env NBLAUNCH_CHECKS=-slow_imports")
    assert "importing" not in kernel.run(launch).shown
    kernel.run("%env NBLAUNCH_CHECKS=on\nimport slow_inner")
    assert "importing" not in kernel.run(launch).shown
