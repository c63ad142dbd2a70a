"""Gradient clipping by a DeepSpeed engine, which holds gradients in shards: their norm is a collective.

The engine clips when it steps; until then, the user's limit is only set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def check_request(engine: Any, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> None:
    """Raise ValueError where an engine can't clip as it is asked to."""
    if norm_type != 2:
        raise ValueError(f"norm_type={norm_type} can't be used with DeepSpeed, which clips by the 2-norm")
    configured = engine.gradient_clipping()
    if configured and configured != max_norm:
        raise ValueError(
            f"clip_grad_norm_(max_norm={max_norm}) contradicts gradient_clipping={configured} of the DeepSpeed "
            'configuration; set it in one place, or write "auto" there'
        )
    own = {id(parameter) for parameter in engine.module.parameters() if parameter.requires_grad}
    given = {id(parameter) for parameter in parameters if parameter.requires_grad}
    if given != own:
        raise ValueError(
            f"clip_grad_norm_ was given {len(given)} trainable parameters, but DeepSpeed clips all {len(own)} of its "
            "model at once; pass model.parameters()"
        )


def set_max_norm(engine: Any, max_norm: float) -> None:
    """Have the next step clip to ``max_norm``; 0: not at all."""
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = max_norm
    elif max_norm and max_norm != engine.gradient_clipping():  # plain fp32, where gradients lie on every rank
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm)


def total_norm(engine: Any) -> torch.Tensor:
    """Return the norm of all gradients, in true size. All ranks must call it, between backward and step."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
        norms = [optimizer.scaled_global_norm()]
    elif hasattr(optimizer, "_get_norm_groups"):  # stage 3
        norms = optimizer._get_norm_groups()
    else:
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        if not gradients:
            return last_total_norm(engine)  # bf16 with fp32 gradients: measured in the step
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    groups = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norms])
    if bool((groups < 0).any()):  # how the engine says that gradients overflowed
        return torch.tensor(float("inf"))
    return torch.linalg.vector_norm(groups) / float(getattr(optimizer, "loss_scale", 1.0) or 1.0)


def last_total_norm(engine: Any) -> torch.Tensor:
    """Return the norm at the step before; 0 where there was none."""
    return torch.as_tensor(engine.get_global_grad_norm() or 0.0, dtype=torch.float32)
