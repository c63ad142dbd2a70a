"""The XLA backend's answers about simulated hosts before torch_xla is imported."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from nblaunch.backends import first_use, xla, xla_runtime
from nblaunch.backends.xla import BACKEND
from nblaunch.host import tpu
from nblaunch.topology import Topology

NUM_CHIPS = xla_runtime.num_chips
TOPOLOGY = Topology(rank=1, local_rank=1, world_size=8, local_world_size=8, master_port=1)


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without chips, packages and variables."""
    for name in ("PJRT_DEVICE", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    host(monkeypatch, 0)
    install(monkeypatch)
    monkeypatch.setattr(tpu, "device_files", lambda names_tpu: 0)
    monkeypatch.setattr(tpu, "lock_holder", lambda: None)
    monkeypatch.setattr(tpu, "ask_metadata_server", lambda key: None)
    monkeypatch.setattr(first_use, "is_xla_initialised", lambda: False)


def host(monkeypatch: pytest.MonkeyPatch, num_chips: int, kind: str = "v5e") -> None:
    monkeypatch.setattr(tpu, "chips", lambda: Counter({kind: num_chips}))
    monkeypatch.setattr(xla_runtime, "num_chips", lambda: num_chips)


def install(
    monkeypatch: pytest.MonkeyPatch, *packages: str, torch: str = "2.9.0+cpu", torch_xla: str = "2.9.0"
) -> None:
    versions = {"torch": torch, "torch_xla": torch_xla}
    monkeypatch.setattr(xla, "is_installed", lambda package: package in packages)
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)


def test_backend_needs_chips_and_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BACKEND.affinity() == 0
    assert "torch_xla is not installed" in BACKEND.unavailable_reason()
    assert BACKEND.overlooked() is None
    install(monkeypatch, "torch_xla")
    assert BACKEND.affinity() == 1, "by name only: below the plain CPU"


@pytest.mark.parametrize("num_chips", [1, 4, 8])
def test_chips_decide(monkeypatch: pytest.MonkeyPatch, num_chips: int) -> None:
    host(monkeypatch, num_chips)
    install(monkeypatch, "torch_xla")
    assert BACKEND.affinity() > 10
    assert BACKEND.device_count() == num_chips
    assert BACKEND.device_noun == "TPU chip"
    assert not BACKEND.is_oversubscribable
    assert BACKEND.launch_problem() is None
    assert BACKEND.count_problem(num_chips) is None
    assert BACKEND.count_problem(1) is None
    env = BACKEND.worker_env(Topology(0, 0, 0, num_chips, num_chips, master_port=1))
    assert env["PJRT_DEVICE"] == "TPU"
    assert env["PJRT_LOCAL_PROCESS_COUNT"] == str(num_chips)


def test_an_accelerator_type_without_its_size_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch_xla 2.9 fails to parse it, in the kernel and in every worker."""
    host(monkeypatch, 8)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod")
    assert BACKEND.worker_env(TOPOLOGY)["TPU_ACCELERATOR_TYPE"] == "v5litepod-8"


def test_one_process_for_all_chips_keeps_the_image_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, 8)
    monkeypatch.setenv("TPU_CHIPS_PER_PROCESS_BOUNDS", "2,4,1")
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_COUNT", "8")
    monkeypatch.delenv("TPU_VISIBLE_CHIPS", raising=False)
    env = BACKEND.worker_env(Topology(master_port=1)) | (BACKEND.spmd_env() or {})
    assert env["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,4,1"
    assert env["TPU_VISIBLE_CHIPS"] is None
    assert env["PJRT_LOCAL_PROCESS_COUNT"] is None


def test_a_part_of_the_chips_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, 8)
    assert "valid values are 1 and 8" in (BACKEND.count_problem(3) or "")


def test_the_environment_can_select_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, 8)
    install(monkeypatch, "torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert 2 < BACKEND.affinity() < 10
    assert BACKEND.is_oversubscribable
    env = BACKEND.worker_env(TOPOLOGY)
    assert env["PJRT_DEVICE"] == "CPU"
    assert env["TPU_PROCESS_BOUNDS"] is None
    assert BACKEND.count_problem(3) is None


def test_torch_xla_cpu_fallback_does_not_hide_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import sets PJRT_DEVICE=CPU if it sees no PCI devices, for example in a container that shows only
    /dev/accel*.
    """
    theirs = ModuleType("torch_xla._internal.tpu")
    theirs.num_available_chips = lambda: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    monkeypatch.setattr(xla_runtime, "num_chips", NUM_CHIPS)
    monkeypatch.setattr(tpu, "chips", Counter)
    monkeypatch.setattr(tpu, "device_files", lambda names_tpu: 8)
    install(monkeypatch, "torch_xla")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(first_use, "_default_of_torch_xla", "CPU")
    assert (BACKEND.affinity(), BACKEND.device_count(), BACKEND.device_noun) == (20, 8, "TPU chip")
    assert BACKEND.launch_problem() is None
    assert BACKEND.worker_env(TOPOLOGY)["PJRT_DEVICE"] == "TPU"
    monkeypatch.setattr(first_use, "_default_of_torch_xla", "")
    assert BACKEND.device_noun == "CPU core", "what the user has set holds"


def test_an_environment_without_chips_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert BACKEND.affinity() == 0
    assert "the PCI bus has no TPU chip" in BACKEND.unavailable_reason()
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    assert BACKEND.affinity() == 0
    assert "PJRT_DEVICE=NEURON is not supported; valid values are TPU and CPU" in BACKEND.unavailable_reason()


def test_chips_without_torch_xla_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, 8)
    reported = BACKEND.overlooked() or ""
    assert "this host has 8 TPU chips, but they can't be used: torch_xla is not installed" in reported
    assert 'pip install "nblaunch[tpu]"' in reported


def test_torch_tpu_problem_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, 8)
    install(monkeypatch, "torch_tpu")
    assert BACKEND.overlooked() is None


@pytest.mark.parametrize(
    ("torch", "torch_xla", "fits"),
    [
        ("2.9.0+cpu", "2.9.0", True),
        ("2.9.1", "2.9.0", True),
        ("2.13.0", "2.9.0", False),
        ("2.9.0", "2.8.1", False),
    ],
)
def test_mismatched_versions_are_reported_before_the_import(
    monkeypatch: pytest.MonkeyPatch, torch: str, torch_xla: str, fits: bool
) -> None:
    install(monkeypatch, "torch_xla", torch=torch, torch_xla=torch_xla)
    problem = BACKEND.launch_problem()
    assert (problem is None) is fits
    assert fits or (torch in problem and torch_xla in problem and "Install torch==" in problem)  # type: ignore[operator]


def test_chips_with_two_cores_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, 4, "v2 or v3")
    install(monkeypatch, "torch_xla")
    assert BACKEND.launch_problem() is None, "SPMD can drive them"
    for num_processes in (1, 4):
        problem = BACKEND.count_problem(num_processes) or ""
        assert "two cores each" in problem
        assert "strategy='spmd'" in problem


def test_a_host_of_a_slice_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, 4, "v4")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "host-0,host-1")
    assert "one of 2 hosts" in (BACKEND.launch_problem() or "")


def test_hosts_of_the_metadata_server_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise four of sixteen chips would train alone."""
    host(monkeypatch, 4)
    answers = {
        "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'\n",
        "worker-network-endpoints": "a:1:10.0.0.2,b:2:10.0.0.3",
    }
    monkeypatch.setattr(tpu, "ask_metadata_server", answers.get)
    assert "one of 2 hosts" in (BACKEND.launch_problem() or "")


def test_chips_held_by_a_kernel_library_need_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, 8)
    monkeypatch.setattr(tpu, "lock_holder", os.getpid)
    assert "restart the kernel" in (BACKEND.launch_problem() or "")


def test_chips_held_by_the_kernel_need_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, 8)
    monkeypatch.setattr(first_use, "is_xla_initialised", lambda: True)
    assert "restart the kernel" in (BACKEND.launch_problem() or "")


def test_chips_in_use_by_another_process_are_rejected_by_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, 8)
    monkeypatch.setattr(tpu, "lock_holder", lambda: 4242)
    monkeypatch.setattr(tpu, "command_of", lambda pid: "python train.py")
    problem = BACKEND.launch_problem() or ""
    assert "another process is using the TPU chips: 4242 (python train.py)" in problem
    assert "don't delete" in problem


@pytest.mark.parametrize(
    "message",
    [
        "Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 17.93G of 15.48G hbm. Exceeded hbm capacity by 2.45G.",
        "RESOURCE_EXHAUSTED: Error loading program: Attempting to allocate 3.51G. That was not possible.",
    ],
)
def test_full_hbm_is_not_host_memory(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    assert BACKEND.explain_failure(RuntimeError(message)) == (), "the host is the device"
    host(monkeypatch, 8)
    assert "HBM" in BACKEND.explain_failure(RuntimeError(message))[0]
    assert BACKEND.explain_failure(ValueError(message)) == ()
    assert BACKEND.explain_failure(RuntimeError("expected a tensor")) == ()


def test_no_other_file_imports_torch_xla() -> None:
    package = Path(xla_runtime.__file__).parents[1]
    importing = re.compile(r"^\s*(import|from) torch_xla|import_module\(f?.torch_xla", re.MULTILINE)
    found = [path.name for path in package.rglob("*.py") if importing.search(path.read_text())]
    assert found == ["xla_runtime.py"]


def test_fp16_is_rejected_and_names_bf16() -> None:
    assert "bf16" in (BACKEND.precision_problem("fp16") or "")
    assert BACKEND.precision_problem("bf16") is None


def test_a_downcast_is_rejected_elsewhere() -> None:
    from nblaunch.backends.cpu import CpuBackend

    with pytest.raises(ValueError, match="downcast_bf16=True needs XLA devices"):
        CpuBackend().downcast_to_bf16()
    with pytest.raises(ValueError, match="strategy='spmd' needs XLA devices"):
        CpuBackend().enable_spmd()


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({"bytes_used": 3, "peak_bytes_used": 5, "bytes_limit": 16}, (3, 5, 16)),
        ({"bytes_used": 3, "bytes_limit": 16}, (3, 3, 16)),
        (RuntimeError("UNIMPLEMENTED: GetAllocatorStats is not supported"), None),
    ],
)
def test_device_memory_comes_from_the_runtime(
    monkeypatch: pytest.MonkeyPatch,
    reported: dict[str, int] | RuntimeError,
    expected: tuple[int, int, int] | None,
) -> None:
    def get_memory_info() -> dict[str, int]:
        if isinstance(reported, RuntimeError):
            raise reported
        return reported

    model = ModuleType("torch_xla.core.xla_model")
    model.get_memory_info = get_memory_info  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", model)
    monkeypatch.setattr(xla_runtime, "kind", lambda: "TPU")
    assert BACKEND.device_memory() == expected
    monkeypatch.setattr(xla_runtime, "kind", lambda: "CPU")
    assert BACKEND.device_memory() is None
