"""Ranks with unequal numbers of batches: ranks that run out of data join the other ranks' steps, then catch up.

    rank 0   step  step  step  step      ──> state of optimizers, schedules and windows
    rank 1   step  step  (zeros)(zeros)  <── gets the same state

torch's ``Join`` contributes zero gradients for a rank without data, and sends it the final weights. It does not step
the optimizer on that rank, so momentum, learning rates and scales would differ between ranks. :func:`_catch_up` copies
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable

from nblaunch.errors import warn
from nblaunch.training.collectives import operations
from nblaunch.training.data.sharding import BatchSamplerShard
from nblaunch.training.models import bare_module
from nblaunch.training.prepare import Preparer


@contextmanager
def join_uneven_inputs(
    preparer: Preparer, joinables: Iterable[Any], even_batches: bool | None
) -> Iterator[None]:
    """Allow unequal numbers of batches in the block; see ``Accelerator.join_uneven_inputs``."""
    joined = list(joinables)
    with ExitStack() as stack:
        if even_batches is not None and preparer.shared.process.topology.world_size > 1:
            stack.enter_context(_even_batches(preparer.loaders, even_batches))
        stack.enter_context(preparer.accumulation.joining())
        ending = stack.enter_context(preparer.strategy.join_uneven_inputs(joined))
        yield
    if ending is not None:
        _catch_up(preparer, joined, ending.is_last)


@contextmanager
def _even_batches(loaders: Sequence[Any], even_batches: bool) -> Iterator[None]:
    """Override ``even_batches`` during the block, in the shards of ``loaders``."""
    shards = [loader.shard for loader in loaders if isinstance(loader.shard, BatchSamplerShard)]
    if len(shards) < len(loaders):
        warn(
            f"join_uneven_inputs(even_batches={even_batches}) is supported only for map-style datasets that every "
            f"rank reads itself; {len(loaders) - len(shards)} of the {len(loaders)} prepared loaders are different "
            "and keep their setting"
        )
    before = [shard.even_batches for shard in shards]
    try:
        for shard in shards:
            shard.even_batches = even_batches
        yield
    finally:
        for shard, setting in zip(shards, before, strict=True):
            shard.even_batches = setting


def _catch_up(preparer: Preparer, joined: Sequence[Any], is_last: bool) -> None:
    """Copy the state from a rank that took all steps to the ranks that ran out of data. This is a collective.

    Args:
        preparer: the Accelerator's preparer.
        joined: the models and optimizers joined in the block.
        is_last: whether this rank took all steps.
    """
    are_last = operations.gather_object([is_last])
    if all(are_last):
        return
    source = are_last.index(True)
    modules = [bare_module(each) for each in joined if isinstance(each, torch.nn.Module)]
    parameters = {id(parameter) for module in modules for parameter in module.parameters()}
    optimizers = [each for each in preparer.optimizers if each.has_any(parameters)]
    # A Joinable optimizer shards its state across ranks, and joins the ranks itself.
    whole = [each for each in optimizers if not isinstance(each.optimizer, Joinable)]
    schedulers = [
        scheduler
        for scheduler in preparer.schedulers
        if any(each is optimizer for each in scheduler.optimizers for optimizer in optimizers)
    ]
    scaler = preparer.precision.scaler
    scalers = [scaler] if scaler is not None and scaler.is_enabled() else []
    holders: list[Any] = [*whole, *schedulers, *scalers, preparer.accumulation]
    for stateful in holders:
        state = operations.broadcast_nested(stateful.state_dict(), source)
        if not is_last:
            stateful.load_state_dict(state)
