"""A module's weights, as torch, its wrappers and other libraries represent them.

The launcher, which collects trained weights, and the checkpoints of a training run both use this module. It covers

    state dicts          their versions, and whether a module can load one; :func:`give_own_memory` prepares a module's
                         tensors so that values can be copied into them
    names                without the prefixes of wrappers
    quantised weights    which entries of a state dict belong to them
    sharded weights      which each rank sends shard by shard
    samples              of a module's weights, to detect training
"""

from __future__ import annotations

import math
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nblaunch.topology import Topology

_COMPILED = "_orig_mod"
_ADDED = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of names that only wrappers add: torch.compile, FSDP version 1, activation checkpointing."""

_QUANTISED_MARKS = ("quant_state", "has_fp16_weights")  # attributes of bitsandbytes' parameters: 4-bit, 8-bit


# --- state dicts ------------------------------------------------------------------------------------------------------

# :func:`shape_mismatches` and :func:`special_prefixes` predict what ``load_state_dict`` would reject, because it loads
# all entries that fit before it raises an error.


def versions_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the module versions that torch stores with a state dict; None if there are none.

    Modules read them when they load the state dict. They are lost in a plain copy of the dict.
    """
    return getattr(state, "_metadata", None)


def with_versions(entries: Mapping[str, Any], versions: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``entries`` as a state dict, with the ``versions`` from another state dict of the same modules."""
    state: OrderedDict[str, Any] = OrderedDict(entries)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    return state


def special_prefixes(module: Any) -> Iterator[str]:
    """Yield the state dict prefix of each part of ``module`` that may rename or reshape entries when it loads them."""
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
    module: Any, current: Mapping[str, Any], saved: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield the names of tensors that ``module`` can't load from ``saved``, with their shapes in both.

    Parts that accept other shapes are left out: modules with their own loading code (such as observers of
    quantisation-aware training), parameters of lazy layers, and the result of ``get_extra_state()``.

    Args:
        module: the module that will load ``saved``.
        current: state dict of the module.
        saved: another state dict, containing tensors or placeholders.
    """
    torch: Any = sys.modules["torch"]
    special = tuple(special_prefixes(module))
    for name, value in current.items():
        if name.startswith(special) or name.endswith(torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX):
            continue
        here, there = _shape(value), _shape(saved.get(name))
        if here is not None and there is not None and here != there:
            yield name, here, there


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a value; None if it has none, and for parameters of lazy layers, which accept any shape."""
    is_lazy = sys.modules["torch"].nn.parameter.is_lazy(value)
    return None if is_lazy or not hasattr(value, "shape") else tuple(value.shape)


def give_own_memory(module: Any) -> None:
    """Give each parameter and buffer whose elements share memory, for example after ``expand``, its own memory.

    Neither rank 0's weights nor weights from a file can be copied into such a tensor. The object and its names stay the
    same.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        if _overlaps(tensor):
            tensor.data = tensor.detach().clone(memory_format=sys.modules["torch"].contiguous_format)


def _overlaps(tensor: Any) -> bool:
    """Return whether a tensor has more elements than its memory holds."""
    torch: Any = sys.modules["torch"]
    is_plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    if not is_plain or torch.nn.parameter.is_lazy(tensor) or tensor.is_inference():
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return bool(sum((size - 1) * stride for size, stride in steps) + 1 < tensor.numel())


# --- names without the prefixes of wrappers ---------------------------------------------------------------------------

#     block = torch.compile(block)                  block._orig_mod.0.weight ──> block.0.weight
#     block = DistributedDataParallel(block)        block.module.0.weight    ──> block.0.weight
#
# Files and other processes use the names without wrappers. States are therefore read from and loaded into the result of
# :func:`without_wrappers_inside`, which has the same parameters under plain names.


def plain_name(name: str) -> str:
    """Return the name of a weight without the parts that wrappers add; files from other programs may contain them."""
    return _ADDED.sub("", name)


def without_wrappers_inside(module: Any) -> Any:
    """Return a module with the same tensors, in which no part is compiled or wrapped for communication.

    Modules on the way to such a part are shallow copies: they share parameters, buffers, hooks and all other attributes
    with the user's modules. If no part is compiled or wrapped, the result is ``module`` itself.
    """
    parts = {id(part) for part in module.modules() if part is not module and _inside(part) is not part}
    return _copied(module, parts, {}) if parts else module


def _copied(module: Any, wrappers: set[int], made: dict[int, Any]) -> Any:
    """Return ``module``, or a copy of it if it contains wrappers."""
    inner = module
    while id(inner) in wrappers:
        inner = _inside(inner)
    if id(inner) not in made:
        made[id(inner)] = inner  # for modules that contain themselves
        children = {name: _copied(child, wrappers, made) for name, child in _children(inner)}
        if any(child is not inner._modules[name] for name, child in children.items()):
            copy = object.__new__(type(inner))
            copy.__dict__.update(inner.__dict__)
            copy.__dict__["_modules"] = {**inner._modules, **children}
            made[id(inner)] = copy
    return made[id(inner)]


def _children(module: Any) -> Iterator[tuple[str, Any]]:
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _inside(module: Any) -> Any:
    """Return the module inside a wrapper, or the module itself if it is not a wrapper."""
    torch: Any = sys.modules["torch"]
    if _COMPILED in module._modules and type(module).__name__ == "OptimizedModule":
        return module._modules[_COMPILED]
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    return module._modules["module"] if isinstance(module, parallel) else module


# --- quantised weights: frozen low-bit numbers in a library's own format ---------------------------------------------

# bitsandbytes  a subclass of ``Parameter`` that carries its scales; the state dict lists them as well, but a 4-bit
#               module cannot load them, nor can an 8-bit module after its first forward
# torchao       a ``Parameter`` whose tensor has a subclass
#
# No optimizer changes quantised weights, so workers do not send them; the kernel's model already has them. GPTQ, AWQ
# and similar formats keep integers in ordinary buffers and need no special treatment.


def is_quantised_weight(parameter: Any) -> bool:
    """Return whether ``parameter`` is frozen and in the format of a quantisation library."""
    if parameter is None or parameter.requires_grad:
        return False
    if any(hasattr(parameter, mark) for mark in _QUANTISED_MARKS):
        return True
    return any(kind.__module__.partition(".")[0] == "torchao" for kind in type(parameter.data).__mro__)


def quantised_entries(module: Any, state: Mapping[str, Any]) -> dict[str, bool]:
    """Return the names in ``state``, a state dict of ``module``, that belong to quantised weights.

    Returns:
        Name -> whether it is the weight itself; False for the library's additional entries.
    """
    entries: dict[str, bool] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        quantised = {name for name, parameter in owner._parameters.items() if is_quantised_weight(parameter)}
        if not quantised:
            continue
        prefix = f"{path}." if path else ""
        others = {*owner._parameters, *owner._buffers} - quantised
        children = tuple(f"{name}." for name in owner._modules)
        for name in state:
            short = name.removeprefix(prefix)
            if name.startswith(prefix) and short not in others and not short.startswith(children):
                entries[name] = short in quantised
    return entries


# --- sharded weights --------------------------------------------------------------------------------------------------

#     rank 0   ── TensorShard ──┐
#     rank 1   ── TensorShard ──┼──> ShardedTensor ── copied shard by shard ──> the launcher's full tensor
#     rank 2   ── TensorShard ──┘
#
# The shards come from :class:`torch.distributed.tensor.DTensor` and DeepSpeed.


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
    The arithmetic is torch's own, which also handles shards of shards, as with FSDP2 over tensor parallelism.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # has no public name

    shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    return tuple(offset), tuple(shape)


def shards_to_send(state: Mapping[str, Any], topology: Topology, is_main: bool) -> dict[str, Any]:
    """Return the part of a module's weights that this rank sends: its shards and, on the main rank, unsharded tensors.

    No rank waits for another. If several ranks on a machine hold the same shard, one of them sends it.

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
    tensor parallelism, some tensors are sharded separately in each replica. The mesh that contains the machine's first
    rank counts as the first.
    """
    mesh = shard.device_mesh
    at = tuple(
        slice(None) if placement.is_replicate() else index
        for placement, index in zip(shard.placements, mesh.get_coordinate(), strict=True)
    )
    holders = [holder for holder in mesh.mesh[at].reshape(-1).tolist() if holder in machine]
    return bool((mesh.mesh == machine.start).any()) and min(holders) == rank


# --- samples ----------------------------------------------------------------------------------------------------------

_NUM_SAMPLED = 16  # parameters
_NUM_ELEMENTS = 4096  # of each parameter
_READABLE = ("cpu", "cuda", "xpu", "mps")
"""Devices whose tensors can be read at any time. Reading a torch_xla tensor would compile another graph."""


def trained_samples(module: Any) -> list[float]:
    """Return sums over parts of some trainable parameters; these sums differ once the module has been trained.

    They do not depend on the device. Sharded parameters are left out, because reading one is a collective.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    sums = []
    for parameter in parameters[:: max(1, len(parameters) // _NUM_SAMPLED)]:
        with suppress(Exception):  # for example, if it is not initialised yet
            if parameter.device.type in _READABLE and not is_sharded(parameter):
                part = parameter.detach().reshape(-1)[:_NUM_ELEMENTS].double().cpu()
                sums.append(part.abs().sum().item() + part.sum().item() / 3)
    return [value for value in sums if value == value]  # NaN differs from itself
