"""TPU chips through TorchTPU, the successor of torch_xla: package ``torch_tpu``, device ``tpu``.

    kernel        torch_tpu is not imported: otherwise torch.manual_seed or backward() on the CPU would take the chips
    forkserver    a clean process loads the call, imports torch_tpu once and forks the workers, which share both
    worker        one chip, which is ``tpu:0`` in each; process group ``cpu:gloo,tpu:tpu_dist``

Operations run when they are called (there is no ``mark_step``), DDP averages gradients on the chips, and
``torch.autocast`` supports bf16. All other exchanges between ranks go through host memory and gloo, so nothing is
compiled for them. nblaunch uses torch's device-independent functions, because nearly every function of ``torch.tpu``
rejects callers outside torch.

With torch_tpu 0.2.0 and libtpu 0.0.52, eight workers on a machine without chips completed every step up to libtpu's
search for its chip. The steps after that have not run yet.

Sources for the variables and meshes: ``torch_tpu/_internal/distributed/distributed.py`` (``set_tpu_launch_env``, which
never replaces a variable) and ``torch_tpu/_internal/utils/hardware.py``; ``tests/torch_tpu`` compares the meshes with
torch_tpu's own.
"""

from __future__ import annotations

import atexit
import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nblaunch import env, formatting
from nblaunch.backends import first_use
from nblaunch.backends.base import NO_FP8, Backend
from nblaunch.host import tpu
from nblaunch.packages import is_installed, torch_mismatch
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch

INSTALL = "pip install torch-tpu"
_FLAT = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
_CUBE = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}
MESHES: Mapping[str, Mapping[int, str]] = {
    "v4": _CUBE,
    "v5p": _CUBE,
    "v5e": _FLAT,
    "v6e": _FLAT,
    "v7x": {2: "1,1,1,2", 4: "1,2,1,2", 8: "2,2,1,2"},
}
"""Kind of chip -> number of workers -> the mesh of their chips."""

_BASE_PORT = 8476
# Workers must not inherit these: the first would override the worker's own chip, and with the second, local ranks would
# be rejected.
_LEFT_BEHIND = ("TORCH_TPU_BASE_PORT", "TORCH_TPU_DEVICES_PER_HOST", "NNODES")


class TorchTpuBackend(Backend):
    """One process per TPU chip."""

    name = "torch_tpu"
    title = "TorchTPU"
    device_noun = "TPU chip"
    device_type = "tpu"
    drives = "tpu"
    dist_backend = "cpu:gloo,tpu:tpu_dist"
    distributed_type = "XLA"
    compilers = ("tpu",)
    is_oversubscribable = False
    needs_static_shapes = True
    exchanges_on_host = True

    def __init__(self) -> None:
        self._is_preloaded = False

    # --- launcher's half -----------------------------------------------------------------------------------------

    def affinity(self) -> int:
        if not self.device_count() or self._missing() is not None:
            return 0
        if is_installed("torch_xla") and first_use.wanted_xla_device() == "CPU":
            return 1  # PJRT_DEVICE=CPU asks for torch_xla's stand-in
        return 30

    def unavailable_reason(self) -> str:
        missing = self._missing()
        if missing is not None:
            return missing
        kinds = tpu.chips()
        if kinds:
            return (
                f"torch_tpu supports only {', '.join(MESHES)} chips that are passed through by VFIO (/dev/vfio); "
                f"this host has {', '.join(kinds)}, and VFIO passes {_counted(sum(tpu.vfio_chips().values()))} through"
            )
        return "the PCI bus has no TPU chip; check that this is a TPU host, and that the container can see /sys/bus/pci"

    def _missing(self) -> str | None:
        """Return which package is missing or has an unsuitable version; None if there is none."""
        if not is_installed("torch_tpu"):
            return f"torch_tpu is not installed; on a TPU host: {INSTALL}"
        if not is_installed("libtpu"):
            return f"torch_tpu is installed without libtpu, its driver: {INSTALL}"
        return _mismatch()

    def overlooked(self) -> str | None:
        if not self.device_count() or self._missing() is None or not is_installed("torch_tpu"):
            return None
        return f"{_counted(self.device_count())} exist, but can't be used: {self._missing()}"

    def device_count(self) -> int:
        return sum(count for kind, count in tpu.vfio_chips().items() if kind in MESHES)

    def launch_problem(self) -> str | None:
        problem = tpu.slice_of_host(self.device_count()).problem()
        return problem if problem is not None else tpu.holder_problem(is_ours=is_initialised())

    def count_problem(self, num_processes: int) -> str | None:
        meshes = self._meshes()
        if num_processes in meshes:
            return None
        valid = ", ".join(str(count) for count in meshes if count <= self.device_count())
        return f"no mesh of {', '.join(tpu.vfio_chips())} chips has this size: valid values are {valid or 'none'}"

    def _meshes(self) -> Mapping[int, str]:
        kinds = [kind for kind in tpu.vfio_chips() if kind in MESHES]
        return MESHES[kinds[0]] if len(kinds) == 1 else {}

    def fork_hazard(self) -> str | None:
        if "torch_tpu" in sys.modules and not self._is_preloaded:
            return (
                "torch_tpu is imported in this process, so torch.manual_seed or backward() may have started the TPU "
                "runtime, which does not work in a forked process"
            )
        return None

    def clean_start_reason(self) -> str | None:
        return (
            "a clean process imports torch_tpu for all workers: if the kernel imported it, "
            "torch.manual_seed or backward() would take the TPU chips"
        )

    def launch_notes(self, num_processes: int) -> tuple[str, ...]:
        if "torch_tpu" not in sys.modules or self._is_preloaded:
            return ()
        return (
            "torch_tpu is imported in this kernel, because torch was imported before nblaunch, or because a cell "
            "imported it. The next torch.manual_seed or backward() here will take the TPU chips until the kernel is "
            "restarted. Import nblaunch before torch, and do not import torch_tpu in a cell",
        )

    def preload(self) -> None:
        self._is_preloaded = "torch_tpu" not in sys.modules
        package()
        if is_initialised():
            raise RuntimeError(
                "the process that starts the workers took the TPU chips while it loaded the function, because a "
                "module uses the device when it is imported. Use the device only inside the function"
            )

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        changes = super().worker_env(topology) | dict.fromkeys((*tpu.TOPOLOGY_VARIABLES, *_LEFT_BEHIND))
        count, local_rank = topology.local_world_size, str(topology.local_rank)
        ports = range(_BASE_PORT, _BASE_PORT + count)
        changes |= {
            "TPU_VISIBLE_CHIPS": local_rank,
            "TPU_VISIBLE_DEVICES": local_rank,
            "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(f"localhost:{port}" for port in ports),
            "TORCH_TPU_TOPOLOGY": self._meshes().get(count),
            "TORCH_TPU_XPROF_SESSION_ID": str(topology.master_port),  # the same in all workers
        }
        num_chips = self.device_count()
        if num_chips:
            changes |= tpu.slice_of_host(num_chips).completed()
        return changes

    # --- worker's half -------------------------------------------------------------------------------------------

    def prepare_worker(self, topology: Topology) -> None:
        package()
        # The import registers this exit handler, which runs a barrier and would wait forever for a rank that has died.
        # The chip is released anyway when the process ends.
        module = importlib.import_module("torch_tpu._internal.device._device_module")
        atexit.unregister(module.TpuDeviceModule._shutdown_runtime)

    def device(self, topology: Topology) -> torch.device:
        package()
        import torch

        return torch.device("tpu", 0)  # the worker's only chip

    def precision_problem(self, precision: str) -> str | None:
        if precision == "fp16":
            return "gradient scaling for fp16 has not been tested with torch_tpu; use mixed_precision='bf16'"
        if precision == "fp8":
            return NO_FP8
        return None

    def rng_state(self) -> Mapping[str, Any]:
        import torch
        from torch.utils.checkpoint import get_device_states

        # Use torch's generic interface, because torch.tpu.get_rng_state rejects callers outside torch.
        _, states = get_device_states(torch.empty(0, device="tpu"))
        return {"tpu": states[0]}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        from torch.utils.checkpoint import set_device_states

        set_device_states([0], [state["tpu"]], device_type="tpu")


def package() -> Any:
    """Import torch_tpu, which adds the device ``tpu`` to torch, and return the package.

    Raises:
        RuntimeError: it can't be imported or has found no chip; the message gives the reason.
    """
    import torch

    if hasattr(torch, "tpu") and "torch_tpu" in sys.modules:
        return sys.modules["torch_tpu"]
    try:
        # torch_tpu registers the device only if autoload is on, and nblaunch may have switched autoload off for torch.
        with env.patched({first_use.AUTOLOAD: "1"}):
            module = importlib.import_module("torch_tpu")
            importlib.import_module("torch_tpu._loader").load()
    except (ImportError, OSError) as error:
        raise RuntimeError(_mismatch() or f"torch_tpu can't be imported: {error}") from error
    if not hasattr(torch, "tpu"):
        raise RuntimeError(
            "torch_tpu found no TPU chip: it looks for them on the PCI bus (/sys/bus/pci/devices) and in /dev/vfio"
        )
    return module


def _mismatch() -> str | None:
    mismatch = torch_mismatch("torch_tpu")
    return f"{mismatch}: {INSTALL} gets one" if mismatch is not None else None


def is_initialised() -> bool:
    """Return whether the TPU runtime is running in this process, without starting it."""
    # This name is private, but torch.tpu.is_initialized() also reads it.
    operations = sys.modules.get("torch_tpu._internal.device._device_ops_backend")
    ask = getattr(operations, "_is_initialized", None)
    return bool(ask()) if ask is not None else False


def _counted(num_chips: int) -> str:
    return formatting.count(num_chips, "TPU chip")


BACKEND = TorchTpuBackend()
