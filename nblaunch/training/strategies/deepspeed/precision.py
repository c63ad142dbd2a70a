"""What is left of mixed precision where a DeepSpeed engine has 16-bit weights and scales losses itself."""

from __future__ import annotations

from typing import Any

import torch

from nblaunch.training.collectives import nested
from nblaunch.training.precision import AutocastForward, Precision, restore_forward


class EnginePrecision(Precision):
    """What is left of mixed precision where the engine scales losses, and holds fp32 copies of its 16-bit weights.

    Args:
        other: the precision that the process would use otherwise; gives its name.
    """

    def __init__(self, other: Precision) -> None:
        super().__init__(other._backend)
        self.name = other.name

    def prepare_forward(self, model: torch.nn.Module) -> None:
        """Let ``model`` take fp32 batches and give fp32 outputs, as it does with autocast."""
        restore_forward(model)
        if self.name != "no":
            wrapped = CastForward(model, self)
            model.__dict__.update(_original_forward=wrapped.original, forward=wrapped)


class CastForward(AutocastForward):
    """Call a model's ``forward`` on inputs in the number format of its weights, with outputs in fp32.

    Floating-point inputs only: an engine's weights are in 16 bits, and most layers take no mixture.
    """

    def __init__(self, model: torch.nn.Module, precision: Precision) -> None:
        super().__init__(model, precision)
        self.parameters = model.parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), None)
        if dtype in (torch.float16, torch.bfloat16):

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.to(dtype) if tensor.is_floating_point() else tensor

            args, kwargs = nested.map_tensors(cast, args), nested.map_tensors(cast, kwargs)
        return nested.to_fp32(self.original(*args, **kwargs))
