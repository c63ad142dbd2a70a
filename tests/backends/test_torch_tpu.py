"""The TorchTPU backend's answers about simulated hosts, without importing torch_tpu."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from nblaunch import backends
from nblaunch.backends import first_use, torch_tpu, xla, xla_runtime
from nblaunch.backends.torch_tpu import BACKEND
from nblaunch.host import tpu
from nblaunch.launcher import plan
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from tests import fake_torch_tpu


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without chips, packages and variables."""
    for name in [name for name in os.environ if "TPU" in name or name == "PJRT_DEVICE"]:
        monkeypatch.delenv(name)
    host(monkeypatch, 0)
    install(monkeypatch)
    monkeypatch.setattr(tpu, "lock_holder", lambda: None)
    monkeypatch.setattr(tpu, "ask_metadata_server", lambda key: None)


def host(
    monkeypatch: pytest.MonkeyPatch, num_chips: int, kind: str = "v5e", passed: int | None = None
) -> None:
    through_vfio = Counter({kind: num_chips if passed is None else passed})
    monkeypatch.setattr(tpu, "chips", lambda: Counter({kind: num_chips}) if num_chips else Counter())
    monkeypatch.setattr(tpu, "vfio_chips", lambda: through_vfio)


def install(monkeypatch: pytest.MonkeyPatch, *packages: str, torch: str = "2.13.0+cpu") -> None:
    versions = {"torch": torch, "torch_tpu": "0.2.0", "torch_xla": "2.9.0"}
    needs = ["numpy>=2", "torch<=2.15.0,>=2.11.0", "torch-else>=7"]
    for module in (torch_tpu, xla):
        monkeypatch.setattr(module, "is_installed", lambda package: package in packages)
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: needs)


def whole(monkeypatch: pytest.MonkeyPatch, num_chips: int = 8, kind: str = "v5e", *further: str) -> None:
    host(monkeypatch, num_chips, kind)
    install(monkeypatch, "torch_tpu", "libtpu", *further)


def test_backend_needs_the_package_and_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BACKEND.affinity() == 0
    assert "torch_tpu is not installed; on a TPU host: pip install torch-tpu" in BACKEND.unavailable_reason()
    install(monkeypatch, "torch_tpu", "libtpu")
    assert BACKEND.affinity() == 0
    assert "the PCI bus has no TPU chip" in BACKEND.unavailable_reason()
    assert BACKEND.overlooked() is None
    install(monkeypatch, "torch_tpu")
    assert "without libtpu" in BACKEND.unavailable_reason()


@pytest.mark.parametrize(("num_chips", "kind"), [(1, "v6e"), (4, "v5p"), (8, "v5e"), (8, "v7x")])
def test_chips_and_the_package_decide(monkeypatch: pytest.MonkeyPatch, num_chips: int, kind: str) -> None:
    whole(monkeypatch, num_chips, kind)
    assert backends.choose("auto") is BACKEND
    assert BACKEND.device_count() == num_chips
    assert BACKEND.launch_problem() is None
    assert BACKEND.count_problem(num_chips) is None
    assert "torch_tpu" not in sys.modules


def test_chips_without_a_vfio_group_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    whole(monkeypatch)
    host(monkeypatch, 8, passed=0)
    assert BACKEND.affinity() == 0
    assert "this host has v5e, and VFIO passes 0 TPU chips through" in BACKEND.unavailable_reason()
    whole(monkeypatch, 4, "v2 or v3")
    assert BACKEND.affinity() == 0
    assert "supports only v4, v5p" in BACKEND.unavailable_reason()


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.10.1", False), ("2.11.0", True), ("2.13.0+cpu", True), ("2.15.0", True), ("2.16.0", False)],
)
def test_a_mismatched_torch_is_named(monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
    host(monkeypatch, 8)
    install(monkeypatch, "torch_tpu", "libtpu", torch=version)
    assert bool(BACKEND.affinity()) is fits
    if not fits:
        reason = f"torch_tpu 0.2.0 needs torch >=2.11.0 and <=2.15.0, but torch {version} is installed"
        assert reason in BACKEND.unavailable_reason()
        assert reason in (BACKEND.overlooked() or "")


def test_the_package_for_this_torch_is_preferred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole(monkeypatch, 8, "v5e", "torch_xla")
    assert backends.choose("auto") is BACKEND
    assert BACKEND.launch_notes(8) == ()
    assert plan._overlooked(BACKEND) == ()
    install(monkeypatch, "torch_tpu", "libtpu", "torch_xla", torch="2.9.0")
    monkeypatch.setattr(xla_runtime, "num_chips", lambda: 8)
    assert backends.choose("auto") is xla.BACKEND


def test_pjrt_device_cpu_selects_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    whole(monkeypatch, 8, "v5e", "torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert backends.choose("auto") is xla.BACKEND
    install(monkeypatch, "torch_tpu", "libtpu")
    assert backends.choose("auto") is BACKEND, "without torch_xla the variable is of no meaning"


def test_worker_counts_that_form_no_mesh_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    whole(monkeypatch)
    assert [count for count in range(1, 9) if BACKEND.count_problem(count) is None] == [1, 4, 8]
    assert "valid values are 1, 4, 8" in (BACKEND.count_problem(3) or "")
    whole(monkeypatch, 8, "v7x")
    assert "valid values are 2, 4, 8" in (BACKEND.count_problem(1) or "")


def test_a_host_of_a_larger_slice_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    whole(monkeypatch, 4)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b,c,d")
    assert "one of 4 hosts" in (BACKEND.launch_problem() or "")


@pytest.mark.parametrize("is_known", [True, False])
def test_chips_held_by_the_kernel_need_a_restart(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    """The runtime reports its own use; the open device file reveals another library's use."""
    whole(monkeypatch)
    if is_known:
        operations = ModuleType("_device_ops_backend")
        operations._is_initialized = lambda: True  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch_tpu._internal.device._device_ops_backend", operations)
    else:
        monkeypatch.setattr(tpu, "lock_holder", os.getpid)
    with pytest.raises(RuntimeError, match="restart the kernel"):
        plan.plan_launch(LaunchSpec(function=print))


def test_a_clean_process_is_preferred_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    whole(monkeypatch)
    made = plan.plan_launch(LaunchSpec(function=print))
    assert (made.backend, made.num_processes, made.start_method) == (BACKEND, 8, "forkserver")
    assert "for all workers" in made.reason
    assert made.fallback == "", "nothing has gone wrong that would have to be reported"
    assert plan.plan_launch(LaunchSpec(function=print, start_method="fork")).start_method == "fork"


def test_a_kernel_with_torch_tpu_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    whole(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch_tpu", ModuleType("torch_tpu"))
    made = plan.plan_launch(LaunchSpec(function=print))
    assert made.start_method == "forkserver"
    assert "torch_tpu is imported in this process" in made.fallback
    assert any("Import nblaunch before torch" in text for text in made.warnings)
    with pytest.raises(RuntimeError, match="torch_tpu is imported in this process"):
        plan.plan_launch(LaunchSpec(function=print, start_method="fork"))


def test_each_worker_gets_one_chip_and_a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    whole(monkeypatch)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    monkeypatch.setenv("TPU_PROCESS_BOUNDS", "2,4,1")
    workers = [BACKEND.worker_env(Topology(rank, rank, 0, 8, 8, master_port=77)) for rank in range(8)]
    assert [env["TPU_VISIBLE_CHIPS"] for env in workers] == list("01234567")
    assert [env["TPU_VISIBLE_DEVICES"] for env in workers] == list("01234567")
    common = workers[0]
    assert common["TORCH_TPU_TOPOLOGY"] == "2,4,1"
    addresses = [f"localhost:{port}" for port in range(8476, 8484)]
    assert common["TORCH_TPU_SLICEBUILDER_ADDRESSES"] == ",".join(addresses)
    assert common["TPU_PROCESS_BOUNDS"] is None
    assert common["TPU_ACCELERATOR_TYPE"] == "v5litepod-8"
    own = {"TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"}
    assert all(
        {name: env[name] for name in env.keys() - own} == {name: common[name] for name in common.keys() - own}
        for env in workers
    )
    assert common["TPU_SKIP_MDS_QUERY"] == "1", (
        "or libtpu asks a server that is not there for a minute and a half"
    )


@pytest.mark.parametrize("wish", [None, "1"])
def test_importing_torch_does_not_import_torch_tpu(tmp_path: Path, wish: str | None) -> None:
    """It also leaves the variable unchanged for programs that cells start."""
    program = f"""
import os, sys
import nblaunch
import torch
print("torch_tpu" in sys.modules, os.environ.get({first_use.AUTOLOAD!r}))
"""
    variables = {name: value for name, value in os.environ.items() if name != first_use.AUTOLOAD}
    variables["PYTHONPATH"] = os.pathsep.join((fake_torch_tpu.write(tmp_path), os.getcwd()))
    if wish is not None:
        variables[first_use.AUTOLOAD] = wish
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ran.stdout.split() == ["False", str(wish)]


def test_no_other_file_imports_torch_tpu() -> None:
    package = Path(torch_tpu.__file__).parents[1]
    importing = re.compile(r"^\s*(import|from) torch_tpu|import_module\(f?.torch_tpu", re.MULTILINE)
    found = [path.name for path in package.rglob("*.py") if importing.search(path.read_text())]
    assert found == ["torch_tpu.py"]


def test_fp16_is_rejected_and_names_bf16() -> None:
    assert "bf16" in (BACKEND.precision_problem("fp16") or "")
    assert BACKEND.precision_problem("bf16") is None
