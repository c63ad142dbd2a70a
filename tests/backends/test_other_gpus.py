"""Simulated GPUs of AMD, Intel and Apple: the decisions of a launch, and the workers' use of torch's modules for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nblaunch import backends, context
from nblaunch.backends import process_group
from nblaunch.backends.base import Backend
from nblaunch.errors import LaunchError
from nblaunch.launcher import plan
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.training.utilities import helpers
from tests.contracts import simulated

TWO = Topology(rank=1, local_rank=1, world_size=2, local_world_size=2)
Install = Callable[[str], simulated.FakeModule]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Simulate a kernel on a host with such GPUs that has not used them."""
    before = context.take()
    yield lambda kind: simulated.install(kind, tmp_path, monkeypatch)
    simulated.forget()
    context.install(before)


def planned(**options: object) -> plan.LaunchPlan:
    return plan.plan_launch(LaunchSpec(function=print, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "count", "start_method"),
    [("rocm", 2, "forkserver"), ("xpu", 2, "forkserver"), ("cuda", 2, "fork")],
)
def test_a_launch_takes_all_gpus(install: Install, kind: str, count: int, start_method: str) -> None:
    install(kind)
    chosen = planned()
    assert (chosen.backend.name, chosen.num_processes) == (kind, count)
    assert (chosen.start_method, chosen.fallback) == (start_method, "")


@pytest.mark.parametrize("kind", ["rocm", "xpu"])
def test_a_fork_is_rejected_once_the_gpu_is_in_use(install: Install, kind: str) -> None:
    install(kind).init()
    with pytest.raises(LaunchError, match=r"has used (ROCm|Level Zero) through torch"):
        planned(start_method="fork")


def test_amd_gpus_are_cuda_to_scripts(install: Install) -> None:
    install("rocm")
    assert backends.choose("cuda").name == "rocm"
    assert helpers.is_rocm_available() == torch.cuda.is_available()


@pytest.mark.parametrize("kind", ["rocm", "xpu"])
def test_a_rank_has_its_gpu_and_group(install: Install, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(kind)
    backend = backends.choose(kind)
    joined: list[str] = []
    monkeypatch.setattr(process_group, "join", lambda group, topology, timeout_s: joined.append(group))
    device = backend.device(TWO)
    backend.join(TWO, device)
    assert (device, fake.chosen) == (torch.device(backend.device_type, 1), 1)
    assert joined == [backend.dist_backend]
    assert backend.precision_problem("bf16") is None
    assert backend.device_memory() == (3 << 30, 3 << 30, 16 << 30)
    full = torch.OutOfMemoryError(f"{kind.upper()} out of memory. Tried to allocate 2.00 GiB.")
    assert backend.explain_failure(full)[0] == "GPU memory ran out."


def test_labels_match_accelerate(install: Install) -> None:
    labels = {kind: backends.discover()[kind].distributed_type for kind in ("cuda", "rocm", "xpu")}
    assert labels == {"cuda": "MULTI_GPU", "rocm": "MULTI_GPU", "xpu": "MULTI_XPU"}


@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu", "mps"])
def test_scaling_and_autocast_use_the_device(install: Install, kind: str) -> None:
    install(kind)
    backend: Backend = backends.choose(kind)
    assert backend.grad_scaler(enabled=False)._device == backend.device_type


def test_intel_gpus_need_xccl(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("xpu")
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    with pytest.raises(ValueError, match=r"num_processes=2: .*XCCL.*torch 2\.8"):
        planned()
    assert planned(num_processes=1).num_processes == 1
    assert not helpers.is_xccl_available()


def test_an_integrated_gpu_is_used_without_another(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("cuda")
    simulated.write_intel(tmp_path, "0000:00:02.0")
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
    assert backends.choose("xpu").affinity() > backends.choose("cpu").affinity()
    assert backends.choose("auto").name == "cuda"


# --- a Mac ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mac(install: Install, monkeypatch: pytest.MonkeyPatch) -> simulated.FakeModule:
    monkeypatch.setattr(plan, "_IS_MACOS", True)
    return install("mps")


def test_a_mac_has_one_fresh_worker(mac: simulated.FakeModule) -> None:
    chosen = planned()
    assert (chosen.backend.name, chosen.num_processes, chosen.start_method) == ("mps", 1, "spawn")
    assert chosen.fallback == ""
    assert chosen.backend.device(Topology()) == torch.device("mps")
    with pytest.raises(ValueError, match="num_processes=2, but this machine has 1 Apple GPU"):
        planned(num_processes=2)
    with pytest.raises(LaunchError, match="start_method='fork' is not possible here"):
        planned(start_method="fork")
    on_cores = planned(num_processes=2, backend="cpu")
    assert (on_cores.num_processes, on_cores.start_method) == (2, "spawn")


def test_metal_in_use_is_a_hazard(mac: simulated.FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backends.choose("mps")
    assert backend.fork_hazard() is None
    monkeypatch.setattr(mac, "current_allocated_memory", lambda: 4096)
    assert "Metal" in str(backend.fork_hazard())


def test_mps_is_available_only_if_it_is_used(mac: simulated.FakeModule) -> None:
    assert helpers.is_mps_available()
    context.take()
    context.install(context.ProcessContext(topology=Topology(), backend=backends.choose("cpu")))
    assert not helpers.is_mps_available()


@pytest.mark.parametrize(
    ("release", "rejected"), [("2.5.1", ["fp16", "bf16"]), ("2.7.0", ["fp16"]), ("2.13.0+cpu", [])]
)
def test_precisions_of_a_mac_depend_on_torch(
    mac: simulated.FakeModule, monkeypatch: pytest.MonkeyPatch, release: str, rejected: list[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    backend = backends.choose("mps")
    assert [
        name for name in ("no", "fp16", "bf16") if backend.precision_problem(name) is not None
    ] == rejected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("rocm", "/sys/class/kfd"), ("xpu", "/sys/class/drm"), ("mps", "Apple silicon")],
)
def test_a_host_without_such_gpus_gets_a_reason(kind: str, expected: str) -> None:
    with pytest.raises(RuntimeError, match=expected):
        backends.choose(kind)


@pytest.mark.parametrize(("kind", "build"), [("rocm", "ROCm"), ("xpu", "XPU")])
def test_a_torch_built_for_other_devices_is_named(
    install: Install, monkeypatch: pytest.MonkeyPatch, kind: str, build: str
) -> None:
    fake = install(kind)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(fake, "_is_compiled", lambda: False)
    with pytest.raises(RuntimeError, match=f"built without {build}"):
        backends.choose(kind)
