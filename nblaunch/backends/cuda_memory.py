"""When a GPU's memory runs out: what this process had taken, on which batch, and what is worth trying."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from nblaunch.backends.batches import shapes_in_words, tensors

_GIB = 1 << 30
_FRAGMENTED_SHARE = 0.2
_FOREIGN_SHARE = 0.1
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
    """What to tell of an error by which a GPU's memory ran out; nothing of any other error."""
    if not is_out_of_memory(error):
        return ()
    memory = _read()
    if memory is None:
        return ()
    lines = [memory.describe()]
    if step.shapes:
        size = f" of {step.shapes[0][0]}" if step.shapes[0] else ""
        lines.append(
            f"It happened in {step.phase}, on a batch{size}: tensors {shapes_in_words(step.shapes[:6])}."
        )
    return (*lines, _advice(memory, step))


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
        return max(0, self.total - self.free - self.reserved)

    def describe(self) -> str:
        parts = [
            f"{_size(self.allocated)} allocated (at most {_size(self.peak)})",
            f"{_size(self.reserved)} reserved by this rank",
            f"{_size(self.free)} free",
        ]
        if self.others > _FOREIGN_SHARE * self.total:
            parts.append(f"{_size(self.others)} taken by other processes and by CUDA itself")
        return f"GPU memory ran out on {self.device} with {_size(self.total)}: {', '.join(parts)}."


def _read() -> Memory | None:
    import torch

    if not torch.cuda.is_initialized():
        return None
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    return Memory(
        device=f"cuda:{device} ({torch.cuda.get_device_name(device)})",
        total=total,
        free=free,
        allocated=torch.cuda.memory_allocated(device),
        peak=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
    )


def _advice(memory: Memory, step: Step) -> str:
    """What to try, what most likely helps first."""
    tips = []
    if memory.others > memory.total / 2:
        tips.append(
            "end the other processes on this GPU (nvidia-smi lists them; another notebook's kernel, perhaps)"
        )
    if memory.reserved - memory.allocated > _FRAGMENTED_SHARE * memory.total:
        tips.append(
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ({_size(memory.reserved - memory.allocated)} are "
            "reserved but in pieces too small)"
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
