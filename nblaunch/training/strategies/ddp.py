"""Data parallelism: every rank holds the whole model, gradients are averaged during backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from nblaunch.training.options import DistributedDataParallelKwargs
from nblaunch.training.process import Member, Waiting
from nblaunch.training.strategies.base import Strategy


class DdpStrategy(Strategy):
    """:class:`torch.nn.parallel.DistributedDataParallel`, on CPU and GPU alike.

    Args:
        options: its arguments.
    """

    name = "ddp"

    def __init__(self, options: DistributedDataParallelKwargs | None = None) -> None:
        self.options = options or DistributedDataParallelKwargs()

    def wrap(self, model: torch.nn.Module, member: Member) -> torch.nn.Module:
        if isinstance(model, DistributedDataParallel):
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # nothing to average, and DDP refuses such a model
        devices = None if member.device.type == "cpu" else [member.device]
        with Waiting(member.slot):  # it compares and copies weights over ranks
            return DistributedDataParallel(model, device_ids=devices, **self.options.to_kwargs())

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return nullcontext()
