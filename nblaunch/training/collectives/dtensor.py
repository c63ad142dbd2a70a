"""Converts full tensors to sharded ones (:class:`torch.distributed.tensor.DTensor`), and sharded ones to full tensors.

Every function also accepts plain tensors and returns them unchanged, so callers need no branch. The strategy decides
what is sharded, and how.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nblaunch.training.collectives import nested
from nblaunch.training.joining import waiting
from nblaunch.weights import extent, is_sharded, versions_of, with_versions

T = TypeVar("T")


def num_sharded(state: Any) -> int:
    """Return the number of tensors in a nested state that this rank holds only in part."""
    return sum(is_sharded(leaf) and not _is_full(leaf) for leaf in nested.leaves(state))


def _is_full(shard: Any) -> bool:
    sizes = shard.device_mesh.shape
    return all(size == 1 or place.is_replicate() for size, place in zip(sizes, shard.placements, strict=True))


def local(value: T) -> T:
    """Return this rank's shard of a tensor."""
    return value.to_local() if is_sharded(value) else value  # type: ignore[attr-defined]


def slice_for(shard: Any, full: torch.Tensor) -> torch.Tensor:
    """Return a view, not a copy, of the part of ``full`` that corresponds to this rank's ``shard``."""
    offset, shape = extent(shard)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        full = full.narrow(dim, start, length)
    return full


def shard_like(full: Any, like: Any) -> Any:
    """Return this rank's shard of ``full``, placed like ``like``; ``full`` itself if ``like`` is not a shard of it."""
    if not is_sharded(like) or is_sharded(full) or full.shape != like.shape:
        return full
    return with_local(like, slice_for(like, full).to(device=like.to_local().device, copy=True))


def with_local(like: Any, held: torch.Tensor, mesh: Any = None) -> Any:
    """Return a shard with the elements ``held``, for the same part of the full tensor as ``like``.

    ``held`` stays on its device. It may be in host memory even though the mesh consists of GPUs: offloaded
    weights are, and so are copies that are written to files.

    Args:
        like: a shard of the same part.
        held: the new elements.
        mesh: a mesh of the same ranks; None: the mesh of ``like``.
    """
    from torch.distributed.tensor import DTensor

    # Call the constructor, as FSDP2 does: from_local would move the elements to the mesh's devices.
    meta = like._spec.tensor_meta._replace(dtype=held.dtype)
    spec = dataclasses.replace(like._spec, mesh=mesh or like.device_mesh, tensor_meta=meta)
    return DTensor(held, spec, requires_grad=False)


def dimensions(shard: Any) -> list[int | None]:
    """Return, for each mesh dimension, the tensor dimension that it shards; None for a dimension with replicas."""
    return [place.dim if hasattr(place, "dim") else None for place in shard.placements]


def shard_along(full: torch.Tensor, dims: Sequence[int | None], others: Sequence[Any]) -> Any:
    """Return this rank's shard of ``full`` along ``dims``, which :func:`dimensions` returned.

    Args:
        full: the full tensor, which is equal on all ranks.
        dims: one entry for each dimension of a mesh.
        others: shards of other tensors. The result uses the first of their meshes that has as many dimensions as
            ``dims`` has entries; if there is none, the result is ``full``.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    like = next((other for other in others if other.device_mesh.ndim == len(dims)), None)
    if like is None:
        return full
    places = [Replicate() if dim is None else Shard(dim) for dim in dims]
    with waiting():
        return distribute_tensor(full.to(local(like).device), like.device_mesh, places)


def shard_state_dict(full: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Apply :func:`shard_like` to every tensor in a state dict, with the tensor of that name in ``like``."""
    return {
        name: shard_like(value, like.get(name)) if isinstance(value, torch.Tensor) else value
        for name, value in full.items()
    }


def gather(state: Any, keep: bool) -> Any:
    """Return a nested state with full tensors, on the CPU. All ranks must call it with states of the same structure.

    With ``keep=False``, this rank only contributes, and gets None for each sharded tensor.
    """

    def full(leaf: Any) -> Any:
        if is_sharded(leaf):
            whole = _exchangeable(leaf.detach()).full_tensor()
            return whole.cpu() if keep else None
        # Tensors that every rank has in full (buffers, unsharded layers) go to the same place as the gathered ones.
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().cpu() if keep and not leaf.is_meta else leaf.detach()
        return leaf

    return nested.map_leaves(full, state)


def _exchangeable(shard: Any) -> Any:
    """Return a shard on a device where ranks can exchange it: an offloaded shard on a GPU mesh is in host memory.

    Ranks that share a GPU communicate over gloo, and torch 2.11 crashes when it gathers GPU tensors over gloo.
    """
    held, mesh = shard.to_local(), shard.device_mesh
    if mesh.device_type != "cpu" and dist.get_backend(mesh.get_group(0)) == "gloo":
        return with_local(shard, held.cpu(), _on_cpu(mesh))
    return shard if held.device.type == mesh.device_type else with_local(shard, held.to(mesh.device_type))


def _on_cpu(mesh: Any) -> Any:
    """Return a mesh of the same ranks and groups, for tensors in host memory."""
    from torch.distributed.device_mesh import DeviceMesh

    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], "cpu")
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)


def gather_weights(module: torch.nn.Module, keep: bool) -> dict[str, Any]:
    """Return a module's full weights, like :func:`gather`. Tied weights are one tensor under all their names."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    twins = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    state = module.state_dict()
    full = gather({name: value for name, value in state.items() if twins.get(name, name) == name}, keep)
    return with_versions({name: full[twins.get(name, name)] for name in state}, versions_of(state))


def total_norm(tensors: Sequence[Any], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of shards and full tensors, treated as one vector.

    This is a collective over the ranks that shard the same tensors. The norm is computed in at least single
    precision: in 16 bits, squares of norms overflow, and their sums are inexact.

    Args:
        norm_type: the p of the norm; infinity for the largest element.
        device: device on which ranks can exchange numbers.
    """
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        tensor = summed(tensor)
        key = (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None
        kinds.setdefault(key, []).append(local(tensor))
    norms = []
    for key, held in kinds.items():
        norm = _norm(held, norm_type, device)
        norms.append(norm if key is None else _norm_over(key[0], key[1], norm, norm_type))
    return _norm(norms, norm_type, device)


def summed(gradient: Any) -> Any:
    """Return the sum of a gradient whose summands are on different ranks; return other gradients unchanged."""
    if not (is_sharded(gradient) and any(place.is_partial() for place in gradient.placements)):
        return gradient
    from torch.distributed.tensor import Replicate

    places = [Replicate() if place.is_partial() else place for place in gradient.placements]
    return gradient.redistribute(placements=places)


def _norm(tensors: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    # A rank without elements must exchange a number of the same type as the other ranks do.
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    parts = [
        tensor if tensor.dtype == dtype else torch.linalg.vector_norm(tensor, norm_type, dtype=dtype)
        for tensor in tensors
        if tensor.numel()
    ]
    if not parts:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.nn.utils.get_total_norm(parts, norm_type).to(device)


def _norm_over(mesh: Any, placements: Sequence[Any], norm: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm over all shards, given the norm of this rank's shards."""
    largest = norm_type == float("inf")
    for mesh_dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        reduced = norm if largest else norm**norm_type
        with waiting():
            dist.all_reduce(
                reduced, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, mesh.get_group(mesh_dim)
            )
        norm = reduced if largest else reduced ** (1.0 / norm_type)
    return norm
