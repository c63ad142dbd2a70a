"""When a GPU's memory runs out: what this process had taken, on which batch, and what is worth trying."""

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
_REFUSALS = ("cublas_status_alloc_failed", "cudnn_status_alloc_failed")


class Step(NamedTuple):
    """The step that ran: its phase ("training") and the shapes of its batch's tensors."""

    phase: str
    shapes: tuple[tuple[int, ...], ...] = ()


NO_STEP = Step("")


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors in nested lists, tuples and mappings. Called at every step: quick, keeps no tensor."""
    kind = type(batch)
    if kind is not tuple and kind is not list and kind is not dict:
        return _nested_shapes(batch)
    try:  # of tensors alone, as most are: less than a microsecond
        return tuple([item.shape for item in (batch.values() if kind is dict else batch)])
    except AttributeError:
        return _nested_shapes(batch)


def _nested_shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors(batch))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory ran out: torch's own error, or a library's that says so."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    kind = getattr(torch, "OutOfMemoryError", None) or torch.cuda.OutOfMemoryError
    text = str(error).lower()
    is_told = ("cuda" in text and "out of memory" in text) or any(words in text for words in _REFUSALS)
    return isinstance(error, kind) or (isinstance(error, RuntimeError) and is_told)


def explain(error: BaseException, step: Step) -> tuple[str, ...]:
    """Explain an error by which a GPU's memory ran out; nothing of any other error."""
    if not is_out_of_memory(error):
        return ()
    memory = _read()
    lines = [memory.describe() if memory is not None else _NO_NUMBERS]
    if step.shapes:
        size = f" of {step.shapes[0][0]}" if step.shapes[0] else ""
        lines.append(
            f"It happened in {step.phase}, on a batch{size}: tensors {shapes_in_words(step.shapes[:6])}."
        )
    setting = _SETTING.search(str(error))
    return (*lines, _advice(memory, step, setting[0] if setting else "PYTORCH_CUDA_ALLOC_CONF"))


_NO_NUMBERS = "GPU memory ran out so that CUDA could not even start: other processes have taken it."


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
        """What all other processes have taken, and CUDA itself."""
        return max(0, self.total - self.free - self.reserved)

    def describe(self) -> str:
        """The numbers in one sentence, for the explanation of an out-of-memory error."""
        parts = [
            f"{_size(self.allocated)} allocated (at most {_size(self.peak)})",
            f"{_size(self.reserved)} reserved by this rank",
            f"{_size(self.free)} free",
        ]
        if self.others > _FOREIGN_SHARE * self.total:
            parts.append(f"{_size(self.others)} taken by other processes and by CUDA itself")
        return f"GPU memory ran out on {self.device} with {_size(self.total)}: {', '.join(parts)}."


def _read() -> Memory | None:
    """None where CUDA does not answer, for want of memory as well."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    device = torch.cuda.current_device()
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return None
    return Memory(
        device=f"cuda:{device} ({torch.cuda.get_device_name(device)})",
        total=total,
        free=free,
        allocated=torch.cuda.memory_allocated(device),
        peak=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
    )


def _advice(memory: Memory | None, step: Step, setting: str) -> str:
    """What to try, what most likely helps first."""
    tips = []
    if memory is None or memory.others > memory.total / 2:
        tips.append(
            "end the other processes on this GPU (nvidia-smi lists them; another notebook's kernel, perhaps)"
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
    """In binary units, as torch's own message counts."""
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / (1 << 20):.0f} MiB"
