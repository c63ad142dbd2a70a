"""What errors of GPUs mean, of CUDA and NCCL above all, and what to try where their messages do not say it.

    explain      an error -> lines for the user; nothing for errors that are not of the device
    FAULTS       kinds of errors by their messages

Errors that only report the loss of another rank are not here: they are explained by the end of that rank.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

from nblaunch.backends.base import shapes_in_words, tensors

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


def explain(error: BaseException, step: LastStep = NO_STEP) -> tuple[str, ...]:
    """Explain an error of a GPU or of NCCL, and what to try, a line each; return nothing for any other error.

    Args:
        error: with its causes.
        step: that ran.
    """
    return _explain_out_of_memory(step) if is_out_of_memory(error) else _explain_fault(error)


def _explain_fault(error: BaseException) -> tuple[str, ...]:
    """Explain by the message alone: after most of these errors CUDA answers every question with the same one."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for fault in FAULTS:
            if isinstance(current, RuntimeError) and re.search(fault.pattern, str(current)):
                return fault.meaning, f"Try: {fault.advice}."
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
        "The installed torch has no code for this GPU: it is older, or newer, than those that it was built for.",
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
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU's memory ran out: torch's own error, or one of a library with such a message."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    text = str(error).lower()
    is_named = _FULL.search(text) is not None or any(words in text for words in _REFUSALS)
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and is_named)


def _explain_out_of_memory(step: LastStep) -> tuple[str, ...]:
    """Return what torch's message, which has the numbers, does not know: the step, and what to try in this order."""
    where = ""
    if step.shapes:
        size = f" of {step.shapes[0][0]}" if step.shapes[0] else ""
        where = f" in {step.phase}, on a batch{size}: tensors {shapes_in_words(step.shapes[:6])}"
    smaller = (
        "a smaller batch, with gradient_accumulation_steps for the same steps (find_executable_batch_size)"
    )
    if step.phase == "evaluating":
        smaller = "torch.no_grad() around the evaluation, and a smaller batch there"
    return (
        f"GPU memory ran out{where}.",
        f"Try: {smaller}; mixed_precision='bf16' or 'fp16', where it is not used yet; activation checkpointing; ending "
        "other processes on this GPU, which nvidia-smi or rocm-smi lists.",
    )
