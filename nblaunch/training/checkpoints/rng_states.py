"""The state of a process's random generators, taken and put back: Python's, NumPy's, torch's and the device's.

States are kept as plain numbers and tensors, so that reading a checkpoint executes nothing that it contains.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from nblaunch.backends.base import Backend


def capture(backend: Backend) -> dict[str, Any]:
    """The state of all generators of this process."""
    state: dict[str, Any] = {
        "random_state": random.getstate(),
        "torch_manual_seed": torch.get_rng_state(),
        "device": dict(backend.rng_state()),
    }
    # A library that this process has not imported has drawn nothing.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy_random_seed"] = (str(kind), torch.from_numpy(keys.astype("int64")), *rest)
    return state


def restore(state: Mapping[str, Any], backend: Backend) -> None:
    """Put back what :func:`capture` returned. Parts that ``state`` has not are left as they are."""
    if "random_state" in state:
        version, words, gauss = state["random_state"]
        random.setstate((version, tuple(words), gauss))
    if "numpy_random_seed" in state:
        import numpy

        kind, keys, *rest = state["numpy_random_seed"]
        numpy.random.set_state((kind, numpy.asarray(keys, dtype="uint32"), *rest))
    if "torch_manual_seed" in state:
        torch.set_rng_state(state["torch_manual_seed"].cpu())
    if state.get("device"):
        backend.set_rng_state(state["device"])
