"""Device families, found by name: one file each in this folder, and those that were registered.

base.py            Backend: what a device family is, and how to add one
cpu.py             CPU cores, gloo
gpu.py             what the next three have in common: one process per GPU, by a module of torch; what errors mean
cuda.py            NVIDIA GPUs, NCCL
rocm.py            AMD GPUs, RCCL
xpu.py             Intel GPUs, XCCL
mps.py             the GPU of a Mac, one process
xla.py             TPUs, and the CPU in their place
xla_runtime.py     torch_xla: found and imported, its devices driven as one, its world in a worker
torch_tpu.py       TPUs by TorchTPU
compile_watch.py   which step of a loop compiled what, on a lazy device
first_use.py       whether forked workers could use the device, and which line of this process used it first
process_group.py   joining, leaving and forgetting torch's default process group

A backend here is a device family. What torch.distributed calls a backend (gloo, NCCL) is a family's ``dist_backend``.
"""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import re
from functools import cache

from nblaunch.backends.base import Backend

_registered: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Add a device family to this process and to the workers of its launches.

    A backend that was registered under the same name before is replaced.

    Raises:
        TypeError: it is not a :class:`Backend`.
        ValueError: its name is not a word in lower case, or a built-in backend has this name.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"register() takes an instance of nblaunch.backends.base.Backend, not {backend!r}")
    if not re.fullmatch("[a-z][a-z0-9_]*", backend.name):
        raise ValueError(f"a backend can't be named {backend.name!r}: use a lower-case word, such as 'npu'")
    if backend.name in ("auto", *_built_in()):
        raise ValueError(f"a backend can't be named {backend.name!r}: the name is taken")
    _registered[backend.name] = backend


def registered(name: str) -> Backend | None:
    """Return the backend that was registered under ``name``; None if none was."""
    return _registered.get(name)


def discover() -> dict[str, Backend]:
    """Return every backend by its name. None of them imports its device library yet."""
    return {**_built_in(), **_registered}


@cache
def _built_in() -> dict[str, Backend]:
    found: dict[str, Backend] = {}
    for module_info in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        backend = getattr(importlib.import_module(module_info.name), "BACKEND", None)
        if backend is not None:
            found[backend.name] = backend
    return found


def names() -> list[str]:
    """Return what may be given as ``backend=``."""
    return ["auto", *sorted(discover())]


def find(name: str, pickled: bytes = b"") -> Backend:
    """Return the backend called ``name``, in a worker or in what starts workers.

    Args:
        name: name of the backend.
        pickled: the backend, where it was registered in another process; it is registered in this one too then.
    """
    if pickled and name not in _registered:
        register(pickle.loads(pickled))
    return _registered[name] if name in _registered else _built_in()[name]


def choose(name: str) -> Backend:
    """Return the backend called ``name``, or for ``"auto"`` the one that suits this machine best.

    If that backend can't be used, a backend whose devices torch calls by this name is returned instead.

    Raises:
        ValueError: no backend has this name; lists those that exist.
        RuntimeError: the backend exists but can't be used on this machine, with the reason.
    """
    found = discover()
    if name == "auto":
        return max(found.values(), key=lambda backend: backend.affinity())
    if name not in list(found):  # a list: what was given as name need not be hashable
        raise ValueError(f"backend={name!r} is unknown; valid are {', '.join(map(repr, names()))}")
    if found[name].affinity() > 0:
        return found[name]
    # AMD's GPUs are "cuda" to torch, and so in scripts and configuration files.
    same = [other for other in found.values() if other.device_type == name and other.affinity() > 0]
    if not same:
        raise RuntimeError(f"backend={name!r} can't be used here: {found[name].unavailable_reason()}")
    return same[0]
