"""Weights that are not sent as plain tensors: sharded ones are sent shard by shard, quantised ones not at all.

How both are recognised is here, too. Sharded weights are of :class:`torch.distributed.tensor.DTensor` and of DeepSpeed:

    rank 0   ── TensorShard ──┐
    rank 1   ── TensorShard ──┼──> ShardedTensor ── copied shard by shard ──> the launcher's own tensor
    rank 2   ── TensorShard ──┘

Quantised weights are frozen numbers of few bits, which a library keeps in a form of its own:

    bitsandbytes  a subclass of ``Parameter`` that its scales hang on; they are entries of the state dict as well, which
                  a 4-bit module can't load, and an 8-bit module can't after its first forward
    torchao       a ``Parameter`` whose tensor is of a subclass

No optimizer changes them, so workers do not send them: the model that loads the trained weights has them already.
GPTQ, AWQ and the like keep integers in ordinary buffers, and need no special treatment.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_QUANTISED_MARKS = ("quant_state", "has_fp16_weights")  # of bitsandbytes' parameters: 4-bit, 8-bit


@dataclass(frozen=True)
class TensorShard:
    """A rank's shard of a tensor: a rectangular block of it, or a stretch of its elements in order.

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
        """Return the bytes of an element."""
        return int(self.shards[0].data.element_size())

    @property
    def num_missing(self) -> int:
        """How many elements are in none of the shards."""
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
        """Return the full tensor, in memory of its own."""
        full = self.shards[0].data.new_empty(self.shape)
        self.put_into(full)
        return full


def versions_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the versions of modules that torch keeps beside the entries of a state dict; None where there are none.

    Modules look at them when they load it. A plain copy of the dict loses them.
    """
    return getattr(state, "_metadata", None)


def with_versions(entries: Mapping[str, Any], versions: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a state dict of ``entries`` with what :func:`versions_of` returned for another of the same modules."""
    state: OrderedDict[str, Any] = OrderedDict(entries)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    return state


def special_prefixes(module: Any) -> Iterator[str]:
    """Yield the prefixes, in a state dict, of the parts of ``module`` that may rename or reshape what they load."""
    base: Any = sys.modules["torch"].nn.Module
    for name, part in module.named_modules():
        if (
            type(part)._load_from_state_dict is not base._load_from_state_dict
            or type(part).load_state_dict is not base.load_state_dict
            or not all(
                getattr(hook, "keeps_names_and_shapes", False)
                for hook in part._load_state_dict_pre_hooks.values()
            )
        ):
            yield f"{name}." if name else ""


def shape_mismatches(
    module: Any, own: Mapping[str, Any], saved: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield the names of tensors that ``module`` can't load from ``saved``, with their shapes in the module and there.

    Parts that accept other shapes are left out: modules that load in a way of their own (such as observers of
    quantisation-aware training), parameters of lazy layers, and what ``get_extra_state()`` returns.

    Args:
        module: the module that is to load ``saved``.
        own: its state dict.
        saved: another state dict, of tensors or what stands for them.
    """
    torch: Any = sys.modules["torch"]
    special = tuple(special_prefixes(module))
    for name, value in own.items():
        if name.startswith(special) or name.endswith(torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX):
            continue
        here, there = _shape(value), _shape(saved.get(name))
        if here is not None and there is not None and here != there:
            yield name, here, there


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of what has one; None for parameters of lazy layers, which take any."""
    is_lazy = sys.modules["torch"].nn.parameter.is_lazy(value)
    return None if is_lazy or not hasattr(value, "shape") else tuple(value.shape)


def give_own_memory(module: Any) -> None:
    """Give memory of its own to each parameter and buffer whose elements share memory, as ``expand`` returns them.

    Nothing can be copied into such a tensor, neither the weights of rank 0 nor weights from a file. It stays the same
    object, under all of its names.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        if _overlaps(tensor):
            tensor.data = tensor.detach().clone(memory_format=sys.modules["torch"].contiguous_format)


def _overlaps(tensor: Any) -> bool:
    """Return whether a tensor has more elements than its memory."""
    torch: Any = sys.modules["torch"]
    is_plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    if not is_plain or torch.nn.parameter.is_lazy(tensor) or tensor.is_inference():
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return bool(sum((size - 1) * stride for size, stride in steps) + 1 < tensor.numel())


def is_sharded(value: Any) -> bool:
    """Return whether ``value`` is a tensor of which this rank holds a shard."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # without it, there is none
    return module is not None and isinstance(value, module.DTensor)


def is_sharded_model(model: Any) -> bool:
    """Return whether this rank holds shards of the parameters of ``model``, other than parameters FSDP has gathered."""
    return any(map(is_sharded, model.parameters()))


def is_fsdp_module(module: Any) -> bool:
    """Return whether ``fully_shard`` was applied to ``module``."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # without it, it was applied to none
    return isinstance(module, getattr(fsdp, "FSDPModule", ()))  # from torch 2.6 on


def is_fsdp1_module(module: Any) -> bool:
    """Return whether ``module`` is a wrapper of FSDP version 1 that shards; a single rank's wrapper does not shard."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return (
        fsdp is not None
        and isinstance(module, fsdp.FullyShardedDataParallel)
        and module.sharding_strategy is not fsdp.ShardingStrategy.NO_SHARD
    )


def extent(shard: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where a shard lies in the full tensor: its offset and its shape, one number per dimension each. By
    torch's own arithmetic, which also knows shards of shards: of FSDP2 over tensor parallelism.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # has no public name

    shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    return tuple(offset), tuple(shape)


def shards_to_send(state: Mapping[str, Any], is_local_main: bool) -> dict[str, Any]:
    """Return what this rank sends of a module's weights: its shards; the main rank also what is not sharded.

    No rank waits for another. A shard that several ranks hold is sent by one of them.

    Args:
        state: a state dict of the parameters themselves (``keep_vars=True``), on which DeepSpeed's shards hang.
        is_local_main: whether this is the first rank of its machine.
    """
    sent: dict[str, Any] = {}
    for name, value in state.items():
        if is_sharded(value):
            offset, _ = extent(value)
            if _is_first_holder(value):
                sent[name] = TensorShard(tuple(value.shape), offset, value.to_local().detach().cpu())
        elif hasattr(value, "ds_id"):
            sent[name] = _deepspeed_shard(value)
        elif is_local_main:
            sent[name] = value.detach() if hasattr(value, "detach") else value
    return sent


def _deepspeed_shard(parameter: Any) -> TensorShard:
    """Return this rank's shard of a parameter that DeepSpeed has sharded, without the padding that makes all alike."""
    shard = parameter.ds_tensor.detach().reshape(-1)
    # Asked of the group itself: end_training() has left the default one, without which torch.distributed has no ranks.
    start = min(parameter.ds_process_group.rank() * shard.numel(), parameter.ds_numel)
    length = min(shard.numel(), parameter.ds_numel - start)
    return TensorShard(tuple(parameter.ds_shape), (start,), shard[:length].to("cpu", copy=True), is_flat=True)


def _is_first_holder(shard: Any) -> bool:
    """Return whether no rank before this one holds the very same shard.

    An earlier holder is earlier in the shard's mesh, or belongs to another mesh of the same form: beside tensor
    parallelism, other tensors are sharded over the ranks of every replica alone. The mesh with rank 0 is the first.
    """
    coordinate = shard.device_mesh.get_coordinate()
    return bool((shard.device_mesh.mesh == 0).any()) and all(
        coordinate[dim] == 0 for dim, placement in enumerate(shard.placements) if placement.is_replicate()
    )


def is_quantised_weight(parameter: Any) -> bool:
    """Return whether ``parameter`` is frozen and held in the form of a library for quantised weights."""
    if parameter is None or parameter.requires_grad:
        return False
    if any(hasattr(parameter, mark) for mark in _QUANTISED_MARKS):
        return True
    return any(kind.__module__.partition(".")[0] == "torchao" for kind in type(parameter.data).__mro__)


def quantised_entries(module: Any, state: Mapping[str, Any]) -> dict[str, bool]:
    """Return the names in ``state``, a state dict of ``module``, that belong to quantised weights.

    Returns:
        Name -> whether it is a weight itself; otherwise it is what its library keeps beside it.
    """
    found: dict[str, bool] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        quantised = {name for name, parameter in owner._parameters.items() if is_quantised_weight(parameter)}
        if not quantised:
            continue
        prefix = f"{path}." if path else ""
        others = {*owner._parameters, *owner._buffers} - quantised
        children = tuple(f"{name}." for name in owner._modules)
        for name in state:
            own = name.removeprefix(prefix)
            if name.startswith(prefix) and own not in others and not own.startswith(children):
                found[name] = own in quantised
    return found
