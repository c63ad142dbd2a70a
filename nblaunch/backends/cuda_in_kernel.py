"""How this process has come to use CUDA, if it has: what a fork of it has to know, and where it was.

Four degrees are distinguished. torch has initialised CUDA; torch has only asked the driver (``is_available()``), which
poisons forks all the same; a ``backward()`` on the CPU has, as it starts a thread for each GPU; something else has
opened CUDA, as another library, or ``torch.accelerator``. That a library is *imported* says nothing.

:func:`watch` is called when nblaunch is imported. It remembers the line that initialises CUDA, and has torch ask NVML
whether there are GPUs, so that the question alone does not rule out a fork any more.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from nblaunch import env
from nblaunch.backends import autograd_probe, cell_history

_UVM_DEVICE = "/dev/nvidia-uvm"
_NUM_FRAMES = 200
_POISONED = "torch refuses CUDA in a forked copy"
_EARLIER_BACKWARD = "autograd's threading"  # torch's words: torch/csrc/autograd/engine.cpp
_ASKED = "has asked the CUDA driver through torch (torch.cuda.is_available() is enough), and a forked copy can't use it"
# Libraries that open CUDA by themselves. Named where one is loaded and CUDA is open, though not through torch.cuda.
_USERS_OF_CUDA = (
    "bitsandbytes",
    "cupy",
    "jax",
    "jaxlib",
    "numba.cuda",
    "pycuda",
    "tensorflow",
    "torchao",
    "triton",
)
# What makes torch initialise CUDA, for cells that ran before this was watched.
_USES = re.compile(
    r"\.cuda\(|device(_map)?=.?.?(cuda|auto)|\.to\(.?.?(cuda|device)|torch\.cuda\.(init|synchronize|current_device|"
    r"set_device|get_device|mem|empty_cache|Stream|Event|is_bf16)|Accelerator\(|pipeline\("
)

_first_use: tuple[tuple[str, int, str], ...] = ()


def watch() -> None:
    """Have torch's counting of GPUs leave forks possible. Imports nothing."""
    if env.read("PYTORCH_NVML_BASED_CUDA_CHECK") is None:
        env.apply({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})


def watch_torch(torch_cuda: Any) -> None:
    """Remember where CUDA is first initialised, with ``torch.cuda`` just imported, or long before.

    Its queue of calls for that moment runs in the thread that initialises, below the line that made it do so.
    """
    enqueue = getattr(torch_cuda, "_lazy_call", None)
    if enqueue is not None and not torch_cuda.is_initialized():
        enqueue(_remember)


def first_use() -> tuple[tuple[str, int, str], ...]:
    """The stack of the first initialisation: (file name, line, function), innermost first; empty if it was not seen."""
    return _first_use


def _remember() -> None:
    global _first_use
    if _first_use:
        return
    frames: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _NUM_FRAMES:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    _first_use = tuple(frames)


def hazard() -> str | None:
    """Why a forked copy of this process could not use CUDA, as the end of "this process ..."; None where it could."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        where = "" if _first_use else cell_history.guess(_USES)
        return f"has used CUDA through torch{where}, and CUDA can't be used in a forked copy of it"
    failure = autograd_probe.fork_failure(_try_torch) if torch is not None else None
    if failure is not None and _POISONED in failure:
        return _ASKED
    is_open = has_open_device(Path("/proc/self/fd"))
    # What fails for another reason than an earlier backward fails because CUDA is open.
    if failure is not None and (not is_open or _EARLIER_BACKWARD in failure):
        return f"has run backward(), which would fail in every forked worker ({failure.splitlines()[0]:.120})"
    if not is_open:
        return None
    loaded = [name for name in _USERS_OF_CUDA if name in sys.modules]
    who = f": {' or '.join(loaded)}, perhaps" if loaded else ""
    return f"has opened CUDA by another way than torch.cuda ({_UVM_DEVICE} is open{who}), useless in a forked copy"


def has_open_device(descriptors: Path) -> bool:
    """Whether a descriptor in the folder (``/proc/self/fd``) is that of a CUDA context."""
    try:
        entries = list(descriptors.iterdir())
    except OSError:
        return False  # no /proc on this system: torch's own flag has to do
    for entry in entries:
        try:
            if os.readlink(entry).startswith(_UVM_DEVICE):
                return True
        except OSError:
            continue  # closed meanwhile: the folder's own descriptor always is
    return False


def _try_torch() -> None:
    """In a probing child: what a worker does first. Raises where torch would refuse it."""
    import torch

    if torch.cuda._is_in_bad_fork():
        raise RuntimeError(_POISONED)
    # Where no backward has run yet, this child's would start the driver with all its GPUs: a second or more on
    # large machines, at each launch. That an earlier one can't be gone on with shows without any GPU.
    env.apply({"CUDA_VISIBLE_DEVICES": ""})
    autograd_probe.small_backward()
