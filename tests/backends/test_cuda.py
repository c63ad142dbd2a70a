"""The CUDA backend with fake machines and recorded calls; real hardware is in tests/hardware/test_cuda.py."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nblaunch import backends, notebook_launcher
from nblaunch.backends import first_use, gpu, process_group
from nblaunch.backends.base import Reporters
from nblaunch.backends.gpu import CUDA
from nblaunch.topology import Topology
from tests.host.fake_nvml import FakeGpu, FakeNvml

NvmlMaker = Callable[..., FakeNvml]
TWO = Topology(world_size=2, local_world_size=2)


def test_a_host_without_a_gpu_is_reported(nvml: NvmlMaker) -> None:
    nvml(has_driver=False)
    assert CUDA.device_count() == 0
    assert CUDA.affinity() == 0
    assert CUDA.overlooked() is None
    assert CUDA.unavailable_reason() == "NVML, the driver's library, finds no NVIDIA GPU on this machine"


def test_uncountable_gpus_are_reported(nvml: NvmlMaker, tmp_path: Path) -> None:
    nvml(has_driver=False)
    (tmp_path / "nvidia0").touch()
    assert CUDA.affinity() == 0
    assert "Library Not Found" in str(CUDA.overlooked())
    assert CUDA.unavailable_reason() == CUDA.overlooked()


def test_a_torch_without_cuda_is_named_as_the_reason(
    nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(FakeGpu("GPU-aaaa1111"))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert CUDA.affinity() == 0
    assert "built without CUDA" in CUDA.unavailable_reason()
    assert str(CUDA.overlooked()).startswith(
        "1 GPU is here, but can't be used: the installed torch was built"
    )
    with pytest.raises(RuntimeError, match=r"backend='cuda' can't be used here: .*built without CUDA"):
        backends.choose("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert CUDA.overlooked() is None
    assert backends.choose("auto") is CUDA
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert CUDA.affinity() == 0
    assert CUDA.unavailable_reason() == "CUDA_VISIBLE_DEVICES='' hides all 1 GPUs"


def test_unpartitioned_mig_gpus_are_reported(nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(FakeGpu("GPU-aaaa1111", "NVIDIA A100", is_mig=True))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert CUDA.affinity() == 0
    assert "MIG is enabled on the GPUs" in CUDA.unavailable_reason()


def test_each_worker_sees_one_mig_instance(nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real launch, whose workers report their variables."""
    instances: list[FakeGpu | None] = [FakeGpu("MIG-1111"), FakeGpu("MIG-2222"), FakeGpu("MIG-3333")]
    nvml(FakeGpu("GPU-aaaa1111", "NVIDIA A100", instances=instances), FakeGpu("GPU-bbbb2222", "NVIDIA A100"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert CUDA.device_count() == 3
    (note,) = CUDA.launch_notes(3)
    assert "MIG instance" in note
    assert CUDA.launch_notes(1) == ()
    shown = notebook_launcher(lambda: os.environ["CUDA_VISIBLE_DEVICES"], return_all=True, dashboard="none")
    assert shown == ["MIG-1111", "MIG-2222", "MIG-3333"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-3333,MIG-1111")
    shown = notebook_launcher(lambda: os.environ["CUDA_VISIBLE_DEVICES"], return_all=True, dashboard="none")
    assert shown == ["MIG-3333", "MIG-1111"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-3333,MIG-1111"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "CUDA_VISIBLE_DEVICES" not in CUDA.worker_env(TWO)


def test_a_hazard_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "gpu_hazard", lambda runtime: "has used CUDA")
    assert CUDA.fork_hazard() == "this process has used CUDA"
    monkeypatch.setattr(first_use, "gpu_hazard", lambda runtime: None)
    assert CUDA.fork_hazard() is None


def test_libraries_that_use_gpus_can_be_imported_in_the_kernel(tmp_path: Path) -> None:
    """The test imports modules that query torch for GPUs at import, as these libraries do."""
    for name in ("bitsandbytes", "torchao"):
        (tmp_path / f"{name}.py").write_text(
            "import torch\nHAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability()\n"
        )
    program = (
        "import nblaunch, bitsandbytes, torchao; from nblaunch.backends.gpu import CUDA;"
        "hazard = CUDA.fork_hazard(); assert hazard is None, hazard"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=300, env={"PYTHONPATH": f"{tmp_path}:."}
    )


def test_a_local_rendezvous_uses_the_loopback(nvml: NvmlMaker) -> None:
    nvml()
    alone, several = Topology(), Topology(local_world_size=1, world_size=2, num_nodes=2)
    interfaces = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    assert [CUDA.worker_env(alone)[name] for name in interfaces] == ["lo", "lo"]
    assert CUDA.worker_env(several).keys().isdisjoint(interfaces)


def test_ranks_wait_until_all_have_joined(nvml: NvmlMaker) -> None:
    nvml()
    assert CUDA.worker_env(Topology())["TORCH_DIST_INIT_BARRIER"] == "1"


def test_cards_without_direct_connections_are_reported(
    nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(*(FakeGpu(f"GPU-{index}", "NVIDIA GeForce RTX 4090") for index in range(2)), driver="535.54")
    hints = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    assert CUDA.worker_env(TWO).items() >= hints.items()
    assert not CUDA.worker_env(Topology()).keys() & hints.keys()
    (note,) = CUDA.launch_notes(2)
    assert note.startswith(
        "NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 are set for the workers: with this driver"
    )
    assert "NVIDIA GeForce RTX 4090" in note
    assert CUDA.launch_notes(1) == ()
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert not CUDA.worker_env(TWO).keys() & hints.keys(), "a user's own choice holds"
    assert CUDA.launch_notes(2) == ()


def test_other_cards_are_left_alone(nvml: NvmlMaker) -> None:
    nvml(FakeGpu("GPU-0"), FakeGpu("GPU-1"))
    assert "NCCL_P2P_DISABLE" not in CUDA.worker_env(TWO)
    assert CUDA.launch_notes(2) == ()


def test_sharing_a_gpu_is_reported(nvml: NvmlMaker) -> None:
    nvml(FakeGpu("GPU-0"))
    (note,) = CUDA.launch_notes(2)
    assert note.startswith("2 workers share one GPU and communicate over gloo")


def test_more_ranks_than_gpus_join_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    monkeypatch.setattr(process_group, "join", lambda group, topology, timeout_s: joined.append(group))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for ranks in (2, 3):
        CUDA.join(Topology(world_size=ranks, local_world_size=ranks), torch.device("cuda", 0))
    assert joined == ["nccl", "gloo"]


@pytest.mark.parametrize(("is_launched", "group"), [(True, "gloo"), (False, "nccl")])
def test_single_visible_gpu_is_exclusive_unless_shared(
    monkeypatch: pytest.MonkeyPatch, is_launched: bool, group: str
) -> None:
    """``srun --gpus-per-task=1`` starts processes this way; on a small machine, two workers share its GPU."""
    joined: list[str] = []
    monkeypatch.setattr(process_group, "join", lambda group, topology, timeout_s: joined.append(group))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for name, value in CUDA.worker_env(TWO).items() if is_launched else ():
        if value is not None:
            monkeypatch.setenv(name, value)
    CUDA.join(TWO, torch.device("cuda", 0))
    assert joined == [group]


def test_ranks_get_their_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    shown = [8]  # NVML's count, until CUDA is initialised
    monkeypatch.setattr(torch.cuda, "init", lambda: shown.__setitem__(0, 2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: shown[0])
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for local_rank in range(3):
        device = CUDA.device(Topology(local_rank, local_rank, world_size=3, local_world_size=3))
        assert device == torch.device("cuda", local_rank % 2)
    assert chosen == [torch.device("cuda", index) for index in (0, 1, 0)]


def test_bf16_is_rejected_if_the_gpu_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    assert CUDA.precision_problem("bf16") == "Tesla T4 does not support bf16; use mixed_precision='fp16'"
    assert CUDA.precision_problem("fp16") is None
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert CUDA.precision_problem("bf16") is None


def test_a_backend_can_be_pickled_in_a_worker() -> None:
    """Prepared models refer to it, and functions may return them."""
    backend = gpu.CudaBackend()
    backend.set_reporters(Reporters(note=lambda text: None))
    pickle.loads(pickle.dumps(backend)).reporters.note("dropped, because this process has no launcher")


def test_emulated_bf16_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example on a T4, where torch counts bf16 as supported since 2.4."""
    notes: list[str] = []
    backend = gpu.CudaBackend()
    backend.set_reporters(Reporters(note=notes.append))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    for precision in ("fp16", "bf16", "bf16"):
        assert backend.precision_problem(precision) is None
    (note,) = notes
    assert note.startswith("Tesla T4 does not support bf16 in hardware")
    assert "mixed_precision='fp16'" in note


def test_checking_precision_creates_no_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: asked.append("bf16"))
    assert CUDA.precision_problem("bf16") is None
    assert asked == []
