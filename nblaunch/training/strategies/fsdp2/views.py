"""Views that a unit returns, exchanged for tensors of their own that show the same memory.

Torch gathers a unit's weights for backward in a hook on the tensors that it returned. On a view, as a linear layer
returns for batches of sequences, that hook is lost when the user goes on with ``x += y``, and torch (from 2.12) warns
of it at each such unit in any case.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nblaunch.training.collectives import nested


def return_no_views(module: nn.Module) -> None:
    """Have ``module`` return no views. To be called before ``fully_shard``, whose hooks run after those there are."""
    module.register_forward_hook(_without_views, with_kwargs=True)


@torch.compiler.disable  # as torch's own hooks are, which see next what this returns
def _without_views(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> Any | None:
    # Containers of other kinds may not be the same, once rebuilt.
    is_known = isinstance(output, (torch.Tensor, list, tuple, dict))
    if not is_known or not torch.is_grad_enabled():
        return None
    returned = {id(leaf): leaf for leaf in nested.leaves(output) if isinstance(leaf, torch.Tensor)}
    views = [tensor for tensor in returned.values() if tensor.requires_grad and tensor._base is not None]
    if not views:
        return None
    # Memory that goes by two names stays as it is: autograd knows what writing to one does to the other.
    others = [leaf for leaf in nested.leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
    shown = [_memory(tensor) for tensor in (*returned.values(), *others)]
    own: dict[int, torch.Tensor] = {
        id(view): _AsOwnTensor.apply(view)
        for view in views
        if sum(memory is view._base for memory in shown) == 1
    }
    # One hook that stays is enough to gather a unit's weights.
    num_left = len(views) - len(own)
    if 0 < num_left < sum(tensor.requires_grad for tensor in returned.values()):
        _ignore_warning(type(module).__name__)
    return nested.map_tensors(lambda tensor: own.get(id(tensor), tensor), output) if own else None


@functools.cache
def _ignore_warning(unit: str) -> None:
    """Have torch not warn of the views of such units, as of biases and masks that they hand on."""
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({unit}\) returned a view", UserWarning)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


class _AsOwnTensor(torch.autograd.Function):
    """A view's memory as a tensor of its own. Writing to it counts for what autograd has saved of the view, too."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]
