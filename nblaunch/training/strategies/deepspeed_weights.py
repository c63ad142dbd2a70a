"""Whole weights of modules that an engine of DeepSpeed trains, whose parameters stage 3 holds in parts."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from nblaunch.training.strategies import deepspeed_library


def whole(module: torch.nn.Module, keep: bool) -> dict[str, Any]:
    """The state dict of a module, in memory of its own on the CPU. All ranks must call it.

    Args:
        module: a person's own, or one inside it.
        keep: False: this rank only contributes, and gets an empty dict.
    """
    is_cut = bool(deepspeed_library.parameters_in_parts(module))
    if not is_cut and not keep:
        return {}
    copies: dict[int, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            copy: Any = value
        elif id(value) in copies:  # two names of one parameter stay so
            copy = copies[id(value)]
        else:
            copy = copies[id(value)] = _copy(value, keep)
        if keep:
            state[name] = copy
    return state


def _copy(value: torch.Tensor, keep: bool) -> torch.Tensor:
    # Stages 1 and 2 let all parameters be views of one buffer, which torch.save would write for each of them.
    if not hasattr(value, "ds_id"):
        return value.detach().to("cpu", copy=True) if keep else value
    zero: Any = importlib.import_module("deepspeed.runtime.zero")
    with zero.GatheredParameters([value]):
        return value.detach().to("cpu", copy=True) if keep else value
