"""XLA devices: TPU chips, and the CPU as a stand-in for them (PJRT_DEVICE=CPU).

    kernel      torch_xla is imported, so that workers share its pages; the runtime is never initialised here, because
                the chips would then belong to the kernel until it ends
    worker      environment (topology, PJRT_DEVICE) -> malloc -> runtime -> process group -> bf16 -> first tensor
    a step      forward, backward, reduce_gradients, optimizer, step_boundary: one graph on a TPU

On a TPU, ranks exchange gradients with XLA's all-reduce. Everything else that ranks exchange (gather, broadcast,
objects, barriers) goes through host memory and gloo, so no graph is compiled for it. Gloo numbers the ranks as the
runtime does. PJRT on the CPU has no collectives across processes, so gloo exchanges the gradients there; all layers
above this file are the same in both cases.

Two modes change this scheme. With SPMD, one process drives all devices of a host, and the compiler shards batches (and,
on request, weights) across them. With ``downcast_bf16``, the device stores wider numbers as bfloat16, which replaces
autocast.

Related modules are ``xla_runtime.py`` (torch_xla), ``compile_watch.py`` (what compiles and why), ``first_use.py``
(whether a fork is possible), ``host/tpu.py`` (the machine) and ``host/memory.py``. TorchTPU, the successor of
torch_xla, has its own family: ``torch_tpu.py``.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nblaunch import env
from nblaunch.backends import first_use, process_group, xla_runtime
from nblaunch.backends.base import NO_FP8, Backend, Reporters
from nblaunch.backends.compile_watch import CompileWatch
from nblaunch.backends.cpu import usable_cores
from nblaunch.host import memory, tpu
from nblaunch.packages import is_installed
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch

# "Ran out of memory in memory space hbm. Used 17.93G of 15.48G hbm", from the compiler or the runtime.
_OUT_OF_HBM = re.compile("RESOURCE_EXHAUSTED|memory space hbm")
_THIRD_IN_BF16 = 0.333984375  # with an 8-bit significand


class XlaBackend(Backend):
    """One process per TPU chip, or several on a CPU."""

    name = "xla"
    title = "TPU"
    drives = "tpu"
    distributed_type = "XLA"
    compilers = ("openxla",)
    dist_backend = "gloo"
    is_lazy = True
    prefetches_to_device = True
    needs_static_shapes = True
    reduces_gradients_at_step = True
    transfers_in_turn = True

    def __init__(self) -> None:
        self._has_fp32_doubles = False
        self._is_bf16: bool | None = None
        self._device: torch.device | None = None
        self._seed: int | None = None
        self._watch: CompileWatch | None = None
        self._noted: set[str] = set()

    # --- launcher's half -----------------------------------------------------------------------------------------

    @property
    def device_noun(self) -> str:
        """The device of one worker: a chip or a core."""
        return "TPU chip" if xla_runtime.kind() == "TPU" else "CPU core"

    def affinity(self) -> int:
        if not is_installed("torch_xla"):
            return 0
        if xla_runtime.kind() == "TPU":
            return 20 if xla_runtime.num_chips() else 0
        if xla_runtime.kind() == "CPU":
            # Unless the environment requests the CPU stand-in, this family ranks below the CPU family.
            return 5 if first_use.wanted_xla_device() else 1
        return 0

    def unavailable_reason(self) -> str:
        if not is_installed("torch_xla"):
            return f"torch_xla is not installed; on a TPU host: {xla_runtime.INSTALL}"
        if xla_runtime.kind() == "TPU":
            return (
                "PJRT_DEVICE=TPU, but the PCI bus has no TPU chip and there is no /dev/accel*. Check that this is a "
                "TPU host and that the container has its devices, or set PJRT_DEVICE=CPU to run the same code on the "
                "CPU"
            )
        return f"PJRT_DEVICE={xla_runtime.kind()} is not supported; valid values are TPU and CPU"

    def overlooked(self) -> str | None:
        chips = xla_runtime.num_chips()
        if not chips or first_use.wanted_xla_device() not in ("", "TPU"):
            return None
        if is_installed("torch_xla") or is_installed("torch_tpu"):
            return None  # torch_tpu reports the more useful reason
        return f"this host has {chips} TPU chips, but they can't be used: {self.unavailable_reason()}"

    def device_count(self) -> int:
        return xla_runtime.num_chips() if xla_runtime.kind() == "TPU" else usable_cores()

    @property
    def is_oversubscribable(self) -> bool:
        """Whether there may be more workers than devices: only on the CPU."""
        return xla_runtime.kind() == "CPU"

    def launch_problem(self) -> str | None:
        mismatch = xla_runtime.version_mismatch()
        if mismatch is not None or xla_runtime.kind() != "TPU":
            return mismatch
        problem = xla_runtime.unknown_chips() or xla_runtime.tpu_slice().problem()
        if problem is not None:
            return problem
        return tpu.holder_problem(first_use.is_xla_initialised(), first_use.xla_first_use())

    def count_problem(self, num_processes: int) -> str | None:
        if xla_runtime.kind() != "TPU":
            return None
        count, kinds = xla_runtime.num_chips(), tpu.chips()
        if tpu.has_two_cores(kinds):
            return (
                "TPU v2 and v3 chips have two cores each, but a worker drives one core. With strategy='spmd', one "
                "process drives all cores"
            )
        if "v7x" in kinds and num_processes > 1 and not xla_runtime.tpu_slice().has_server:
            return (
                "without a metadata server, torch_xla reads only meshes of three dimensions, but the mesh of v7x "
                "chips has four. With strategy='spmd', one process drives all chips"
            )
        if tpu.can_drive(num_processes, count, "v7x" in kinds):
            return None
        if not tpu.can_drive(count, count, "v7x" in kinds):
            return (
                f"the mesh of {count} chips of this kind ({', '.join(kinds)}) is unknown, so the only valid value "
                f"is 1. With strategy='spmd', one process drives all chips"
            )
        return f"a TPU host runs one worker, or one per chip: valid values are 1 and {count}"

    def fork_hazard(self) -> str | None:
        if first_use.is_xla_initialised():  # on a TPU, launch_problem has already rejected the launch
            who = first_use.xla_first_use()
            return f"this process has initialised the XLA runtime{who}, which hangs in a forked process"
        if "torch" not in sys.modules:
            return None  # backward() can't have run
        xla_runtime.package()
        return first_use.xla_backward_hazard()

    def prepare_launcher(self) -> None:
        xla_runtime.package()

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        kind = xla_runtime.kind()
        changes = {**super().worker_env(topology), "PJRT_DEVICE": kind}
        if kind == "TPU":
            is_v7x = "v7x" in tpu.chips()
            changes |= tpu.topology_env(topology.local_rank, topology.local_world_size, is_v7x)
            changes |= xla_runtime.host_env()
        else:
            changes |= dict.fromkeys(tpu.TOPOLOGY_VARIABLES)
        return changes

    def spmd_env(self) -> dict[str, str | None] | None:
        # The worker is not limited to a share of the chips, so the image's settings for chips remain in effect, as in a
        # plain script on this host.
        image = env.snapshot()
        own_share = {"PJRT_LOCAL_PROCESS_RANK": None, "PJRT_LOCAL_PROCESS_COUNT": None}
        return {name: image.get(name) for name in tpu.TOPOLOGY_VARIABLES} | own_share

    # --- worker's half: joining ----------------------------------------------------------------------------------

    def prepare_worker(self, topology: Topology) -> None:
        memory.tune_allocator()
        if topology.world_size > 1:
            xla_runtime.reject_spawn(topology)
            if xla_runtime.kind() == "TPU":
                xla_runtime.join_at_first_use(topology)
            else:
                xla_runtime.separate_stores(topology)
            atexit.register(self._report_exchanged_copies, topology)
        folder = env.read("NBLAUNCH_XLA_CACHE") or (_default_cache() if xla_runtime.kind() == "TPU" else "")
        if folder:
            # On the CPU, executables can be written but not read back (torch_xla 2.9), so the cache is used only on
            # request.
            os.makedirs(folder, exist_ok=True)
            xla_runtime.package()
            xla_runtime.part("runtime").initialize_cache(folder)

    def _report_exchanged_copies(self, topology: Topology) -> None:
        if topology.rank == 0 and first_use.is_xla_initialised() and xla_runtime.has_exchanged_copies():
            self.reporters.note(
                "a torch.distributed collective was called with XLA tensors in a gloo group, which exchanges "
                "copies and leaves the tensors unchanged. Pass tensor.cpu(), or use nblaunch's Accelerator"
            )

    def _note_once(self, subject: str, text: str) -> None:
        if subject not in self._noted:
            self._noted.add(subject)
            self.reporters.note(text)

    def enable_spmd(self) -> None:
        xla_runtime.use_spmd()

    @property
    def num_spmd_devices(self) -> int:
        """Number of devices that this process drives as one device; 0 without SPMD."""
        return xla_runtime.num_spmd_devices()

    def device(self, topology: Topology) -> torch.device:
        if self._device is None:
            self._device = xla_runtime.package().device()
            if self._seed is not None:
                self.seed(self._seed)
        return self._device

    def join(self, topology: Topology, device: torch.device, timeout_s: float | None = None) -> None:
        import torch.distributed as dist

        if xla_runtime.kind() == "CPU" or topology.world_size == 1:
            process_group.join("gloo", topology, timeout_s)
        elif topology.master_port and not dist.is_initialized():
            # torch_xla's rendezvous names the runtime's peers (if TORCHELASTIC_RUN_ID is set) and numbers the
            # ranks by device, in the runtime's own order. Its process group, though, takes only XLA tensors and can't
            # be combined with another one (torch 2.9). Gloo takes CPU tensors, and can be combined with other groups.
            xla_runtime.part("distributed.xla_backend")
            timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", init_method="xla://", timeout=timeout)

    def set_reporters(self, reporters: Reporters) -> None:
        super().set_reporters(reporters)
        self._watch = CompileWatch(xla_runtime.counters, reporters)

    def explain_failure(self, error: BaseException) -> tuple[str, ...]:
        is_full = isinstance(error, RuntimeError) and _OUT_OF_HBM.search(str(error))
        if not is_full or xla_runtime.kind() != "TPU":
            return ()
        return (
            "The TPU chip ran out of memory (HBM); the host did not.",
            "Try a smaller batch with gradient_accumulation_steps; mixed_precision='bf16' or downcast_bf16; "
            "activation checkpointing; or FullyShardedDataParallelPlugin, which shards the model.",
        )

    # --- worker's half: precision --------------------------------------------------------------------------------

    def precision_problem(self, precision: str) -> str | None:
        if precision == "fp16":
            return (
                "fp16 is not supported: on a TPU, torch_xla's autocast supports only bf16; use "
                "mixed_precision='bf16'"
            )
        if precision == "fp8":
            return NO_FP8
        return None

    def downcast_to_bf16(self) -> None:
        self._has_fp32_doubles = True

    def switch_to_bf16(self) -> bool:
        if self._is_bf16 is None:
            variable, other = "XLA_USE_BF16", "XLA_DOWNCAST_BF16"
            types = "float and double are bfloat16"
            if self._has_fp32_doubles:
                variable, other = other, variable
                types = "float is bfloat16 and double is float32"
            # The runtime reads these variables once, when the process creates its first tensor. torch_xla 2.6
            # deprecated them without a replacement; the values computed below show whether they still work.
            env.apply({variable: "1", other: None})
            single, double = _computed_thirds()
            has_bf16_doubles = double == _THIRD_IN_BF16
            self._is_bf16 = single == _THIRD_IN_BF16 and has_bf16_doubles != self._has_fp32_doubles
            if not self._is_bf16:
                env.apply({variable: None})
            self._report_precision(self._is_bf16, types, variable)
        return self._is_bf16

    def _report_precision(self, is_bf16: bool, types: str, variable: str) -> None:
        if is_bf16:
            self.reporters.note(f"bf16: on the device, {types} ({variable})")
            self.reporters.fact("precision", f"bf16: {types}")
        else:
            self.reporters.fact("precision", "bf16: autocast")
            self.reporters.note(
                f"bf16: autocast, with weights in float32 ({variable} has no effect, either because "
                "this torch_xla ignores it, or because a tensor was already on the device)"
            )

    # --- worker's half: models and steps -------------------------------------------------------------------------

    def to_device(self, module: torch.nn.Module, device: torch.device) -> None:
        # Move inner modules first, so that at most one layer's parameters are on the host twice.
        modules = list(module.modules())
        for part in reversed(modules):
            part.to(device)
        memory.trim()

    def shard(self, tensor: torch.Tensor, dimension: int) -> None:
        xla_runtime.shard(tensor, dimension)

    def device_memory(self) -> tuple[int, int, int] | None:
        return xla_runtime.memory() if xla_runtime.kind() != "CPU" else None

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if xla_runtime.kind() == "TPU":
            self.num_own_collectives += 1
            xla_runtime.part("core.xla_model").reduce_gradients(optimizer)
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.step_boundary()  # all gradients in one graph: if read one by one, each would need its own graph
        process_group.average(parameters)

    def begin_step(self, phase: str, batch: Any) -> None:
        if self._device is not None:
            xla_runtime.cut_batch(batch, functools.partial(self._note_once, "rows"))
        if self._watch is not None:
            self._watch.begin_step(phase, batch)

    def end_step(self) -> None:
        self.step_boundary()
        if self._watch is not None:
            self._watch.end_step()

    def end_loop(self) -> None:
        self.step_boundary()
        if self._watch is not None:
            self._watch.end_loop()

    def leave_loop(self) -> None:
        if self._watch is not None:
            self._watch.leave()

    def step_boundary(self) -> None:
        if self._device is not None:
            xla_runtime.package().sync()

    def rng_state(self) -> Mapping[str, Any]:
        return {"xla": xla_runtime.part("core.xla_model").get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        xla_runtime.part("core.xla_model").set_rng_state(int(state["xla"]))

    def seed(self, seed: int) -> None:
        self._seed = seed
        if self._device is not None:  # otherwise the first use of the device seeds it
            self.set_rng_state({"xla": seed})


def _computed_thirds() -> tuple[float, float]:
    """Return 1/3 as float and as double, computed on the device: SPMD does not convert values that are only moved."""
    import torch

    sent = [torch.tensor([1 / 3], dtype=dtype).to("xla") for dtype in (torch.float32, torch.float64)]
    single, double = ((tensor * 2 / 2).cpu().item() for tensor in sent)
    return single, double


def _default_cache() -> str:
    return os.path.join(os.path.expanduser("~"), ".cache", "nblaunch", "xla")


BACKEND = XlaBackend()
