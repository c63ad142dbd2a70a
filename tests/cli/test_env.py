"""``nblaunch env`` reports the facts of this machine, which the tests determine independently."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from nblaunch import formatting
from tests.kernels import Kernel

DRIVER = """
class NVMLError(Exception):
    pass

def _nothing(*_):
    return None

class _Memory:
    total = 40960 << 20

nvmlInit = nvmlShutdown = _nothing
nvmlSystemGetDriverVersion = lambda: "550.54.15"
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetUUID = lambda handle: "GPU-5f1a8a2e-0000-0000-0000-000000000001"
nvmlDeviceGetName = lambda handle: "NVIDIA A100-SXM4-40GB"
nvmlDeviceGetMigMode = lambda handle: [0, 0]
nvmlDeviceGetMemoryInfo = lambda handle: _Memory
"""


def report(
    *options: str, environ: dict[str, str] | None = None, before: Callable[[], Any] | None = None
) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, "-m", "nblaunch", "env", *options],
        capture_output=True, text=True, timeout=300, env={**os.environ, **(environ or {})}, preexec_fn=before,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


def found(*arguments: Any, **options: Any) -> dict[str, Any]:
    return dict(json.loads(report("--json", *arguments, **options).stdout))


def test_env_reports_this_machine() -> None:
    facts = found()
    assert facts["versions"]["torch"] == metadata.version("torch")
    assert facts["versions"]["ipykernel"] == metadata.version("ipykernel")
    assert "torch_tpu" in facts["versions"]["not installed"].split(", ")
    cores = len(os.sched_getaffinity(0))
    assert re.match(r"\d+ CPU cores? usable \(", facts["devices"]["cpu"])
    assert f"this process may run on {cores}" in facts["devices"]["cpu"]
    assert re.fullmatch(r"[\d.]+ GB available of [\d.]+ GB", facts["memory"]["host"])
    status = os.statvfs("/dev/shm")
    assert facts["memory"]["/dev/shm"].endswith(f" of {formatting.size(status.f_blocks * status.f_frsize)}")


@pytest.mark.skipif(bool(os.environ.get("CUDA_VISIBLE_DEVICES")), reason="about a machine without GPUs")
def test_a_small_cpu_machine_forks_a_process_per_core_without_fp16() -> None:
    def limit() -> None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    facts = found(before=limit)
    assert any("ulimit -n" in text for text in facts["problems"])
    assert "may run on 2" in facts["devices"]["cpu"]
    assert facts["launch"]["backend"] == "cpu"
    assert facts["launch"]["processes"] == "2"
    assert facts["launch"]["start method"].startswith("fork: ")
    assert any("fp16" in text and "bf16" in text for text in facts["notes"])
    assert not any("fp16" in text for text in facts["problems"])
    assert re.match("can't be used: .*GPU", facts["devices"]["cuda"])


def test_the_text_has_all_parts_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("num_processes: three\n")
    environ = {
        "NBLAUNCH_CONFIG_FILE": str(file),
        "HF_TOKEN": "hf_secret",
        "MASTER_ADDR": "10.0.0.77",
        "NBLAUNCH_KEEP_JOBS": "7",
    }
    text = report(environ=environ).stdout
    for heading in (
        "versions",
        "devices",
        "memory",
        "launch",
        "problems",
        "notes",
    ):
        assert re.search(rf"^{heading}", text, re.MULTILINE), heading
    assert re.search(r"^  start method +\w+: ", text, re.MULTILINE)
    assert re.search(r"^  NBLAUNCH_KEEP_JOBS +7$", text, re.MULTILINE)
    assert re.search(r"^  MASTER_ADDR +\(set\)$", text, re.MULTILINE)
    assert "hf_secret" not in text
    assert "10.0.0.77" not in text
    assert re.search(
        r"^  - the settings of `nblaunch launch` can't be used: .*num_processes", text, re.MULTILINE
    )


@pytest.mark.skipif("+cpu" not in metadata.version("torch"), reason="about a torch without CUDA")
def test_an_unsupported_gpu_and_a_wrong_variable_are_problems(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(DRIVER)
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    environ = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "many"}
    facts = found(environ=environ)
    assert facts["devices"]["GPU 0"] == "NVIDIA A100-SXM4-40GB, 550.54.15, 40960 MiB"
    assert any("built without CUDA" in text and "pytorch.org" in text for text in facts["problems"])
    assert "OMP_NUM_THREADS='many'" in facts["launch"]["problem"]
    assert any("OMP_NUM_THREADS='many'" in text for text in facts["problems"])


def test_a_broken_torch_is_a_problem_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    facts = found(environ={"PYTHONPATH": str(tmp_path)})
    assert any("libtorch_cpu.so" in text for text in facts["problems"])
    assert "libtorch_cpu.so" in facts["launch"]["problem"]
    assert "usable" in facts["devices"]["cpu"]


def test_launch_settings_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("num_processes: 3\n")
    facts = found(environ={"NBLAUNCH_CONFIG_FILE": str(file)})
    assert facts["settings of nblaunch launch"] == {"file": str(file), "num_processes": "3"}


def test_a_cell_gets_a_report_on_its_kernel(kernel: Kernel) -> None:
    """A launch from a thread can't fork: the cell's report describes this kernel, not a fresh one."""
    text = kernel.run("%run -m nblaunch env").stdout
    assert re.search("^  from +this kernel$", text, re.MULTILINE)
    source = (
        "import threading; from nblaunch.cli import main\n"
        "thread = threading.Thread(target=main, args=(['env', '--json'],)); thread.start(); thread.join()"
    )
    # A thread's output may belong to another cell; here it is in this one.
    facts = json.loads(kernel.run(source).stdout)
    assert facts["launch"]["from"] == "this kernel"
    assert re.match("forkserver: .*thread", facts["launch"]["start method"])
    assert any("forkserver" in text for text in facts["notes"])
