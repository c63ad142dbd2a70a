"""What errors of GPUs mean, of CUDA and NCCL above all, and what to try: their messages alone do not explain.

    explain      an error -> lines for the user; nothing for errors that are not of the device
    FAULTS       kinds of errors by their messages
    Memory       of a GPU when it ran out: what this process had taken, on which batch, and what is worth trying

Errors that only report the loss of another rank are not here: they are explained by the end of that rank.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from nblaunch.backends.base import shapes_in_words, tensors

_GIB = 1 << 30
_FRAGMENTED_SHARE = 0.2
_FOREIGN_SHARE = 0.1
_SETTING = re.compile(r"PYTORCH_\w*ALLOC_CONF")  # torch's own text names it; its name changed
_FULL = re.compile(r"(cuda|hip|xpu)\b.*out of memory|out of memory.*(cuda|hip|xpu)\b", re.DOTALL)
_REFUSALS = ("cublas_status_alloc_failed", "cudnn_status_alloc_failed")
_LATER = (
    "GPUs report errors later than they happen, so the line above may not be the cause: "
    "os.environ['CUDA_LAUNCH_BLOCKING'] = '1' in a cell before the launch makes them wait for each operation"
)


class LastStep(NamedTuple):
    """The step that ran: its phase ("training") and the shapes of its batch's tensors."""

    phase: str
    shapes: tuple[tuple[int, ...], ...] = ()


NO_STEP = LastStep("")


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors in nested lists, tuples and mappings; called at every step, keeps no tensor."""
    kind = type(batch)
    if kind is not tuple and kind is not list and kind is not dict:
        return _nested_shapes(batch)
    try:  # of tensors alone, as most are: less than a microsecond
        return tuple([item.shape for item in (batch.values() if kind is dict else batch)])
    except AttributeError:
        return _nested_shapes(batch)


def _nested_shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors(batch))


def explain(error: BaseException, step: LastStep = NO_STEP, device_type: str = "cuda") -> tuple[str, ...]:
    """Explain an error of a GPU or of NCCL, and what to try, a line each; return nothing for any other error.

    Args:
        error: with its causes.
        step: that ran.
        device_type: of torch, for the GPU: ``"cuda"``, ``"xpu"``.
    """
    return _explain_out_of_memory(error, step, device_type) or _explain_fault(error)


def _explain_fault(error: BaseException) -> tuple[str, ...]:
    """Explain by the message alone: after most of these errors CUDA answers every question with the same one."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for fault in FAULTS:
            if _is_of_device(current) and re.search(fault.pattern, str(current)):
                facts = _build()
                return fault.meaning.format(**facts), f"Try: {fault.advice}."
        current = current.__cause__ or current.__context__
    return ()


class Fault(NamedTuple):
    """A kind of error: the pattern of its message (a regular expression), what it means, and what to try."""

    pattern: str
    meaning: str
    advice: str


FAULTS = (
    Fault(
        r"device-side assert triggered",
        "An operation on the GPU was given a number out of range: most often a class that is not below the number of "
        "the model's outputs, or a token that its embedding has no row for. Which check it was is in this rank's "
        "log, as `Assertion ... failed`.",
        f"the same function on the CPU, notebook_launcher(..., backend='cpu'), which raises at its line. {_LATER}",
    ),
    Fault(
        r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction was encountered",
        "An operation on the GPU reached outside of its memory, which is a mistake of that operation: of a compiled or "
        "hand-written one, most often.",
        "without torch.compile, and without libraries that bring operations of their own, as for attention or "
        f"quantisation. {_LATER}",
    ),
    Fault(
        r"no kernel image is available",
        "The installed torch has no code for this GPU: it is older, or newer, than those it was built for{built}.",
        "another build of torch: https://pytorch.org/get-started lists them by CUDA version, and the oldest GPUs need "
        "an older torch",
    ),
    Fault(
        r"Cannot re-initialize CUDA in forked subprocess|CUDA error: initialization error",
        "CUDA was in use in the process that this one was forked from, and can't be used in a fork of it. nblaunch "
        "forks no workers then; data loaders and multiprocessing do so inside the function.",
        "datasets and collate functions that stay on the CPU (prepared loaders bring batches to the GPU), or "
        "DataLoader(..., multiprocessing_context='forkserver'); for the workers, start_method='forkserver'",
    ),
    Fault(
        r"driver on your system is too old|driver version is insufficient",
        "The NVIDIA driver is older than this torch{cuda} needs.",
        "a newer driver, or a build of torch for an older CUDA: https://pytorch.org/get-started",
    ),
    Fault(
        r"uncorrectable (NVLink|ECC) error|hardware stack error|GPU is lost|fallen off the bus|Xid",
        "The GPU itself, or its link to others, reports a defect: the function is not to blame.",
        "`nvidia-smi -q -d ECC` and the system's log (Xid) have details; exclude the GPU with CUDA_VISIBLE_DEVICES "
        "until the machine is rebooted",
    ),
    Fault(
        r"device\(s\) is/are busy or unavailable",
        "Another process uses the GPU, and its compute mode allows only one.",
        "end the processes that nvidia-smi lists; `nvidia-smi -c DEFAULT`, as root, allows several",
    ),
    Fault(
        r"system not yet initialized|Error 802",
        "The GPUs of this machine are linked by NVSwitch, and the service that sets up their links does not run.",
        "`systemctl start nvidia-fabricmanager`, in the very version of the driver",
    ),
    Fault(
        r"forward compatibility was attempted",
        "The container brings a CUDA library for another driver than the host has.",
        "an image for the CUDA version that nvidia-smi shows, or one without the package cuda-compat",
    ),
    Fault(
        r"No CUDA GPUs are available|CUDA unknown error",
        "CUDA shows this process no GPU, though the driver reported some to the launcher.",
        "CUDA_VISIBLE_DEVICES as it was when the kernel started; nvidia-smi, to see whether the driver still answers",
    ),
    Fault(
        r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_INITIALIZED",
        "A library of CUDA could not be started: most often the GPU's memory is full, or a number out of range stopped "
        "the GPU just before.",
        f"a smaller batch; the same function with backend='cpu'. {_LATER}",
    ),
    Fault(
        r"Duplicate GPU detected",
        "Two ranks compute on the same GPU, which NCCL refuses.",
        "accelerator.device, or torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before CUDA is used, instead of "
        "'cuda' or 'cuda:0'; as many ranks as GPUs at most, or init_process_group('gloo')",
    ),
    Fault(
        r"shared memory segment|/dev/shm/nccl",
        "NCCL found no room in /dev/shm, through which GPUs without direct links talk; containers have 64 MB there.",
        "a container with --shm-size=8g, or --ipc=host; slower: os.environ['NCCL_SHM_DISABLE'] = '1' before the launch",
    ),
    Fault(
        r"peer access is not supported|peer mapping resources exhausted",
        "GPUs can't access each other's memory, though NCCL expected it.",
        "os.environ['NCCL_P2P_DISABLE'] = '1' in a cell before the launch",
    ),
)  # fmt: skip


def _is_of_device(error: BaseException) -> bool:
    """Return whether torch raises such errors for devices and groups; those at the start have their own class."""
    return isinstance(error, RuntimeError) or type(error).__name__ == "DeferredCudaCallError"


def _build() -> dict[str, str]:
    """Return the CUDA version and the GPUs that torch was built for."""
    torch: Any = sys.modules.get("torch")
    cuda = torch.version.cuda if torch is not None else None
    kinds = torch.cuda.get_arch_list() if torch is not None else []
    return {
        "cuda": f" (built for CUDA {cuda})" if cuda else "",
        "built": f" ({', '.join(kinds)})" if kinds else "",
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU's memory ran out: torch's own error, or one of a library with such a message."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    kind = getattr(torch, "OutOfMemoryError", None) or torch.cuda.OutOfMemoryError
    text = str(error).lower()
    is_named = _FULL.search(text) is not None or any(words in text for words in _REFUSALS)
    return isinstance(error, kind) or (isinstance(error, RuntimeError) and is_named)


def _explain_out_of_memory(error: BaseException, step: LastStep, device_type: str) -> tuple[str, ...]:
    if not is_out_of_memory(error):
        return ()
    memory = _read(device_type)
    lines = [memory.describe() if memory is not None else _NO_NUMBERS]
    if step.shapes:
        size = f" of {step.shapes[0][0]}" if step.shapes[0] else ""
        lines.append(
            f"It happened in {step.phase}, on a batch{size}: tensors {shapes_in_words(step.shapes[:6])}."
        )
    setting = _SETTING.search(str(error))
    return (*lines, _advice(memory, step, setting[0] if setting else "PYTORCH_CUDA_ALLOC_CONF"))


_NO_NUMBERS = "GPU memory ran out so that its driver could not even start: other processes have taken it."


@dataclass(frozen=True)
class Memory:
    """A GPU's memory as one process sees it, in bytes: ``others`` is what all other processes have taken."""

    device: str
    total: int
    free: int
    allocated: int
    peak: int
    reserved: int

    @property
    def others(self) -> int:
        """Return what all other processes have taken, and CUDA itself."""
        return max(0, self.total - self.free - self.reserved)

    def describe(self) -> str:
        """Return the numbers in one sentence."""
        parts = [
            f"{_size(self.allocated)} allocated (at most {_size(self.peak)})",
            f"{_size(self.reserved)} reserved by this rank",
            f"{_size(self.free)} free",
        ]
        if self.others > _FOREIGN_SHARE * self.total:
            parts.append(f"{_size(self.others)} taken by other processes and by the driver itself")
        return f"GPU memory ran out on {self.device} with {_size(self.total)}: {', '.join(parts)}."


def _read(device_type: str) -> Memory | None:
    """Return None where the driver does not answer, as for want of memory."""
    import torch

    gpu = getattr(torch, device_type)
    if not gpu.is_initialized():
        return None
    device = gpu.current_device()
    try:
        free, total = gpu.mem_get_info(device)
    except RuntimeError:
        return None
    return Memory(
        device=f"{device_type}:{device} ({gpu.get_device_name(device)})",
        total=total,
        free=free,
        allocated=gpu.memory_allocated(device),
        peak=gpu.max_memory_allocated(device),
        reserved=gpu.memory_reserved(device),
    )


def _advice(memory: Memory | None, step: LastStep, setting: str) -> str:
    """Return what to try, what most likely helps first."""
    tips = []
    if memory is None or memory.others > memory.total / 2:
        tips.append(
            "end the other processes on this GPU (nvidia-smi or rocm-smi lists them; another notebook's, perhaps)"
        )
    if memory is not None and memory.reserved - memory.allocated > _FRAGMENTED_SHARE * memory.total:
        tips.append(
            f"os.environ['{setting}'] = 'expandable_segments:True' in a cell before the launch "
            f"({_size(memory.reserved - memory.allocated)} are reserved but in pieces too small)"
        )
    if step.phase == "evaluating":
        tips.append("torch.no_grad() around the evaluation, and a smaller batch there")
    else:
        tips.append(
            "a smaller batch, with gradient_accumulation_steps for the same steps (find_executable_batch_size)"
        )
    tips.append("mixed_precision='bf16' or 'fp16', where it is not used yet")
    tips.append("activation checkpointing")
    return "Try: " + "; ".join(tips) + "."


def _size(num_bytes: int) -> str:
    """Format in binary units, as torch's own message."""
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / (1 << 20):.0f} MiB"
