"""GPUs that torch drives through similar modules: ``torch.cuda`` for NVIDIA and AMD, ``torch.xpu`` for Intel.

    kernel      counts GPUs without the driver's runtime; never creates a context
    worker      device by local rank -> context -> process group (gloo if ranks share a GPU)

Each family has its own way of counting a host's GPUs (``host/gpus.py``), and its own variables to select them.
``first_use.py`` decides whether a fork is possible. Errors, mainly of CUDA and NCCL, are explained for all families.

The code for AMD and Intel has not run on a GPU yet. Their workers start from a clean process, because a fork of a
kernel with ROCm's or SYCL's libraries has not been tested.
"""

from __future__ import annotations

import re
import sys
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from nblaunch import env, formatting
from nblaunch.backends import first_use, process_group
from nblaunch.backends.base import LOOPBACK, NO_FP8, Backend, Reporters
from nblaunch.errors import chain_of
from nblaunch.host import gpus
from nblaunch.host.gpus import DeviceMeter
from nblaunch.packages import is_installed
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch

_ADVICE_ON_DEVICE = (
    r"barrier\(\): using the device under current context|No device id is provided via `init_process"
)
"""The warning that torch's ``barrier()`` emits, as worded in torch 2.11 and newer, and in earlier releases."""
_CHOSEN_BY_LOCAL_RANK = "NBLAUNCH_GPUS_BY_LOCAL_RANK"


class GpuBackend(Backend):
    """One process per GPU."""

    device_noun = "GPU"
    is_oversubscribable = False
    runtime: first_use.GpuRuntime
    """The traces that such a GPU leaves in a process that uses it."""

    # --- launcher's half -----------------------------------------------------------------------------------------

    @abstractmethod
    def build_problem(self) -> str | None:
        """Return why the installed torch can't compute on such GPUs, and what to install; None if it can."""

    def affinity(self) -> int:
        return 10 if self.device_count() > 0 and self.build_problem() is None else 0

    def overlooked(self) -> str | None:
        count = self.device_count()
        problem = self.build_problem() if count else None
        if problem is None:
            return None
        verb = "are" if count > 1 else "is"
        return f"{formatting.count(count, self.device_noun)} {verb} here, but can't be used: {problem}"

    def fork_hazard(self) -> str | None:
        hazard = first_use.gpu_hazard(self.runtime)
        return f"this process {hazard}" if hazard is not None else None

    def first_use(self) -> tuple[tuple[str, int, str], ...]:
        return first_use.gpu_first_use()

    def launch_notes(self, num_processes: int) -> tuple[str, ...]:
        count = self.device_count()
        if not num_processes > count > 0:
            return ()
        shared = "one GPU" if count == 1 else f"{count} GPUs"
        return (
            f"{num_processes} workers share {shared} and communicate over gloo through host memory: good for "
            "experiments, but slower than one worker per GPU",
        )

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        changes = {**super().worker_env(topology), _CHOSEN_BY_LOCAL_RANK: "1"}
        if self.dist_backend == "nccl" and topology.num_nodes == 1:
            # On one machine, only NCCL's rendezvous uses the interface: data goes through GPU links or shared memory.
            changes["NCCL_SOCKET_IFNAME"] = LOOPBACK
        return changes

    # --- worker's half -------------------------------------------------------------------------------------------

    def device(self, topology: Topology) -> torch.device:
        import torch

        gpu = self._torch_module()
        # Without this call, torch would ask the driver's library for the number of GPUs, which is slow to start and
        # counts whole GPUs if CUDA shows one MIG instance.
        gpu.init()
        # If there are more workers than GPUs, the workers are assigned round-robin, for tests on small machines.
        device = torch.device(self.device_type, topology.local_rank % max(1, gpu.device_count()))
        gpu.set_device(device)
        return device

    def join(self, topology: Topology, device: torch.device, timeout_s: float | None = None) -> None:
        import torch.distributed as dist

        # torch advises init_process_group(device_id=...), which users can't call here; the device is already set.
        warnings.filterwarnings("ignore", _ADVICE_ON_DEVICE, UserWarning)
        # NCCL rejects two ranks on one GPU, or on instances of one GPU; gloo accepts them.
        count = self._torch_module().device_count()
        # SLURM gives each process its own GPU.
        has_own = count == 1 and not env.read(_CHOSEN_BY_LOCAL_RANK)
        fits = has_own or topology.local_world_size <= count
        dist_backend = self.dist_backend if fits and dist.is_backend_available(self.dist_backend) else "gloo"
        process_group.join(dist_backend, topology, timeout_s)

    def precision_problem(self, precision: str) -> str | None:
        if precision == "fp8":
            return NO_FP8
        # The launcher calls this before it forks, and torch would create a context to answer. Workers check the
        # precision themselves.
        gpu = self._torch_module() if "torch" in sys.modules else None
        if precision != "bf16" or gpu is None or not gpu.is_initialized():
            return None
        if not gpu.is_bf16_supported():
            return f"{gpu.get_device_name()} does not support bf16; use mixed_precision='fp16'"
        if not gpu.is_bf16_supported(including_emulation=False):
            self.reporters.note(
                f"{gpu.get_device_name()} does not support bf16 in hardware, and torch's emulation is several "
                "times slower: use mixed_precision='fp16'"
            )
            self.reporters = Reporters()  # the note is sent once per process
        return None

    def rng_state(self) -> Mapping[str, Any]:
        return {self.device_type: self._torch_module().get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        self._torch_module().set_rng_state(state[self.device_type])

    def empty_cache(self) -> None:
        if "torch" in sys.modules:  # without torch, no GPU can have been used through it
            self._torch_module().empty_cache()

    def device_memory(self) -> tuple[int, int, int] | None:
        gpu = self._torch_module()
        if not gpu.is_initialized():
            return None
        total = gpu.get_device_properties(gpu.current_device()).total_memory
        return gpu.memory_reserved(), gpu.max_memory_reserved(), total

    def explain_failure(self, error: BaseException) -> tuple[str, ...]:
        return explain(error)

    def _torch_module(self) -> Any:
        import torch

        return getattr(torch, self.device_type)


# --- errors ----------------------------------------------------------------------------------------------------------

_FULL = re.compile(r"(cuda|hip|xpu)\b.*out of memory|out of memory.*(cuda|hip|xpu)\b", re.DOTALL)
_REJECTIONS = ("cublas_status_alloc_failed", "cudnn_status_alloc_failed")
_OUT_OF_MEMORY = (
    "GPU memory ran out.",  # the message has the numbers
    "Try a smaller batch with gradient_accumulation_steps (find_executable_batch_size); mixed_precision='bf16' or "
    "'fp16', if it is not used yet; torch.no_grad() around evaluations; activation checkpointing; or end other "
    "processes on this GPU (see nvidia-smi or rocm-smi).",
)
_LATER = (
    "GPUs report errors late, so the line above may not be the cause. Set os.environ['CUDA_LAUNCH_BLOCKING'] = '1' "
    "in a cell before the launch to find the cause"
)


def explain(error: BaseException) -> tuple[str, ...]:
    """Explain a GPU or NCCL error and suggest what to try, in one line each; return nothing for any other error.

    Only the message is examined, because after most of these errors, CUDA answers every call with the same error.
    Errors that only report the loss of another rank are not explained here; that rank's own error explains them.

    Args:
        error: the exception, with its causes.
    """
    if _is_out_of_memory(error):
        return _OUT_OF_MEMORY
    for cause in chain_of(error):
        for fault in FAULTS:
            if isinstance(cause, RuntimeError) and re.search(fault.pattern, str(cause)):
                return fault.meaning, f"Try: {fault.advice}."
    return ()


class Fault(NamedTuple):
    """A kind of error: a pattern for its message (a regular expression), its meaning, and what to try."""

    pattern: str
    meaning: str
    advice: str


FAULTS = (
    Fault(
        r"device-side assert triggered",
        "An operation on the GPU got an index that is out of range: usually a class label that is too large for the "
        "model's number of outputs, or a token that has no row in the embedding. This rank's log shows the failed "
        "check as `Assertion ... failed`.",
        "the same function on the CPU, notebook_launcher(..., backend='cpu'), which raises the error at the failing "
        f"line. {_LATER}",
    ),
    Fault(
        r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction was encountered",
        "An operation on the GPU accessed memory outside its tensors. The bug is in the operation itself, which is "
        "usually compiled or hand-written.",
        "a run without torch.compile and without libraries that bring their own operations, for example for attention "
        f"or quantisation. {_LATER}",
    ),
    Fault(
        r"no kernel image is available",
        "The installed torch has no code for this GPU: the GPU is older or newer than the GPUs that torch was "
        "built for.",
        "another build of torch: https://pytorch.org/get-started lists them by CUDA version, and the oldest GPUs need "
        "an older torch",
    ),
    Fault(
        r"Cannot re-initialize CUDA in forked subprocess|CUDA error: initialization error",
        "CUDA can't be used in a fork of a process that has used CUDA, and this process is such a fork. nblaunch "
        "avoids such forks for its workers; here, a data loader or multiprocessing forked inside the function.",
        "datasets and collate functions that stay on the CPU (prepared loaders bring batches to the GPU), or "
        "DataLoader(..., multiprocessing_context='forkserver'); for the workers, start_method='forkserver'",
    ),
    Fault(
        r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_INITIALIZED",
        "A CUDA library could not be started, usually because the GPU's memory is full, or because an index out of "
        "range has just stopped the GPU.",
        f"a smaller batch; the same function with backend='cpu'. {_LATER}",
    ),
    Fault(
        r"Duplicate GPU detected",
        "Two ranks are using the same GPU, which NCCL rejects.",
        "accelerator.device, or torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before CUDA is used, instead of "
        "'cuda' or 'cuda:0'; at most one rank per GPU, or init_process_group('gloo')",
    ),
    Fault(
        r"shared memory segment|/dev/shm/nccl",
        "NCCL found no space in /dev/shm, which GPUs without direct links communicate through; containers have 64 MB "
        "by default.",
        "a container with --shm-size=8g, or --ipc=host; or, more slowly, os.environ['NCCL_SHM_DISABLE'] = '1' before "
        "the launch",
    ),
)  # fmt: skip


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error``, which torch or a library has raised, reports that GPU memory ran out."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    text = str(error).lower()
    is_named = _FULL.search(text) is not None or any(words in text for words in _REJECTIONS)
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and is_named)


# --- NVIDIA -----------------------------------------------------------------------------------------------------------

_FP8_CAPABILITY = (8, 9)
"""Lowest compute capability of GPUs that multiply matrices of 8-bit floating-point numbers (Ada Lovelace)."""


class CudaBackend(GpuBackend):
    """One process per NVIDIA GPU, or per MIG instance, connected by NCCL."""

    name = "cuda"
    dist_backend = "nccl"
    distributed_type = "MULTI_GPU"
    compilers = ("inductor", "cudagraphs")
    shares_devices = True
    runtime = first_use.CUDA

    def build_problem(self) -> str | None:
        import torch

        if torch.version.cuda is not None:
            return None
        return "the installed torch was built without CUDA; install a CUDA build from https://pytorch.org"

    def unavailable_reason(self) -> str:
        physical = gpus.physical_gpus()
        if not physical:
            return gpus.uncounted() or "NVML, the driver's library, finds no NVIDIA GPU on this machine"
        if self.device_count() == 0:
            value = env.read("CUDA_VISIBLE_DEVICES")
            if value is None:
                return (
                    "MIG is enabled on the GPUs, but there are no instances: `nvidia-smi mig -lgip` lists the "
                    "profiles, and `nvidia-smi mig -cgi PROFILE -C` creates an instance"
                )
            return f"CUDA_VISIBLE_DEVICES={value!r} hides all {len(physical)} GPUs"
        return self.build_problem() or ""

    def overlooked(self) -> str | None:
        return super().overlooked() if self.device_count() else gpus.uncounted()

    def device_count(self) -> int:
        return len(gpus.visible())

    def is_present(self) -> bool:
        return bool(gpus.physical_gpus() or gpus.uncounted())

    def launch_notes(self, num_processes: int) -> tuple[str, ...]:
        notes = list(super().launch_notes(num_processes))
        if not notes and num_processes > 1 and self._instances():
            notes.append(
                "each worker has its own MIG instance; the workers communicate over gloo through host memory, "
                "because NCCL does not connect instances"
            )
        model = gpus.lacks_p2p()
        if model is not None and num_processes > 1 and env.read("NCCL_P2P_DISABLE") is None:
            notes.append(
                "NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 are set for the workers: with this driver, direct "
                f"connections between {model} cards hang. Drivers 550.40.07 and later need neither variable"
            )
        return tuple(notes)

    def open_meter(self) -> DeviceMeter:
        return gpus.open_meter()

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        changes = super().worker_env(topology)
        is_set = env.read("NCCL_P2P_DISABLE") is not None
        if topology.local_world_size > 1 and not is_set and gpus.lacks_p2p() is not None:
            changes |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
        instances = self._instances()
        if instances:
            changes["CUDA_VISIBLE_DEVICES"] = instances[topology.local_rank % len(instances)]
        return changes

    def precision_problem(self, precision: str) -> str | None:
        if precision != "fp8":
            return super().precision_problem(precision)
        if not is_installed("torchao"):
            return "fp8 needs torchao, which is not installed: pip install torchao"
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None  # only a worker may ask the GPU
        has_fp8 = torch.cuda.get_device_capability() >= _FP8_CAPABILITY
        return None if has_fp8 else f"{torch.cuda.get_device_name()} does not support fp8; {NO_FP8}"

    def _instances(self) -> list[str]:
        """Return the MIG instances that workers compute on; CUDA shows each process only one of them."""
        return [uuid for uuid in gpus.visible() if uuid.startswith(gpus.INSTANCE)]


CUDA = CudaBackend()


# --- AMD --------------------------------------------------------------------------------------------------------------


class RocmBackend(GpuBackend):
    """One process per AMD GPU, which is torch's device ``cuda``, connected by RCCL, which torch calls ``nccl``."""

    name = "rocm"
    title = "AMD GPUs"
    device_noun = "AMD GPU"
    device_type = "cuda"
    dist_backend = "nccl"
    distributed_type = "MULTI_GPU"
    shares_devices = True
    runtime = first_use.ROCM

    def build_problem(self) -> str | None:
        import torch

        if torch.version.hip is not None:
            return None
        return "the installed torch was built without ROCm; install a ROCm build from https://pytorch.org"

    def unavailable_reason(self) -> str:
        num_physical = len(gpus.amd_gpus())
        if not num_physical:
            return (
                "the system lists no AMD compute GPU in /sys/class/kfd; is its driver (amdgpu) loaded, and does "
                "the container have the GPU (--device=/dev/kfd --device=/dev/dri)?"
            )
        if not self.device_count():
            return f"HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES hides all {num_physical} GPUs"
        return self.build_problem() or ""

    def device_count(self) -> int:
        return len(gpus.visible_amd_gpus())

    def is_present(self) -> bool:
        return bool(gpus.amd_gpus())

    def clean_start_reason(self) -> str | None:
        return "ROCm has not been tested in a fork of a kernel"

    def open_meter(self) -> DeviceMeter:
        return gpus.AmdMeter(gpus.visible_amd_gpus())


ROCM = RocmBackend()


# --- Intel ------------------------------------------------------------------------------------------------------------


class XpuBackend(GpuBackend):
    """One process per Intel GPU, which is torch's device ``xpu``, connected by XCCL."""

    name = "xpu"
    title = "Intel GPUs"
    device_noun = "Intel GPU"
    dist_backend = "xccl"
    distributed_type = "MULTI_XPU"
    runtime = first_use.LEVEL_ZERO

    def affinity(self) -> int:
        # If there is also an NVIDIA or AMD GPU, an Intel GPU is probably integrated into the processor.
        return min(super().affinity(), 9)

    def build_problem(self) -> str | None:
        import torch

        if torch.xpu._is_compiled():
            return None
        return "the installed torch was built without XPU; install an XPU build from https://pytorch.org"

    def unavailable_reason(self) -> str:
        num_physical = gpus.num_intel_gpus()
        if not num_physical:
            return "the system lists no Intel GPU in /sys/class/drm; does the container have it (--device=/dev/dri)?"
        if not self.device_count():
            return f"ZE_AFFINITY_MASK or ONEAPI_DEVICE_SELECTOR hides all {num_physical} GPUs"
        return self.build_problem() or ""

    def overlooked(self) -> str | None:
        return None  # nearly every Intel processor has a GPU, but few users want to train on it

    def device_count(self) -> int:
        return gpus.num_visible_intel_gpus()

    def is_present(self) -> bool:
        return gpus.num_intel_gpus() > 0

    def count_problem(self, num_processes: int) -> str | None:
        import torch.distributed as dist

        if num_processes == 1 or dist.is_backend_available(self.dist_backend):
            return None
        # Gloo, which other GPUs could fall back on, does not accept tensors on Intel GPUs.
        return "the installed torch has no XCCL, which connects Intel GPUs; XPU builds of torch 2.8 and newer have it"

    def clean_start_reason(self) -> str | None:
        return "Intel's driver, Level Zero, has not been tested in a fork of a kernel"


XPU = XpuBackend()
