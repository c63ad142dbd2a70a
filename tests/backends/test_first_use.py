"""Whether a fork of this process could use CUDA, and who used it first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nblaunch.backends import first_use


@pytest.fixture
def descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for ``/proc/self/fd``."""
    folder = tmp_path / "fd"
    folder.mkdir()
    (folder / "0").symlink_to("/dev/null")
    monkeypatch.setattr(first_use, "Path", lambda path: folder)
    return folder


def test_a_process_that_left_cuda_alone_can_be_forked(descriptors: Path) -> None:
    assert first_use.gpu_hazard(first_use.CUDA) is None


def test_cuda_used_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert str(first_use.gpu_hazard(first_use.CUDA)).startswith("has used CUDA through torch, ")


def test_a_question_to_the_driver_is_distinguished_from_use(
    monkeypatch: pytest.MonkeyPatch, descriptors: Path
) -> None:
    """As after torch.cuda.is_available(): nothing is initialised, but torch refuses CUDA in children."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    expected = "has asked the CUDA driver through torch (torch.cuda.is_available() is enough)"
    assert str(first_use.gpu_hazard(first_use.CUDA)).startswith(expected)
    (descriptors / "1").symlink_to("/dev/nvidia-uvm")
    assert str(first_use.gpu_hazard(first_use.CUDA)).startswith(expected)


def test_a_context_of_another_library(monkeypatch: pytest.MonkeyPatch, descriptors: Path) -> None:
    (descriptors / "1").symlink_to("/dev/nvidia-uvm")
    assert "has opened CUDA by another way than torch.cuda (/dev/nvidia-uvm is open)" in str(
        first_use.gpu_hazard(first_use.CUDA)
    )


def test_an_earlier_backward(monkeypatch: pytest.MonkeyPatch, descriptors: Path) -> None:
    def fails(attempt: Callable[[], None] | None = None) -> str:
        return "RuntimeError: Unable to handle autograd\nand more"

    monkeypatch.setattr(first_use, "fork_failure", fails)
    assert first_use.gpu_hazard(first_use.CUDA) == (
        "has run backward(), which would fail in every forked worker (RuntimeError: Unable to handle autograd)"
    )


def test_an_earlier_backward_is_named_though_it_has_opened_the_driver(
    monkeypatch: pytest.MonkeyPatch, descriptors: Path
) -> None:
    """As on every machine with GPUs: starting autograd's threads counts them, by the driver and not by torch.cuda."""

    def refuse() -> None:
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing. See "
            "https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork"
        )

    (descriptors / "1").symlink_to("/dev/nvidia-uvm")
    monkeypatch.setattr(first_use, "small_backward", refuse)
    assert str(first_use.gpu_hazard(first_use.CUDA)).startswith(
        "has run backward(), which would fail in every forked worker ("
    )

    def fail() -> None:
        raise RuntimeError("CUDA error: initialization error")

    monkeypatch.setattr(first_use, "small_backward", fail)
    assert str(first_use.gpu_hazard(first_use.CUDA)).startswith(
        "has opened CUDA by another way than torch.cuda"
    )


def test_the_probe_neither_looks_at_gpus_nor_warns(
    monkeypatch: pytest.MonkeyPatch, descriptors: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A backward starts the driver with all visible GPUs, and a driver that can't be started warns."""
    seen = tmp_path / "seen"

    def look() -> None:
        warnings.warn("CUDA initialization: CUDA driver initialization failed", UserWarning, stacklevel=1)
        seen.write_text(repr(os.environ["CUDA_VISIBLE_DEVICES"]))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(first_use, "small_backward", look)
    assert first_use.gpu_hazard(first_use.CUDA) is None
    assert seen.read_text() == "''"
    assert capfd.readouterr() == ("", "")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_descriptors(tmp_path: Path) -> None:
    folder = tmp_path / "fd"
    folder.mkdir()
    (folder / "0").symlink_to("/dev/null")
    (folder / "1").symlink_to("socket:[123]")
    (folder / "2").write_text("closed meanwhile")
    assert not first_use.has_open_device(folder)
    (folder / "3").symlink_to("/dev/nvidia-uvm")
    assert first_use.has_open_device(folder)
    assert not first_use.has_open_device(tmp_path / "no-proc")
    assert not first_use.has_open_device(Path("/proc/self/fd"))


# torch without CUDA stops before it initialises anything. These stand in for the two things that it lacks; the rest,
# and the queue that is asked, is its own.
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
        timeout=60,
        check=True,
        env={"PYTHONPATH": ".", **env},
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("order", ["import torch, nblaunch", "import nblaunch, torch"])
def test_the_line_that_initialises_is_remembered(order: str, tmp_path: Path) -> None:
    frames, check = _run(_INITIALISE.format(order=order), tmp_path)
    own = [tuple(frame[1:]) for frame in frames if frame[0].endswith("cell.py")]
    assert own == [(8, "build"), (9, "<module>")]
    assert check == "1"


def test_a_way_to_count_that_the_user_chose_is_left_alone(tmp_path: Path) -> None:
    program = _INITIALISE.format(order="import nblaunch, torch")
    assert _run(program, tmp_path, PYTORCH_NVML_BASED_CUDA_CHECK="0")[1] == "0"


@pytest.mark.parametrize(("default", "wanted"), [("CPU", ""), ("TPU", "CPU"), ("", "CPU")])
def test_what_torch_xlas_import_has_set_is_no_wish(
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
def test_what_may_not_have_run_in_its_cell_is_not_named(cells: list[str], found: str) -> None:
    guess = first_use.first_match(cells)
    assert found in guess
    assert bool(found) == bool(guess)
