"""XLA devices: TPU chips, and the CPU as a stand-in for them (PJRT_DEVICE=CPU). The only file that imports torch_xla.

    kernel      torch_xla is imported, so that workers share its pages; the runtime is never initialised here, because
                the chips then belong to the kernel until it ends
    worker      environment (topology, PJRT_DEVICE) -> malloc -> runtime -> process group -> bf16 -> first tensor
    a step      forward, backward, reduce_gradients, optimizer, step_boundary: one graph on a TPU

Gradients travel by XLA's own all-reduce on a TPU. Everything else that ranks tell each other (gather, broadcast,
objects, barriers) travels through host memory by gloo, whose ranks are the runtime's: no graph is compiled for it. PJRT
on the CPU has no collectives across processes, so there gradients go by gloo too; all above this file is the same.

TorchTPU (package ``torch_tpu``, device ``tpu``) is to succeed torch_xla. It will be a second file beside this one, and
will have to say, in its own way: how chips are counted without ``import torch_tpu`` (which aborts the process where
there is no TPU); what its ``_is_in_bad_fork`` refuses, and so which ``fork_hazard`` there is; the variables that its
``set_tpu_launch_env`` sets, for ``worker_env`` (TORCH_TPU_SLICEBUILDER_ADDRESSES, TORCH_TPU_TOPOLOGY); its process
group (``tpu_dist``), for ``join``; whether it is lazy, for ``step_boundary``, ``is_lazy`` and ``places_ahead``; whether
a module keeps its parameters when it moves, for ``place``. Topology and chips (``tpu_host.py``), memory
(``host_memory.py``) and compilations (``compile_watch.py``) can serve both.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nblaunch import env
from nblaunch.backends import autograd_probe, cell_history, host_memory, process_group, tpu_host
from nblaunch.backends.base import Backend
from nblaunch.backends.batches import tensors
from nblaunch.backends.compile_watch import CompileWatch, Counters
from nblaunch.backends.cpu import LOOPBACK, usable_cores
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch

_INSTALL = 'pip install "nblaunch[tpu]"'
_THIRD = 1 / 3
_THIRD_IN_BF16 = 0.333984375  # 8 bits of significand

# What initialises the runtime in the process that calls it; found by trying each in torch_xla 2.9.
INITIALISERS = re.compile(
    r"xla_device|torch_xla\.device|device_count\(|get_xla_supported_devices|world_size\(|global_ordinal|"
    r"is_master_ordinal|process_index\(|is_bf16_supported|mark_step|torch_xla\.sync|wait_device_ops|rendezvous\(|"
    r"torch_xla\.manual_seed|metrics_report|start_server|xla://|device=.?.xla|\.to\(.?.xla|xmp\.spawn|Accelerator\("
)


class XlaBackend(Backend):
    """One process per TPU chip, or several on a CPU."""

    name = "xla"
    process_group = "gloo"
    is_lazy = True
    places_ahead = True
    needs_static_shapes = True
    reduces_gradients = True
    transfers_in_turn = True

    def __init__(self) -> None:
        self._downcasts = False
        self._is_bf16: bool | None = None
        self._device: torch.device | None = None
        self._seed: int | None = None
        self._mesh: Any = None
        self._watch: CompileWatch | None = None
        self._note: Callable[[str], None] = _nobody_listens
        self._show: Callable[[bool], None] = _nobody_listens
        self._state: Callable[[str, str], None] = _nobody_listens

    # --- launcher's half -----------------------------------------------------------------------------------------

    @property
    def device_noun(self) -> str:
        """A chip or a core."""
        return "TPU chip" if _kind() == "TPU" else "CPU core"

    def affinity(self) -> int:
        if not _is_installed("torch_xla"):
            return 0
        if _kind() == "TPU":
            return 20 if _num_chips() else 0
        if _kind() == "CPU":
            # Asked for in the environment, or usable if somebody asks for it: below the plain CPU then.
            return 5 if env.read("PJRT_DEVICE") else 1
        return 0

    def unavailable_reason(self) -> str:
        if not _is_installed("torch_xla"):
            successor = (
                " (torch_tpu is installed, which is not supported yet)" if _is_installed("torch_tpu") else ""
            )
            return f"torch_xla is not installed{successor}; on a TPU host: {_INSTALL}"
        if _kind() == "TPU":
            return (
                "PJRT_DEVICE=TPU, but there is no TPU chip on the PCI bus and no /dev/accel*; is this a TPU host, and "
                "are its devices passed into the container? PJRT_DEVICE=CPU tries the same code on the CPU"
            )
        return f"PJRT_DEVICE={_kind()} is not supported; valid are TPU and CPU"

    def overlooked(self) -> str | None:
        chips = _num_chips()
        if not chips or env.read("PJRT_DEVICE") not in (None, "TPU") or _is_installed("torch_xla"):
            return None
        return f"{chips} TPU chips are here, but can't be used: {self.unavailable_reason()}"

    def device_count(self) -> int:
        return _num_chips() if _kind() == "TPU" else usable_cores()

    @property
    def is_oversubscribable(self) -> bool:
        """On the CPU."""
        return _kind() == "CPU"

    def launch_refusal(self) -> str | None:
        mismatch = _version_mismatch()
        if mismatch is not None or _kind() != "TPU":
            return mismatch
        if tpu_host.has_two_cores(tpu_host.chips()):
            return (
                "these are TPU v2 or v3 chips, which have two cores each: one process per chip would leave half of "
                "them idle. Use torch_xla's own launcher, torch_xla.launch, which runs two threads per process"
            )
        if env.read("TPU_WORKER_HOSTNAMES") and "," in env.read("TPU_WORKER_HOSTNAMES"):
            return (
                "this machine is one of several hosts of a TPU slice (TPU_WORKER_HOSTNAMES), and launching on several "
                "machines is not available in this version"
            )
        if _is_initialised():
            return (
                f"this process has taken the TPU chips itself{_who_initialised()}, and gives them back only when it "
                "ends: restart the kernel, and use the device only inside the function that is launched"
            )
        holder = tpu_host.lock_holder()
        if holder is not None:
            return (
                f"another process uses the TPU chips: {holder} ({tpu_host.command_of(holder)}). End it, or shut its "
                f"notebook's kernel down. ({tpu_host.LOCK_FILE} goes with it; don't delete it while the process lives.)"
            )
        return None

    def count_refusal(self, num_processes: int) -> str | None:
        if _kind() != "TPU" or tpu_host.can_drive(num_processes, _num_chips()):
            return None
        return f"a TPU host runs one worker, or one per chip: valid are 1 and {_num_chips()}"

    def fork_hazard(self) -> str | None:
        if _is_initialised():  # on a TPU, launch_refusal has spoken already
            return f"this process has initialised the XLA runtime itself{_who_initialised()}, and a forked copy hangs"
        if "torch" not in sys.modules:
            return None  # nobody can have called backward()
        self.prepare_parent()
        failure = autograd_probe.fork_failure(_small_xla_backward)
        if failure is not None:
            first_line = failure.splitlines()[0]
            return (
                f"backward() ran in this process, and would fail in every forked worker ({first_line:.120})"
            )
        return None

    def prepare_parent(self) -> None:
        _import_torch_xla()
        gc.collect()  # garbage would be frozen with the heap, and shared for good

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        kind = _kind()
        changes: dict[str, str | None] = {"PJRT_DEVICE": kind}
        if kind == "TPU":
            is_v7x = "v7x" in tpu_host.chips()
            changes |= tpu_host.topology_env(topology.local_rank, topology.local_world_size, is_v7x)
            changes |= _readable_accelerator_type()
        else:
            changes |= dict.fromkeys(tpu_host.TOPOLOGY_VARIABLES)
        if topology.num_nodes == 1:
            changes["GLOO_SOCKET_IFNAME"] = LOOPBACK
        return changes

    def spanning_env(self) -> dict[str, str | None] | None:
        # Nobody has a share: what the image says of its chips holds, as in any plain script on this host.
        image = env.snapshot()
        return {name: image.get(name) for name in tpu_host.TOPOLOGY_VARIABLES} | tpu_host.NO_LOCAL_RANK

    # --- worker's half: joining ----------------------------------------------------------------------------------

    def prepare_child(self, topology: Topology) -> None:
        host_memory.tune_allocator()
        folder = env.read("NBLAUNCH_XLA_CACHE") or (_default_cache() if _kind() == "TPU" else "")
        if folder:
            # On the CPU executables can be written but not read back (torch_xla 2.9): only where asked for.
            os.makedirs(folder, exist_ok=True)
            _import_torch_xla()
            _runtime().initialize_cache(folder)

    def span_devices(self) -> None:
        runtime = _import_torch_xla().runtime
        if runtime.is_spmd():
            return
        if _is_initialised():
            raise RuntimeError(
                "strategy='spmd' must be chosen before the device is first used in the process: pass it to "
                "notebook_launcher, or build the Accelerator first"
            )
        runtime.use_spmd()

    def device(self, topology: Topology) -> torch.device:
        if self._device is None:
            self._device = _import_torch_xla().device()
            if self._seed is not None:
                self.seed(self._seed)
        return self._device

    def join(self, topology: Topology, device: torch.device, timeout_s: float | None = None) -> None:
        import torch.distributed as dist

        if _kind() == "CPU" or topology.world_size == 1:
            process_group.join("gloo", topology, timeout_s)
        elif topology.master_port and not dist.is_initialized():
            # The rendezvous of torch_xla tells the runtime of its neighbours (it does so where TORCHELASTIC_RUN_ID is
            # set) and gives ranks by devices, whose order is the runtime's own. Its process group, though, takes XLA
            # tensors only and can't be combined with another one (torch 2.9): gloo can do both, on the host.
            importlib.import_module("torch_xla.distributed.xla_backend")
            timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", init_method="xla://", timeout=timeout)

    def observe(
        self, note: Callable[[str], None], show: Callable[[bool], None], state: Callable[[str, str], None]
    ) -> None:
        self._note, self._show, self._state = note, show, state
        self._watch = CompileWatch(_read_counters, note, show, state)

    # --- worker's half: precision --------------------------------------------------------------------------------

    def supports_precision(self, precision: str) -> str | None:
        if precision == "fp16":
            return "XLA devices have no fp16 gradient scaling; use mixed_precision='bf16'"
        return None

    def downcast_to_bf16(self) -> None:
        self._downcasts = True

    def represents_in_bf16(self) -> bool:
        if self._is_bf16 is None:
            self._is_bf16 = self._try_bf16()
        return self._is_bf16

    def _try_bf16(self) -> bool:
        variable, other = ("XLA_DOWNCAST_BF16", "XLA_USE_BF16")[:: 1 if self._downcasts else -1]
        # Read once by the runtime, at the first tensor of the process. Deprecated since torch_xla 2.6, and without a
        # successor of the same meaning; the test below tells when they are gone.
        env.apply({variable: "1", other: None})
        single, double = _round_trip()
        is_active = single == _THIRD_IN_BF16 and (double != _THIRD_IN_BF16) == self._downcasts
        if is_active:
            doubles = (
                "float is bfloat16, double is float32" if self._downcasts else "float and double are bfloat16"
            )
            self._note(f"bf16: on the device {doubles} ({variable})")
            self._state("precision", f"bf16: {doubles}")
        else:
            env.apply({variable: None})
            self._state("precision", "bf16: autocast")
            self._note(
                f"bf16: autocast, with weights in float32 (this torch_xla, or a tensor that was on the device before, "
                f"leaves {variable} without effect)"
            )
        return is_active

    # --- worker's half: models and steps -------------------------------------------------------------------------

    def place(self, module: torch.nn.Module, device: torch.device) -> None:
        # Inner modules first, so that never more than one layer's parameters lie on the host twice.
        modules = list(module.modules())
        for part in reversed(modules):
            part.to(device)
        host_memory.trim()

    def host_bytes_of_device(self, num_bytes: int) -> int:
        return num_bytes if _kind() == "CPU" else 0

    def own_memory(self) -> tuple[int, int, int] | None:
        return _read_memory() if _kind() != "CPU" else None

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if _kind() == "TPU":
            importlib.import_module("torch_xla.core.xla_model").reduce_gradients(optimizer)
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.step_boundary()  # all gradients in one graph: reading them one by one would compile one for each
        _average_on_host(parameters)

    def begin_step(self, phase: str, batch: Any) -> None:
        self.step_boundary()
        if self._device is not None and _runtime().is_spmd():
            self._cut(batch)
        if self._watch is not None:
            self._watch.begin_step(phase, batch)

    def _cut(self, batch: Any) -> None:
        """Have every device hold its part of the batch's rows; what they don't divide is held by all of them."""
        spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
        count = _runtime().global_runtime_device_count()
        if self._mesh is None:
            self._mesh = spmd.Mesh(list(range(count)), (count,), ("data",))
        for tensor in tensors(batch):
            if tensor.device.type == "xla" and tensor.ndim and tensor.shape[0] % count == 0:
                spmd.mark_sharding(tensor, self._mesh, ("data", *[None] * (tensor.ndim - 1)))

    def end_pass(self) -> None:
        self.step_boundary()
        if self._watch is not None:
            self._watch.end_pass()

    def step_boundary(self) -> None:
        if self._device is not None:
            _import_torch_xla().sync()

    def rng_state(self) -> Mapping[str, Any]:
        return {"xla": importlib.import_module("torch_xla.core.xla_model").get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        importlib.import_module("torch_xla.core.xla_model").set_rng_state(int(state["xla"]))

    def seed(self, seed: int) -> None:
        self._seed = seed
        if self._device is not None:  # or it is done when the device is first used
            self.set_rng_state({"xla": seed})


# --- torch_xla, imported when it is needed ---------------------------------------------------------------------------


def _kind() -> str:
    """What the runtime will compute on: the value of PJRT_DEVICE, or what torch_xla would choose."""
    asked = env.read("PJRT_DEVICE")
    return asked.upper() if asked else "TPU" if _num_chips() else "CPU"


def _num_chips() -> int:
    if "torch_xla._internal.tpu" in sys.modules:
        found = int(sys.modules["torch_xla._internal.tpu"].num_available_chips())
    else:
        found = sum(tpu_host.chips().values())
    return found or tpu_host.device_files(
        env.read("PJRT_DEVICE") == "TPU" or bool(env.read("TPU_ACCELERATOR_TYPE"))
    )


def _is_installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _version_mismatch() -> str | None:
    """What to do where torch and torch_xla are not of one release: the import would fail with a symbol's name."""
    try:
        torch, xla = (importlib.metadata.version(name) for name in ("torch", "torch_xla"))
    except importlib.metadata.PackageNotFoundError:
        return None  # not installed by pip: nothing is known
    release = ".".join(xla.split(".")[:2])
    if torch.split("+")[0].split(".")[:2] == release.split("."):
        return None
    return (
        f"torch {torch} and torch_xla {xla} do not fit each other: they must be of one release. "
        f"Install torch=={release}.*, or another torch_xla: {_INSTALL}"
    )


def _import_torch_xla() -> Any:
    """The package. Importing it does not initialise the runtime.

    Raises:
        RuntimeError: it can't be imported; says why.
    """
    if "torch_xla" in sys.modules:
        return sys.modules["torch_xla"]
    try:
        # Left alone, the import would settle PJRT_DEVICE for the whole process.
        with env.patched({"PJRT_DEVICE": _kind(), **_readable_accelerator_type()}):
            for name in ("core.xla_model", "runtime", "debug.metrics", "distributed.xla_backend"):
                importlib.import_module(f"torch_xla.{name}")
    except (ImportError, OSError) as error:
        raise RuntimeError(_version_mismatch() or f"torch_xla can't be imported: {error}") from error
    return sys.modules["torch_xla"]


def _readable_accelerator_type() -> dict[str, str]:
    """TPU_ACCELERATOR_TYPE with its number of chips, without which torch_xla can't parse it; nothing where it has."""
    kind = env.read("TPU_ACCELERATOR_TYPE")
    return {"TPU_ACCELERATOR_TYPE": f"{kind}-{_num_chips()}"} if kind and "-" not in kind else {}


def _runtime() -> Any:
    return importlib.import_module("torch_xla.runtime")


def _is_initialised() -> bool:
    """Whether the runtime is up in this process. The question itself leaves it as it is."""
    torch_xla: Any = sys.modules.get("torch_xla")
    # A private name, and the one that torch_xla's own launcher asks.
    ask = getattr(getattr(torch_xla, "_XLAC", None), "_xla_runtime_is_initialized", None)
    return bool(ask()) if ask is not None else False


def _who_initialised() -> str:
    """The cell and line that most likely did it; empty where there is none."""
    return cell_history.guess(INITIALISERS)


def _default_cache() -> str:
    return os.path.join(os.path.expanduser("~"), ".cache", "nblaunch", "xla")


def _small_xla_backward() -> None:
    """In a probing child: the first backward on an XLA device, which is the CPU whatever this host has."""
    env.apply({"PJRT_DEVICE": "CPU"})
    import torch

    leaf = torch.ones(2, device="xla", requires_grad=True)
    leaf.sum().backward()


def _read_counters() -> Counters:
    metrics: Any = importlib.import_module("torch_xla.debug.metrics")
    # Not metrics_report(): it takes a hundred times longer and initialises the runtime.
    compiled = metrics.metric_data("CompileTime")
    fallbacks = {
        name: metrics.counter_value(name) or 0
        for name in metrics.counter_names()
        if name.startswith("aten::")
    }
    return Counters(
        metrics.counter_value("UncachedCompile") or 0, compiled[1] / 1e9 if compiled else 0.0, fallbacks
    )


def _read_memory() -> tuple[int, int, int] | None:
    """Bytes of the default device: taken, at most so far, all there are. None where the runtime does not tell.

    Source: ``torch_xla.core.xla_model.get_memory_info``; the peak is missing from older runtimes' answer.
    """
    model: Any = importlib.import_module("torch_xla.core.xla_model")
    try:
        told = model.get_memory_info()
    except RuntimeError:
        return None
    taken = int(told["bytes_used"])
    return taken, int(told.get("peak_bytes_used", taken)), int(told["bytes_limit"])


def _round_trip() -> tuple[float, float]:
    """1/3 as float and as double, to the device and back."""
    import torch

    single, double = (
        torch.tensor([_THIRD], dtype=dtype).to("xla").cpu().item() for dtype in (torch.float32, torch.float64)
    )
    return single, double


def _average_on_host(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Average gradients over ranks by gloo. Those that only some ranks have count as zero on the others."""
    import torch
    import torch.distributed as dist

    if not parameters:
        return
    present = torch.tensor([float(p.grad is not None) for p in parameters])
    flat = torch.cat(
        [
            torch.zeros(p.numel()) if p.grad is None else p.grad.detach().cpu().reshape(-1).float()
            for p in parameters
        ]
        + [present]
    )
    dist.all_reduce(flat)
    *values, counts = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, value, count in zip(parameters, values, counts.tolist(), strict=True):
        if count:
            average = (value / dist.get_world_size()).to(parameter.dtype).reshape(parameter.shape)
            parameter.grad = average.to(parameter.device)


def _nobody_listens(*said: object) -> None:
    """Where nobody observes."""


BACKEND = XlaBackend()
