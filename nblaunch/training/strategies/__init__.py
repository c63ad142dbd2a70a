"""Ways to spread a model over processes: one file each. See ``base.py`` for what a strategy has to say."""

from __future__ import annotations

from nblaunch.training.options import DistributedDataParallelKwargs
from nblaunch.training.process import Member
from nblaunch.training.strategies.base import Strategy, unwrap
from nblaunch.training.strategies.ddp import DdpStrategy, sync_in_backward
from nblaunch.training.strategies.replicated import ReplicatedStrategy
from nblaunch.training.strategies.single import SingleStrategy

__all__ = ["Strategy", "choose", "sync_in_backward", "unwrap"]


def choose(member: Member, ddp: DistributedDataParallelKwargs | None = None) -> Strategy:
    """The strategy for a job of this size."""
    if member.topology.world_size == 1:
        return SingleStrategy()
    return ReplicatedStrategy() if member.backend.reduces_gradients else DdpStrategy(ddp)
