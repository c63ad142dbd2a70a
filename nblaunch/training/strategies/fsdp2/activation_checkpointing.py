"""Activation checkpointing of one module: its activations are computed anew in backward instead of being kept."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# What layers of generating models are given to keep tokens in, in the words of transformers.
_CACHES = ("past_key_value", "past_key_values", "layer_past")


def checkpoint_activations(module: nn.Module, is_offloaded: bool) -> None:
    """Have ``module`` compute its activations anew in backward, instead of keeping them.

    In its own ``forward``, which the hooks that gather and free weights are around: the second time runs while they
    are gathered for backward. Empty caches of a generating model are left out: the second time would find them filled.
    """
    forward = module.forward

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kwargs = _without_empty_caches(kwargs)
        saving = torch.autograd.graph.save_on_cpu(pin_memory=True) if is_offloaded else nullcontext()
        with saving:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = checkpointed


def _without_empty_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    caches = [name for name in _CACHES if kwargs.get(name) is not None]
    if not caches or any(_is_filled(kwargs[name]) for name in caches):
        return kwargs  # with tokens that a user computes on: torch says where that can't be done twice
    return {**kwargs, **dict.fromkeys(caches), **({"use_cache": False} if "use_cache" in kwargs else {})}


def _is_filled(cache: Any) -> bool:
    """Return whether a cache of transformers, or of a user's own, has tokens."""
    length = getattr(cache, "get_seq_length", None)
    return bool(length()) if callable(length) else bool(cache)
