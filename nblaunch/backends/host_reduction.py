"""Averaging gradients over ranks through host memory, for devices whose runtime has no collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def average(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Average gradients over ranks by gloo. Those that only some ranks have count as zero on the others."""
    import torch
    import torch.distributed as dist

    if not parameters:
        return
    present = torch.tensor([float(p.grad is not None) for p in parameters])
    flat = torch.cat(
        [
            torch.zeros(p.numel()) if p.grad is None else p.grad.detach().cpu().reshape(-1).float()
            for p in parameters
        ]
        + [present]
    )
    dist.all_reduce(flat)
    *values, counts = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, value, count in zip(parameters, values, counts.tolist(), strict=True):
        if count:
            mean = (value / dist.get_world_size()).to(parameter.dtype).reshape(parameter.shape)
            parameter.grad = mean.to(parameter.device)
