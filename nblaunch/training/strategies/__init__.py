"""Ways to spread a model over processes: one file each. See ``base.py`` for what a strategy has to say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from nblaunch.training.fsdp_options import FullyShardedDataParallelPlugin
from nblaunch.training.joining import Member
from nblaunch.training.options import DistributedDataParallelKwargs
from nblaunch.training.session import Session
from nblaunch.training.strategies import ddp as data_parallel
from nblaunch.training.strategies.base import Strategy
from nblaunch.training.strategies.ddp import DdpStrategy
from nblaunch.training.strategies.deepspeed.strategy import DeepSpeedStrategy
from nblaunch.training.strategies.fsdp2 import strategy as fsdp2
from nblaunch.training.strategies.fsdp2.strategy import Fsdp2Strategy
from nblaunch.training.strategies.replicated import ReplicatedStrategy, SingleStrategy

__all__ = ["PLUGINS", "Strategy", "choose", "sync_in_backward"]


PLUGINS = {"fsdp2": "fsdp_plugin", "deepspeed": "deepspeed_plugin"}
"""The argument of the Accelerator that asks for a strategy."""


def choose(
    member: Member,
    ddp: DistributedDataParallelKwargs | None = None,
    *,
    fsdp: FullyShardedDataParallelPlugin | None = None,
    dtype: torch.dtype | None = None,
    deepspeed: Session | None = None,
    splits_batches: bool = False,
) -> Strategy:
    """The strategy for a job of this size.

    Args:
        member: the place of this process.
        ddp: settings for replicas.
        fsdp: settings for shards; None: models are not sharded.
        dtype: of the mixed precision; None: full.
        deepspeed: the session whose plugin DeepSpeed trains by; None: it does not.
        splits_batches: whether a loader's batch is that of all ranks together.
    """
    if deepspeed is not None:
        return DeepSpeedStrategy(deepspeed, splits_batches)
    if fsdp is not None:
        return Fsdp2Strategy(member, fsdp, dtype)
    if member.topology.world_size == 1:
        return SingleStrategy()
    return ReplicatedStrategy() if member.backend.reduces_gradients else DdpStrategy(ddp)


@contextmanager
def sync_in_backward(model: Any) -> Iterator[None]:
    """The next ``backward`` through ``model`` reduces gradients, though its forwards ran under ``no_sync``.

    Does nothing for models that are not spread over processes.
    """
    with ExitStack() as stack:
        stack.enter_context(data_parallel.sync_in_backward(model))
        stack.enter_context(fsdp2.sync_in_backward(model))
        yield
