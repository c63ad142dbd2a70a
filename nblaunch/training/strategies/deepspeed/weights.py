"""Whole weights of modules that an engine of DeepSpeed trains, whose parameters stage 3 holds in parts."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from nblaunch import context
from nblaunch.training.strategies.deepspeed import library
from nblaunch.wire.pieces import Piece


def whole(module: torch.nn.Module, keep: bool) -> dict[str, Any]:
    """The state dict of a module, in memory of its own on the CPU. All ranks must call it.

    Args:
        module: a person's own, or one inside it.
        keep: False: this rank only contributes, and gets an empty dict.
    """
    is_cut = bool(library.parameters_in_parts(module))
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


def pieces(module: torch.nn.Module) -> dict[str, Any]:
    """What this rank tells the launcher of a module's weights: its parts; rank 0 also what every rank has whole."""
    is_main = context.current().topology.rank == 0
    told: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if hasattr(value, "ds_id"):
            told[name] = _piece(value)
        elif is_main:
            told[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return told


def _piece(parameter: Any) -> Piece:
    """This rank's stretch of a parameter; the last ones are filled up, so that all are of one size."""
    part = parameter.ds_tensor.detach().reshape(-1)
    # Asked of the group itself: end_training() has left the default one, without which torch.distributed has no ranks.
    start = min(parameter.ds_process_group.rank() * part.numel(), parameter.ds_numel)
    length = min(part.numel(), parameter.ds_numel - start)
    return Piece(tuple(parameter.ds_shape), (start,), part[:length].to("cpu", copy=True), is_flat=True)


def _copy(value: torch.Tensor, keep: bool) -> torch.Tensor:
    # Stages 1 and 2 let all parameters be views of one buffer, which torch.save would write for each of them.
    if not hasattr(value, "ds_id"):
        return value.detach().to("cpu", copy=True) if keep else value
    zero: Any = importlib.import_module("deepspeed.runtime.zero")
    with zero.GatheredParameters([value]):
        return value.detach().to("cpu", copy=True) if keep else value
