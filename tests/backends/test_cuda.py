"""The CUDA backend's launcher half, with fake machines; real hardware is in tests/hardware/test_cuda.py."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nblaunch import backends
from nblaunch.backends import autograd_probe, cuda
from nblaunch.backends.cuda import BACKEND, Gpu
from nblaunch.topology import Topology

TWO = (Gpu("GPU-aaaa1111"), Gpu("GPU-aabb2222"))
PARTITIONED = (Gpu("GPU-cccc3333", ("MIG-1111", "MIG-2222")), Gpu("GPU-dddd4444"))

LISTING = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-cccc3333)
  MIG 3g.20gb     Device  0: (UUID: MIG-1111)
  MIG 3g.20gb     Device  1: (UUID: MIG-2222)
GPU 1: Tesla T4 (UUID: GPU-dddd4444)
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake ``nvidia-smi``, the only program on PATH; there is no NVML."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cuda, "_WSL_SMI", str(tmp_path / "none"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cuda, "_query_gpus", cuda._query_gpus.__wrapped__)
    return program


def _write(program: Path, body: str) -> None:
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def _lists(program: Path, text: str) -> None:
    # Builtins only: PATH holds nothing else.
    _write(program, "".join(f"echo '{line}'\n" for line in text.splitlines()))


def test_gpus_are_counted_by_nvidia_smi(smi: Path) -> None:
    _lists(smi, "GPU 0: Tesla T4 (UUID: GPU-aaaa1111)\nGPU 1: Tesla T4 (UUID: GPU-aabb2222)")
    assert cuda.physical_gpus() == TWO
    assert BACKEND.device_count() == 2


def test_mig_instances_belong_to_their_gpu() -> None:
    assert cuda.parse_smi(LISTING) == PARTITIONED


@pytest.mark.parametrize(
    "body", ["exit 9", "echo NVIDIA-SMI has failed", "echo 'GPU 0: T4 (UUID: GPU-1)'; exit 1"]
)
def test_a_driver_in_a_bad_state_counts_as_no_gpu(smi: Path, body: str) -> None:
    _write(smi, body)
    assert BACKEND.device_count() == 0
    assert BACKEND.affinity() == 0
    assert BACKEND.unavailable_reason() == "neither NVML nor nvidia-smi finds an NVIDIA GPU on this machine"


def test_no_nvidia_smi_counts_as_no_gpu(smi: Path) -> None:
    assert BACKEND.device_count() == 0


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["GPU-aaaa1111", "GPU-aabb2222"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1", ["GPU-aabb2222"]),
        ("1, 0", ["GPU-aabb2222", "GPU-aaaa1111"]),
        ("0,-1,1", ["GPU-aaaa1111"]),
        ("0,7,1", ["GPU-aaaa1111"]),
        ("0,0", []),
        ("GPU-aabb", ["GPU-aabb2222"]),
        ("GPU-aa", []),
        ("GPU-aaaa1111,1", ["GPU-aaaa1111", "GPU-aabb2222"]),
        ("GPU-ffff", []),
    ],
)
def test_cuda_visible_devices(setting: str | None, expected: list[str]) -> None:
    assert cuda.visible_devices(TWO, setting) == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["MIG-1111"]),
        ("1", ["GPU-dddd4444"]),
        ("MIG-2222", ["MIG-2222"]),
        ("MIG-1111,MIG-2222", ["MIG-1111"]),
    ],
)
def test_at_most_one_partition_is_shown(setting: str | None, expected: list[str]) -> None:
    assert cuda.visible_devices(PARTITIONED, setting) == expected


def test_a_torch_without_cuda_is_named_as_the_reason(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    _lists(smi, "GPU 0: Tesla T4 (UUID: GPU-aaaa1111)")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert BACKEND.affinity() == 0
    assert "built without CUDA" in BACKEND.unavailable_reason()
    with pytest.raises(RuntimeError, match=r"backend='cuda' can't be used here: .*built without CUDA"):
        backends.choose("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert backends.choose("auto") is BACKEND
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert BACKEND.affinity() == 0
    assert BACKEND.unavailable_reason() == "CUDA_VISIBLE_DEVICES='' hides all 1 GPUs"


def test_cuda_used_through_torch_is_a_fork_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "has used CUDA through torch" in str(BACKEND.fork_hazard())


def test_cuda_used_by_another_library_is_seen_in_proc(tmp_path: Path) -> None:
    folder = tmp_path / "fd"
    folder.mkdir()
    (folder / "0").symlink_to("/dev/null")
    (folder / "1").symlink_to("socket:[123]")
    (folder / "2").write_text("closed meanwhile")
    assert not cuda.has_open_device(folder)
    (folder / "3").symlink_to("/dev/nvidia-uvm")
    assert cuda.has_open_device(folder)
    assert not cuda.has_open_device(tmp_path / "no-proc")
    assert not cuda.has_open_device(Path("/proc/self/fd"))


def test_a_backward_in_the_kernel_is_a_fork_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_probe, "fork_failure", lambda: "RuntimeError: Unable to handle autograd")
    assert BACKEND.fork_hazard() == (
        "backward() ran in this process, and would fail in every forked worker "
        "(RuntimeError: Unable to handle autograd)"
    )
    monkeypatch.setattr(autograd_probe, "fork_failure", lambda: None)
    assert BACKEND.fork_hazard() is None


def test_one_machines_rendezvous_stays_on_it() -> None:
    alone, several = Topology(), Topology(local_world_size=1, world_size=2, num_nodes=2)
    assert BACKEND.worker_env(alone) == {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    assert BACKEND.worker_env(several) == {}


def test_more_ranks_than_gpus_join_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist

    joined: list[str] = []
    monkeypatch.setattr(cuda.process_group, "join", lambda group, topology, timeout_s: joined.append(group))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for ranks in (2, 3):
        BACKEND.join(Topology(world_size=ranks, local_world_size=ranks), torch.device("cuda", 0))
    assert joined == ["nccl", "gloo"]


def test_ranks_get_their_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for local_rank in range(3):
        device = BACKEND.device(Topology(local_rank, local_rank, world_size=3, local_world_size=3))
        assert device == torch.device("cuda", local_rank % 2)
    assert chosen == [torch.device("cuda", index) for index in (0, 1, 0)]


def test_bf16_where_the_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert BACKEND.supports_precision("bf16") == "Tesla T4 has no bf16; use mixed_precision='fp16'"
    assert BACKEND.supports_precision("fp16") is None
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert BACKEND.supports_precision("bf16") is None


def test_nvml_is_asked_first(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(smi, "exit 1")
    closed: list[bool] = []

    class NVMLError(Exception):
        pass

    def no_partitions(handle: int) -> None:
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: closed.append(True),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda index: (b"GPU-aaaa1111", "GPU-aabb2222")[index],
        nvmlDeviceGetMigMode=no_partitions,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: object())
    assert cuda.physical_gpus() == TWO
    assert closed == [True]


def test_counting_opens_no_device(smi: Path) -> None:
    _lists(smi, LISTING)
    assert BACKEND.device_count() == 1
    opened = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if fd.isdigit() and os.path.islink(f"/proc/self/fd/{fd}")
    ]
    assert not any("nvidia" in target for target in opened)
