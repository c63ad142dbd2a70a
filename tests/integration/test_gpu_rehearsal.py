"""The programs of the GPU tests and the GPU benchmark on CPU cores, to find their mistakes without a GPU.

``tests/hardware`` checks their reports about devices; their computations are the same here. nblaunch does not offer
fp16 on the CPU, but torch supports it, so these tests lift the restriction.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch import formatting
from tests.benchmarks import gpu, gpu_launches
from tests.benchmarks.__main__ import TITLES
from tests.benchmarks.bench import ROOT
from tests.hardware import report, test_cuda, test_cuda_kernel
from tests.kernels import Kernel
from tests.training import ranks
from tests.training.ranks import rank_server  # noqa: F401  a fixture

ALLOW_FP16 = """
from nblaunch.backends.cpu import CpuBackend
CpuBackend.precision_problem = lambda self, precision: None
"""


def _train(mixed_precision: str) -> dict[str, Any]:
    exec(ALLOW_FP16)
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator is found")
    return test_cuda._train(mixed_precision)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
@pytest.mark.thorough
def test_training_of_ranks(mixed_precision: str) -> None:
    for answers in ranks.run(_train, 2, mixed_precision):
        assert answers["devices"] == ("cpu", "cpu", "cpu")
        assert answers["improved"]
        assert answers["equal"]
        assert answers["flags"] == [True, False] * 2
        assert answers["group"] == "gloo"
        assert answers["board"]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """Start one kernel with the functions of the GPU tests."""
    with Kernel.start() as kernel:
        kernel.run(test_cuda_kernel.PREAMBLE)
        kernel.run(ALLOW_FP16)
        yield kernel


@pytest.mark.parametrize(
    ("arguments", "tolerance"),
    [("(build(),)", 0.02), ("(build(), 'bf16')", 0.1), (test_cuda_kernel.FP16, 0.05)],
    ids=["fp32", "bf16", "fp16"],
)
def test_two_ranks_match_one_process(kernel: Kernel, arguments: str, tolerance: float) -> None:
    (alone,), _ = test_cuda_kernel._launch(kernel, arguments, ", num_processes=1, backend='cpu'")
    found, method = test_cuda_kernel._launch(kernel, arguments, ", num_processes=2, backend='cpu'")
    assert method == "fork"
    for one in found:
        assert one["losses"] == pytest.approx(alone["losses"], rel=tolerance)
        assert one["losses"][-1] < one["losses"][0] / 2
        assert one["skipped"] == [arguments == test_cuda_kernel.FP16] + [False] * (len(one["skipped"]) - 1)
        assert one["parent"]


def test_loader_processes(kernel: Kernel) -> None:
    kernel.run(test_cuda_kernel.READ)
    cell = kernel.run("notebook_launcher(read, (), 2, backend='cpu', return_all=True)")
    assert cell.value == [True, True]
    kernel.wait_for_no_processes()


@pytest.mark.alarms("hang")
def test_spinning_ranks_are_detected(kernel: Kernel) -> None:
    kernel.run(test_cuda_kernel.SPIN)
    test_cuda_kernel.assert_spinning_is_a_hang(kernel, "cpu")


@pytest.mark.thorough
def test_launches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(
        gpu_launches, "BEFORE", {"a backward": gpu_launches.BEFORE["a backward"], "nothing": "import nowhere"}
    )
    counted, left_out = gpu_launches.rows("cpu", 2, 1)
    assert (counted.value, counted.holds) == ("2/2", True)
    assert left_out.value == "not measured: nowhere is not installed"


def test_the_report_has_all_outcomes_and_figures(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n"
        "@pytest.mark.skip('no GPU')\ndef test_other(): pass\n"
    )
    parts = (
        report.Part("tests", "it works", (str(tmp_path / "test_it.py"), "-p", "no:cacheprovider")),
        report.Part("speed", "it is fast", benchmark="gpu"),
    )
    assert not report.run(parts, tmp_path / "artifacts")
    found = json.loads((tmp_path / "artifacts/gpu.json").read_text())["parts"]
    assert (found["tests"]["passed"], list(found["tests"]["failed"])) == (1, ["test_bad"])
    assert found["tests"]["skipped"] == {"test_other": "no GPU"}
    assert found["speed"]["good"]
    assert found["speed"]["rows"][0]["what"] == "GPUs of this machine"
    assert report.run(parts[1:], tmp_path / "artifacts"), "a part by itself is judged by itself"
    page = (tmp_path / "artifacts/gpu.md").read_text()
    assert "## tests: NOT GOOD" in page
    assert "| GPUs of this machine |" in page


def test_every_part_of_the_report_exists() -> None:
    files = [word for part in report.PARTS for word in part.tests if word.endswith(".py")]
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert {part.benchmark for part in report.PARTS} - {""} <= TITLES.keys()


def test_fresh_processes_check_hazards_and_forks() -> None:
    """Without GPUs, no query is a hazard, and no fork can use one."""
    hazard, failure = test_cuda._fresh(test_cuda._FORK.format(before="torch.cuda.is_available()"))
    assert hazard is None
    assert "AssertionError" in failure or "RuntimeError" in failure


@pytest.mark.thorough
@pytest.mark.slow
def test_the_benchmark_runs_to_its_end() -> None:
    found = list(gpu.rows(gpu.REHEARSAL, 2))
    assert [row.what.partition(",")[0] for row in found] == [
        "steps/s of a tiny model on a fixed batch",
        "steps/s of a tiny model with a loader",
        "steps/s of a tiny large model on a fixed batch",
        "first launch of a kernel to first step",
        "first launch of a kernel to first step",
        "launch to first step",
        "launch to first step",
        "launch to first step",
        "script to first step",
    ]
    assert [row.what.rpartition(", ")[2] for row in found[5:]] == [
        "times a bare fork's",
        "times a bare fork's",
        "times faster than accelerate",
        "times torchrun's",
    ]
    assert [bool(row.target) for row in found] == [True] * 3 + [False] * 4 + [True, False]


def test_the_benchmark_reports_missing_measurements(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Iterator[gpu.Row]:
        yield gpu.Row("one", "1")
        raise AssertionError("the cell was expected to end without an error\nCUDA error: out of memory")

    monkeypatch.setattr(gpu, "_step_rows", fail)
    for part in ("_first_launch_rows", "_launch_rows", "_script_rows"):
        monkeypatch.setattr(gpu, part, lambda *_: ())
    first, failed, row = gpu.rows(gpu.FULL, 1)
    assert first.what == "one"
    assert failed.value.startswith("FAILED (AssertionError: the cell was expected to end without an error)")
    assert not failed.holds
    assert "CUDA error: out of memory" in capsys.readouterr().err
    assert "not measured: accelerate starts processes for two GPUs or more" in row.value
    assert not row.target
    monkeypatch.setattr(gpu, "HAS_PEER", False)
    assert "not measured: accelerate is not installed" in [*gpu.rows(gpu.FULL, 2)][-1].value


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # from Python 3.12
def test_a_bare_fork_that_fails_reports_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LookupError("no such device")

    monkeypatch.setattr(gpu, "_bare_first_step", fail)
    with gpu._Timer() as timer, pytest.raises(RuntimeError, match="LookupError: no such device"):
        timer.time(lambda: gpu._fork_bare(1, "cpu", timer.path))


# Machines with simulated GPUs for commands: a stub module replaces the driver's library, and torch claims to be built
# with CUDA. One process imports torch for all commands, and each command runs in a fork of it.
COMMANDS = """
import json, os, sys, torch
torch.version.cuda = "12.8"
from nblaunch.cli import main
for words, env in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(env)
        sys.exit(main(words))
    assert os.wait()[1] == 0, words
    print(end="\\f", flush=True)
"""
DRIVER = """
import os, sys
from tests.host.fake_nvml import FakeGpu, FakeNvml
gpus = [FakeGpu(f"GPU-0000000{number}-aaaa", "NVIDIA H200", 1 << 37) for number in range(8)]
driver = sys.modules["pynvml"] = FakeNvml(gpus, "570.1")
driver.nvmlDeviceGetCount = lambda: int(os.environ["GPUS"])  # torch imports it before there are any
"""


@pytest.mark.thorough
def test_machines_with_several_gpus(tmp_path: Path) -> None:
    machines: list[tuple[dict[str, str], int]] = [
        ({"GPUS": "1"}, 1),
        ({"GPUS": "2"}, 2),
        ({"GPUS": "8"}, 8),
        ({"GPUS": "8", "CUDA_VISIBLE_DEVICES": "6,7"}, 2),
        ({"GPUS": "8", "CUDA_VISIBLE_DEVICES": "GPU-00000003,GPU-00000005"}, 2),
    ]
    launches = [
        ("1", ["--multi_gpu"], "1 cuda process of"),
        ("8", ["--multi_gpu"], "8 cuda processes of"),
        ("8", ["--gpu_ids", "3,5"], "2 cuda processes of"),
    ]
    commands = [(["env", "--json"], env) for env, _ in machines]
    commands += [
        (["launch", *words, "--print_plan", "train.py"], {"GPUS": count}) for count, words, _ in launches
    ]
    (tmp_path / "pynvml.py").write_text(DRIVER)
    (tmp_path / "train.py").write_text("")
    ended = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answers = ended.stdout.split("\f")[:-1]
    for (_, expected), answer in zip(machines, answers, strict=False):
        found = json.loads(answer)
        assert found["devices"]["cuda"] == formatting.count(expected, "GPU")
        launch = found["launch"]
        assert (launch["backend"], launch["processes"], launch["process group"]) == (
            "cuda",
            str(expected),
            "nccl",
        )
        assert launch["start method"].startswith("fork: ")
    for (_, _, expected_text), answer in zip(launches, answers[len(machines) :], strict=True):
        assert f"on this machine: {expected_text}" in answer
