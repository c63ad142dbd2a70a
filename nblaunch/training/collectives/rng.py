"""Seeds random generators, synchronises their states across ranks, and saves these states in checkpoints."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch

from nblaunch import context, env
from nblaunch.backends.base import Backend
from nblaunch.training.collectives import operations
from nblaunch.training.joining import current_topology
from nblaunch.training.options import RNG_TYPES, check_choice


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> int:
    """Seed the generators of Python, NumPy and torch, including the device generators.

    Args:
        seed: at least 0.
        device_specific: add the rank, so that ranks draw different numbers.
        deterministic: also make torch raise an error if an operation has no deterministic implementation.

    Returns:
        The seed that was used.
    """
    if device_specific:
        seed += current_topology().rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    # torch has already seeded other devices. It may be too early to choose a device here, because the script may still
    # set environment variables.
    if context.exists() or "torch_xla" in sys.modules or env.read("PJRT_DEVICE"):
        context.current().backend.seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    return seed


def synchronize_rng_states(rng_types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Call :func:`synchronize_rng_state` for each of ``rng_types``."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def synchronize_rng_state(rng_type: str, generator: torch.Generator | None = None) -> None:
    """Give every rank the state that the generator has on rank 0.

    Args:
        rng_type: ``"generator"``: the argument ``generator``, unless it is None; ``"torch"``: torch's global CPU
            generator; ``"cuda"``, ``"xpu"``: the current GPU's generator; ``"xla"``: the generator of the backend's
            device.

    Raises:
        ValueError: the type is unknown.
    """
    check_choice("rng_type", rng_type, RNG_TYPES)
    if operations.world_size() == 1:
        return
    if rng_type == "generator":
        if generator is not None:
            generator.set_state(operations.broadcast_alike(generator.get_state()))
    elif rng_type == "torch":
        torch.set_rng_state(operations.broadcast_alike(torch.get_rng_state()))
    elif rng_type == "xla":
        backend = context.current().backend
        backend.set_rng_state(operations.broadcast_object_list([dict(backend.rng_state())])[0])
    else:
        gpu = getattr(torch, rng_type)
        gpu.set_rng_state(operations.broadcast_alike(gpu.get_rng_state()))


# --- for checkpoints --------------------------------------------------------------------------------------------------


def capture_states(backend: Backend) -> dict[str, Any]:
    """Return the states of all of this process's generators."""
    return {**capture_cpu_states(), "device": dict(backend.rng_state())}


def capture_cpu_states() -> dict[str, Any]:
    """Return the states of the global CPU generators of Python, NumPy and torch."""
    legacy: Any = numpy.random.get_state()
    kind, keys, *rest = legacy
    return {
        "random_state": random.getstate(),
        "numpy_random_seed": (str(kind), torch.from_numpy(keys.astype("int64")), *rest),
        "torch_manual_seed": torch.get_rng_state(),
    }


def restore_states(state: Mapping[str, Any], backend: Backend) -> None:
    """Restore the states from :func:`capture_states`. Generators that are missing from ``state`` stay unchanged."""
    restore_cpu_states(state)
    if state.get("device"):
        backend.set_rng_state(state["device"])


def restore_cpu_states(state: Mapping[str, Any]) -> None:
    """Restore the states from :func:`capture_cpu_states`. Generators missing from ``state`` stay unchanged."""
    if "random_state" in state:
        version, words, gauss = state["random_state"]
        random.setstate((version, tuple(words), gauss))
    if "numpy_random_seed" in state:
        kind, keys, *rest = state["numpy_random_seed"]
        numpy.random.set_state((kind, numpy.asarray(keys, dtype="uint32"), *rest))
    if "torch_manual_seed" in state:
        torch.set_rng_state(state["torch_manual_seed"].cpu())
