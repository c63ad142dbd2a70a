"""Device families by name: those in the modules of this folder, and families that users have registered.

base.py            Backend: the interface of a device family, and how to add one
cpu.py             CPU cores, gloo
gpu.py             GPUs of NVIDIA (NCCL), AMD (RCCL) and Intel (XCCL): one process per GPU, driven by a torch module;
                   explains errors
mps.py             a Mac's GPU, for one process
xla.py             TPUs, or the CPU as a stand-in
xla_runtime.py     torch_xla: its import, its SPMD mode, and its world in a worker
torch_tpu.py       TPUs through TorchTPU
compile_watch.py   which step of a loop made a lazy device compile
first_use.py       whether forked workers could use the device, and which line of code in this process used it first
process_group.py   torch's default process group: joining, leaving and forgetting it; groups that code forms without a
                   launcher

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

    If a backend is already registered under the same name, the new one replaces it.

    Raises:
        TypeError: ``backend`` is not a :class:`Backend`.
        ValueError: its name is not a lower-case word, or belongs to a built-in backend.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"register() takes an instance of nblaunch.backends.base.Backend, not {backend!r}")
    if not re.fullmatch("[a-z][a-z0-9_]*", backend.name):
        raise ValueError(f"a backend can't be named {backend.name!r}: use a lower-case word, such as 'npu'")
    if backend.name in ("auto", *_built_in()):
        raise ValueError(f"a backend can't be named {backend.name!r}: a built-in backend has this name")
    _registered[backend.name] = backend


def registered(name: str) -> Backend | None:
    """Return the backend registered under ``name``; None if there is none."""
    return _registered.get(name)


def discover() -> dict[str, Backend]:
    """Return all backends by name, without importing their device libraries."""
    return {**_built_in(), **_registered}


@cache
def _built_in() -> dict[str, Backend]:
    families: dict[str, Backend] = {}
    for module_info in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        for value in vars(importlib.import_module(module_info.name)).values():
            if isinstance(value, Backend):
                families[value.name] = value
    return families


def names() -> list[str]:
    """Return the valid values of ``backend=``."""
    return ["auto", *sorted(discover())]


def find(name: str, pickled: bytes = b"") -> Backend:
    """Return the backend called ``name`` in a worker, or in a process that starts workers.

    Args:
        name: name of the backend.
        pickled: the backend, if another process registered it; this process then also registers it.
    """
    if pickled and name not in _registered:
        register(pickle.loads(pickled))
    return _registered[name] if name in _registered else _built_in()[name]


def choose(name: str) -> Backend:
    """Return the backend called ``name``; for ``"auto"``, the one that suits this machine best.

    If that backend can't be used, return a usable backend whose devices torch calls by this name.

    Raises:
        ValueError: no backend has this name; the message lists the valid names.
        RuntimeError: the backend exists but can't be used on this machine; the message gives the reason.
    """
    families = discover()
    if name == "auto":
        return max(families.values(), key=lambda backend: backend.affinity())
    if name not in list(families):  # a list, because the name need not be hashable
        raise ValueError(f"backend={name!r} is unknown; valid values are {', '.join(map(repr, names()))}")
    if families[name].affinity() > 0:
        return families[name]
    # torch, scripts and configuration files refer to AMD GPUs as "cuda".
    same = [other for other in families.values() if other.device_type == name and other.affinity() > 0]
    if not same:
        raise RuntimeError(f"backend={name!r} can't be used here: {families[name].unavailable_reason()}")
    return same[0]
