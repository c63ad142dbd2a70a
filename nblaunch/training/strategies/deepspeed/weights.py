"""Whole weights of modules that an engine of DeepSpeed trains, whose parameters stage 3 holds in parts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch

from nblaunch import context, formatting
from nblaunch.errors import warn
from nblaunch.training.strategies.deepspeed import library
from nblaunch.wire.modules import Piece


def whole(module: torch.nn.Module, keep: bool) -> dict[str, Any]:
    """The state dict of a module, in memory of its own on the CPU. All ranks must call it.

    Args:
        module: a user's own, or one inside it.
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
    """Return what this rank sends of a module's weights: its shards; rank 0 also what every rank has whole."""
    is_main = context.current().topology.rank == 0
    sent: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if hasattr(value, "ds_id"):
            sent[name] = _piece(value)
        elif is_main:
            sent[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return sent


def warn_of_empty(module: torch.nn.Module) -> None:
    """Have ``module.state_dict()`` warn a user from now on that it is empty where parameters lie in parts."""
    module.register_state_dict_post_hook(_warn_of_empty)


def _warn_of_empty(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, metadata: object) -> None:
    cut = [name for name, parameter in module.named_parameters() if hasattr(parameter, "ds_id")]
    values = [state.get(prefix + name) for name in cut]
    # Callers that ask for the variables themselves can put them together, as this file does.
    num_empty = sum(
        isinstance(v, torch.Tensor) and not hasattr(v, "ds_id") and v.numel() == 0 for v in values
    )
    if num_empty and not _is_asked_by_deepspeed():
        warn(
            f"state_dict() has nothing in {formatting.count(num_empty, 'tensor')} of {len(state)}: ZeRO 3 keeps each "
            "rank's part of them elsewhere. Take whole weights from accelerator.get_state_dict(model), called on all "
            "ranks, or save them with accelerator.save_model(model, folder)"
        )


def _is_asked_by_deepspeed() -> bool:
    """Its checkpoints take a state dict, too, and add the parts."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "torch",
        "nblaunch",
    ):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("deepspeed.")


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
