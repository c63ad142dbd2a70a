"""Whether a fork of this process could use CUDA, and which line used CUDA first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nblaunch.backends import first_use

USED = first_use.CUDA._replace(is_in_use=lambda: True)
"""Simulated CUDA in a process that has initialised it."""


# The used part of the driver's library: before cuInit, it returns CUDA_ERROR_NOT_INITIALIZED.
_DRIVER = """
static int is_up;
int cuInit(unsigned flags) { is_up = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = is_up; return is_up ? 0 : 3; }
"""
_ASK = """
import ctypes, json
from nblaunch.backends import cpu, first_use
found = [first_use.is_cuda_initialised()]
driver = ctypes.CDLL({library!r})
found.append(first_use.is_cuda_initialised())
before = cpu.BACKEND.fork_hazard()
driver.cuInit(0)
print(json.dumps([*found, first_use.is_cuda_initialised(), before, cpu.BACKEND.fork_hazard()]))
"""


def test_the_driver_is_asked_whether_it_is_initialised(tmp_path: Path) -> None:
    """This matters for workers on the CPU, too: in a forked copy, torch queries CUDA in every optimizer step."""
    library = tmp_path / "libcuda.so"
    (tmp_path / "driver.c").write_text(_DRIVER)
    build = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, tmp_path / "driver.c"]
    subprocess.run(build, check=True, timeout=300)
    *found, before, after = _run(_ASK.format(library=str(library)), tmp_path)
    assert found == [False, False, True]
    assert before is None
    assert after.startswith("this process has used CUDA, which backward() and optimizers need")


def test_a_process_without_cuda_use_can_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(attempt: Callable[[], None] | None = None) -> str:
        raise AssertionError("nothing to find out by a fork")

    monkeypatch.setattr(first_use, "fork_failure", fails)
    assert first_use.gpu_hazard(first_use.CUDA) is None


def test_cuda_used_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert str(first_use.gpu_hazard(first_use.CUDA)).startswith("has used CUDA through torch, ")


def test_driver_queries_are_not_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """After torch.cuda.is_available(), nothing is initialised, but torch rejects CUDA in children."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert str(first_use.gpu_hazard(USED)).startswith("has called the CUDA driver through torch (")


def test_a_fork_of_a_process_that_has_used_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fork, the driver answers as if nothing had been initialised."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert "a forked process can't use it" in str(first_use.gpu_hazard(first_use.CUDA))
    assert first_use.gpu_in_use() == "CUDA"


def test_torch_may_still_be_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread imports torch while the launcher plans, so torch has no submodules yet."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert first_use.gpu_in_use() is None
    assert first_use.gpu_hazard(first_use.CUDA) is None


def test_another_library_that_uses_cuda() -> None:
    assert str(first_use.gpu_hazard(USED)).startswith("has used CUDA without torch.cuda")


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            "Unable to handle autograd's threading in combination with fork-based multiprocessing. See "
            "https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork",
            "has run backward(), which fails in forked workers (",
        ),
        ("CUDA error: initialization error", "has used CUDA without torch.cuda"),
    ],
)
def test_an_earlier_backward_is_named(monkeypatch: pytest.MonkeyPatch, error: str, found: str) -> None:
    """On every machine with GPUs, it initialises CUDA, because starting autograd's threads counts the GPUs."""

    def fail() -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(first_use, "small_backward", fail)
    assert str(first_use.gpu_hazard(USED)).startswith(found)


def test_the_probe_neither_touches_gpus_nor_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A backward starts the driver with all visible GPUs, and a driver that fails to start warns."""
    seen = tmp_path / "seen"

    def look() -> None:
        warnings.warn("CUDA initialization: CUDA driver initialization failed", UserWarning, stacklevel=1)
        seen.write_text(repr(os.environ["CUDA_VISIBLE_DEVICES"]))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(first_use, "small_backward", look)
    assert first_use.gpu_hazard(USED) is not None
    assert seen.read_text() == "''"
    assert capfd.readouterr() == ("", "")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_open_devices_are_found_by_descriptor(tmp_path: Path) -> None:
    folder = tmp_path / "fd"
    folder.mkdir()
    (folder / "0").symlink_to("/dev/null")
    (folder / "1").symlink_to("socket:[123]")
    (folder / "2").write_text("closed meanwhile")
    assert not first_use.has_open_device("/dev/kfd", folder)
    (folder / "3").symlink_to("/dev/kfd")
    assert first_use.has_open_device("/dev/kfd", folder)
    assert not first_use.has_open_device("/dev/kfd", tmp_path / "no-proc")
    assert not first_use.has_open_device("/dev/kfd")


# torch without CUDA stops before it initialises anything. These stubs replace the two functions that it lacks; the
# rest, including the queue, is torch's own.
_INITIALISE = """
import json, os, sys
{order}
torch._C._cuda_getDeviceCount = lambda: 1
torch._C._cuda_init = lambda: None
torch.cuda._cudart = object()
def build():
    torch.cuda.init()
build()
from nblaunch.backends import first_use
print(json.dumps([first_use.gpu_first_use(), os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]]))
"""


def _run(program: str, folder: Path, **env: str) -> Any:
    path = folder / "cell.py"
    path.write_text(program)
    run = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={"PYTHONPATH": ".", **env},
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("order", ["import torch, nblaunch", "import nblaunch, torch"])
def test_the_initialising_line_is_recorded(order: str, tmp_path: Path) -> None:
    frames, check = _run(_INITIALISE.format(order=order), tmp_path)
    own = [tuple(frame[1:]) for frame in frames if frame[0].endswith("cell.py")]
    assert own == [(8, "build"), (9, "<module>")]
    assert check == "1"


def test_the_users_counting_method_is_kept(tmp_path: Path) -> None:
    program = _INITIALISE.format(order="import nblaunch, torch")
    assert _run(program, tmp_path, PYTORCH_NVML_BASED_CUDA_CHECK="0")[1] == "0"


@pytest.mark.parametrize(("default", "wanted"), [("CPU", ""), ("TPU", "CPU"), ("", "CPU")])
def test_import_side_effects_are_not_user_choices(
    monkeypatch: pytest.MonkeyPatch, default: str, wanted: str
) -> None:
    monkeypatch.setattr(first_use, "_default_of_torch_xla", default)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert first_use.wanted_xla_device() == wanted


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (["train = lambda model: Accelerator().prepare(model)", "torch_xla.device()"], "cell 1, line 1"),
        (["def train(): return Accelerator()", "import x\ndevice = torch_xla.device()"], "cell 1, line 2"),
        (["def train():\n    Accelerator()\n", "for _ in range(2):\n    torch_xla.sync()"], "cell 1, line 2"),
        (["def train(\n    a,\n):\n    Accelerator()\n\n    Accelerator()"], ""),
        (["%pip install x\nnotebook_launcher(lambda: Accelerator(), ())\nxm.xla_device()"], "cell 0, line 3"),
        (["@once\ndef train():\n    torch_xla.device()\ntorch_xla.device()"], "cell 0, line 4"),
        (["class Task:\n    def run(self):\n        Accelerator()"], ""),
        (["# torch_xla.device()"], ""),
    ],
)
def test_lines_that_may_not_have_run_are_left_out(cells: list[str], found: str) -> None:
    guess = first_use.first_match(cells)
    assert found in guess
    assert bool(found) == bool(guess)
