"""Sharded weights, which each rank sends shard by shard.

    rank 0   ── TensorShard ──┐
    rank 1   ── TensorShard ──┼──> ShardedTensor ── copied shard by shard ──> the launcher's full tensor
    rank 2   ── TensorShard ──┘

The shards come from :class:`torch.distributed.tensor.DTensor` and DeepSpeed. This module also has the functions that
recognise sharded tensors and models.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nblaunch.topology import Topology


@dataclass(frozen=True)
class TensorShard:
    """A rank's shard of a tensor: a rectangular block, or a range of its elements in order.

    Args:
        shape: shape of the full tensor.
        offset: where the shard begins, one number per dimension.
        data: the elements of the shard, on the CPU; may be empty.
        is_flat: whether ``offset`` and ``data`` refer to the tensor as one row of elements.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Any
    is_flat: bool = False


@dataclass(frozen=True)
class ShardedTensor:
    """The shards of one tensor, which don't overlap. Has the shape and size of the full tensor, but not its values.

    Args:
        shards: at least one.
    """

    shards: Sequence[TensorShard]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return self.shards[0].shape

    def numel(self) -> int:
        """Return the number of elements of the full tensor."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Return the size of an element in bytes."""
        return int(self.shards[0].data.element_size())

    @property
    def num_missing(self) -> int:
        """The number of elements that no shard contains."""
        return self.numel() - sum(int(shard.data.numel()) for shard in self.shards)

    def put_into(self, full: Any) -> None:
        """Copy every shard into ``full``, a tensor of this shape."""
        if any(shard.is_flat for shard in self.shards) and not full.is_contiguous():
            full.copy_(self.assembled())
            return
        for shard in self.shards:
            target = full.view(-1) if shard.is_flat else full
            for dim, (start, length) in enumerate(zip(shard.offset, shard.data.shape, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(shard.data)

    def assembled(self) -> Any:
        """Return the full tensor in new memory."""
        full = self.shards[0].data.new_empty(self.shape)
        self.put_into(full)
        return full


def is_sharded(value: Any) -> bool:
    """Return whether ``value`` is a sharded tensor, with one shard on this rank."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # if it is not imported, no DTensor exists
    return module is not None and isinstance(value, module.DTensor)


def is_sharded_model(model: Any) -> bool:
    """Return whether this rank holds shards of ``model``'s parameters that FSDP has not gathered at the moment."""
    return any(map(is_sharded, model.parameters()))


def is_fsdp_module(module: Any) -> bool:
    """Return whether ``fully_shard`` was applied to ``module``."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, FSDP was never applied
    return isinstance(module, getattr(fsdp, "FSDPModule", ()))  # torch 2.6 and later


def is_fsdp1_module(module: Any) -> bool:
    """Return whether ``module`` is an FSDP version 1 wrapper that shards; on a single rank, it does not shard."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return (
        fsdp is not None
        and isinstance(module, fsdp.FullyShardedDataParallel)
        and module.sharding_strategy is not fsdp.ShardingStrategy.NO_SHARD
    )


def extent(shard: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the position of a shard in the full tensor: its offset and its shape, each with one number per dimension.
    The arithmetic is torch's own, which also handles shards of shards, as in FSDP2 over tensor parallelism.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # has no public name

    shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    return tuple(offset), tuple(shape)


def shards_to_send(state: Mapping[str, Any], topology: Topology, is_main: bool) -> dict[str, Any]:
    """Return the weights of a module that this rank sends: its shards, and on the main rank also unsharded tensors.

    No rank waits for another. If several ranks of a machine hold the same shard, one of them sends it.

    Args:
        state: a state dict of the parameters themselves (``keep_vars=True``); DeepSpeed attaches its shards to
            parameters.
        topology: topology of this rank.
        is_main: whether this rank sends unsharded tensors.
    """
    first = topology.rank - topology.local_rank
    machine = range(first, first + topology.local_world_size)
    sent: dict[str, Any] = {}
    for name, value in state.items():
        if is_sharded(value):
            offset, _ = extent(value)
            if _is_first_holder(value, topology.rank, machine):
                sent[name] = TensorShard(tuple(value.shape), offset, value.to_local().detach().cpu())
        elif hasattr(value, "ds_id"):
            sent[name] = _deepspeed_shard(value)
        elif is_main:
            sent[name] = value.detach() if hasattr(value, "detach") else value
    return sent


def _deepspeed_shard(parameter: Any) -> TensorShard:
    """Return this rank's shard of a parameter that DeepSpeed has sharded, without the padding."""
    shard = parameter.ds_tensor.detach().reshape(-1)
    # Ask the group: end_training() has left the default group, which torch.distributed needs to find the rank.
    start = min(parameter.ds_process_group.rank() * shard.numel(), parameter.ds_numel)
    length = min(shard.numel(), parameter.ds_numel - start)
    return TensorShard(tuple(parameter.ds_shape), (start,), shard[:length].to("cpu", copy=True), is_flat=True)


def _is_first_holder(shard: Any, rank: int, machine: range) -> bool:
    """Return whether no lower rank on this machine holds the same shard.

    A lower rank that holds it comes earlier in the shard's mesh, or belongs to another mesh of the same shape: with
    tensor parallelism, some tensors are sharded separately in each replica. The mesh with the machine's first rank
    counts as the first.
    """
    mesh = shard.device_mesh
    at = tuple(
        slice(None) if placement.is_replicate() else index
        for placement, index in zip(shard.placements, mesh.get_coordinate(), strict=True)
    )
    holders = [holder for holder in mesh.mesh[at].reshape(-1).tolist() if holder in machine]
    return bool((mesh.mesh == machine.start).any()) and min(holders) == rank
