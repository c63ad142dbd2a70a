"""Modules that are built on another device, or with no memory at all, so that their first weights cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Context manager: modules built in it have parameters with a shape and no memory, on the ``meta`` device.

    Fill them with ``load_checkpoint_in_model(model, checkpoint)`` before the model is prepared.

    Args:
        include_buffers: the same for buffers, and all other tensors made in the block.
    """
    return init_on_device("meta", include_buffers)


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Context manager: parameters of modules built in it go to ``device``, each as soon as it is made.

    Args:
        device: where to.
        include_buffers: make buffers, and all other tensors of the block, there as well.
    """
    device = torch.device(device)
    if include_buffers:
        with device:
            yield
        return

    def move(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> Any:
        if parameter is None:
            return None
        bare = parameter.detach()
        there = bare.to(device)
        if there is bare:
            return None  # as it is, so that tied weights stay tied
        moved = torch.nn.Parameter(there, requires_grad=parameter.requires_grad)
        moved.__dict__.update(parameter.__dict__)
        return moved

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()
