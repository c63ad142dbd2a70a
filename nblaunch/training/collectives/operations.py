"""Collectives over nested structures of tensors.

All ranks must call the same function, with tensors of the same shape and type, except for ``pad_across_processes`` and
the functions for objects. While a rank is waiting in a collective, the board shows this. In a single process,
these functions return their argument, except for ``reduce``, which returns a copy. A rank that has not joined
its job yet joins it in its first collective.

Collectives that only copy values send tensors as bytes, because process groups differ in the types they support (gloo
has no bool). All of them support bytes, and the result is exact.

If tensors differ between ranks, gloo ends the process from C++, without an exception. Over gloo, ranks therefore first
compare digests of all shapes, which is cheap there; on a GPU, every comparison would wait for the device. Whether they
compare depends only on the process group, never on a rank's data, because a rank that has no tensor, or has it on
another device, must take part in the same collectives as the others.

Objects are sent as pickles. On one machine they are signed (``wire/signing.py``). Ranks on several machines, or under
``torchrun``, share no secret, so the network must be trusted, as with torch's own object collectives.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from nblaunch import context, env, formatting
from nblaunch.errors import DistributedOperationException, warn
from nblaunch.training.collectives import nested
from nblaunch.training.joining import is_distributed, join, waiting
from nblaunch.training.options import check_choice
from nblaunch.wire import signing

_REDUCTIONS = ("sum", "mean", "max", "min")

_DIGEST_BYTES = 8  # size of the digest of a compared structure
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of an object; differs between processes
_OBJECTS = (
    "objects; if some ranks may have none, gather_for_metrics needs use_gather_object=True on all ranks"
)
_HINT = "\nCall pad_across_processes first, or use even_batches=True for loaders."
_RELEASE_TIMEOUT_S = 1.0  # much longer than a release takes

# torch 2.13 renamed this function and warns about the old name; remove this when 2.13 is the oldest supported version.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def compares_shapes() -> bool:
    """Return whether collectives first compare the shapes of tensors across ranks, whatever their device."""
    here = context.current()
    if here.compares_shapes is not None:
        return here.compares_shapes
    return bool(here.accelerator_defaults.get("debug") or env.read("ACCELERATE_DEBUG_MODE"))


def world_size() -> int:
    """Return the number of ranks in the process group, and join the group if necessary; 1 without a group."""
    return dist.get_world_size() if _joins() else 1


def rank() -> int:
    """Return the rank in the process group, and join the group if necessary; 0 without a group."""
    return dist.get_rank() if _joins() else 0


def _joins() -> bool:
    """Return whether this process is in a process group; join its job's group first if it has not joined any."""
    if not is_distributed():
        here = context.current()
        # A process with a training state has already joined: if it is in no group now, it left its group or had none.
        if here.training is None and here.topology.world_size > 1:
            join()
    return is_distributed()


def gather(tensor: Any) -> Any:
    """Concatenate every tensor in ``tensor`` across ranks along dim 0; see ``Accelerator.gather``."""
    if world_size() == 1:
        return tensor
    return _each_tensor("gather", _gather_tensor, tensor)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite every tensor in ``tensor`` with one rank's tensor, and return it; see ``Accelerator.broadcast``."""
    size = world_size()
    if not 0 <= from_process < size:
        raise ValueError(f"from_process={from_process} is not a rank; valid values are 0 to {size - 1}")
    if size == 1:
        return tensor
    return _each_tensor("broadcast", lambda leaf: _broadcast_tensor(leaf, from_process), tensor)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine every tensor in ``tensor`` across ranks, elementwise; see ``Accelerator.reduce``.

    The default of ``reduction`` is ``"mean"`` here, but ``"sum"`` in ``Accelerator.reduce``, as in Accelerate.
    """
    check_choice("reduction", reduction, _REDUCTIONS)
    if world_size() == 1:
        return _each_tensor("reduce", lambda leaf: leaf.clone() if scale == 1.0 else leaf * scale, tensor)
    return _each_tensor("reduce", lambda leaf: _reduce_tensor(leaf, reduction, scale), tensor)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad every tensor in ``tensor`` to the largest size in ``dim``; see ``Accelerator.pad_across_processes``."""
    if world_size() == 1:
        return tensor
    return _each_tensor(
        "pad_across_processes", lambda leaf: _pad_tensor(leaf, dim, pad_index, pad_first), tensor
    )


def gather_object(object: Any) -> Any:
    """Return the elements of every rank's ``object``, in rank order, as one list; see ``Accelerator.gather_object``."""
    if world_size() == 1:
        return object
    mine = _pickled(object)
    # Send two numbers, because the digests that ranks compare before they gather tensors have 8 bytes. The
    # different size then reveals a rank that gathers tensors instead.
    sizes = _all_gather_bytes(torch.tensor([mine.numel(), 0])).view(torch.int64)[::2].tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    received = _all_gather_bytes(padded).cpu().reshape(world_size(), -1)
    parts = [_unpickled(row[:size]) for row, size in zip(received, sizes, strict=True)]
    return [item for part in parts for item in part]


def check_that_all_have_objects() -> None:
    """Raise an error on every rank if only some gather objects for metrics; do nothing if ranks do not compare data."""
    if _compares_first():
        _check_alike("gather", _OBJECTS)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the elements of ``object_list`` in place with rank ``from_process``'s elements, and return the list."""
    if world_size() == 1:
        return object_list
    is_sender = rank() == from_process
    sent = _pickled(list(object_list)) if is_sender else torch.empty(0, dtype=torch.uint8)
    size = _broadcast_tensor(torch.tensor([sent.numel()]), from_process)
    if not is_sender:
        sent = torch.empty(int(size), dtype=torch.uint8)
    _broadcast_tensor(sent, from_process)
    if not is_sender:
        object_list[:] = _unpickled(sent)
    return object_list


def broadcast_nested(data: Any, from_process: int = 0, device: torch.device | None = None) -> Any:
    """Return rank ``from_process``'s nested data; other ranks need not know its structure.

    Structure and objects are pickled. Tensors are sent as they are; receivers get them on ``device``, or on the CPU if
    it is None.
    """
    if world_size() == 1:
        return data
    (structure,) = broadcast_object_list([nested.get_data_structure(data)], from_process)
    if rank() != from_process:
        data = nested.initialize_tensors(structure, device)
    for leaf in nested.leaves(data):
        if isinstance(leaf, torch.Tensor):
            _broadcast_tensor(leaf, from_process)
    return data


def broadcast_alike(tensor: torch.Tensor) -> torch.Tensor:
    """Broadcast one contiguous tensor from rank 0; its shape and type are known to be equal on all ranks."""
    return _broadcast_tensor(tensor, 0) if world_size() > 1 else tensor


def _each_tensor(operation: str, function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    if operation != "broadcast":
        nested.check_independent(operation, data)
    if _compares_first():
        _check_alike(operation, _describe(operation, data))

    def checked(leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{operation} works on tensors in lists, tuples and dicts, but found "
                f"{formatting.kind(leaf)}: {leaf!r:.80}"
            )
        return function(leaf)

    return nested.map_leaves(checked, data)


def _compares_first() -> bool:
    """Return whether ranks compare their data before they exchange it; the answer is the same on all ranks.

    They do so if gloo exchanges CPU tensors, even if another backend exchanges device tensors.
    """
    if world_size() == 1:
        return False
    return compares_shapes() or _transport_device(torch.device("cpu")).type == "cpu"


def _check_alike(operation: str, described: str) -> None:
    """Raise an error on every rank if ``described`` differs between ranks."""
    mine = hashlib.blake2b(described.encode(), digest_size=_DIGEST_BYTES).digest()
    digests = _all_gather_bytes(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    if bytes(digests.cpu().numpy()) == mine * world_size():
        return
    listing = "".join(
        f"\n  rank {rank}: {description}" for rank, description in enumerate(gather_object([described]))
    )
    hint = "" if operation == "pad_across_processes" else _HINT
    raise DistributedOperationException(
        f"{operation} got tensors that don't match across ranks:{listing}{hint}"
    )


def _describe(operation: str, data: Any) -> str:
    """Describe a structure as text that must be equal on all ranks. Lists and tuples count as equal.

    For padding, sizes may differ, but types and the number of dimensions may not.
    """
    if isinstance(data, torch.Tensor):
        if operation == "pad_across_processes":
            return f"{data.ndim} dimensions {data.dtype}"
        is_row = operation == "gather" and data.ndim == 0
        return f"{[1] if is_row else list(data.shape)} {data.dtype}"
    parts = nested.children(data)
    if parts is None:
        return type(data).__name__
    described = [_describe(operation, part) for part in parts]
    if not isinstance(data, Mapping):
        return f"[{', '.join(described)}]"
    items = [
        f"{_ADDRESS.sub('', str(key))}: {text}" for key, text in zip(data.keys(), described, strict=True)
    ]
    return f"{{{', '.join(items)}}}"


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(signing.dump(value, context.current().key)), dtype=torch.uint8)


def _unpickled(row: torch.Tensor) -> Any:
    # Arbitrary objects need pickle, as in torch's all_gather_object. The bytes come from a rank, over one of the
    # process group's connections, which opened when the rank joined; they are never in the store, where others could
    # replace them.
    return signing.load(bytes(row.numpy()), context.current().key)


def _wait_until_released(*tensors: torch.Tensor) -> None:
    """Wait until the process group's threads have released temporary tensors.

    They do so shortly after the collective has returned. The last thread to release a tensor that Python has seen needs
    the interpreter's lock, but the call that destroys a group holds that lock while it waits for the group's threads. A
    script that ends right after a collective would wait forever (in torch 2.13, ``ProcessGroupGloo`` is destroyed while
    the lock is held).
    """
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return  # device groups keep tensors until the device has finished, and are destroyed without the lock
    untyped: tuple[Any, ...] = tensors  # torch's stubs don't know _use_count
    deadline = time.monotonic() + _RELEASE_TIMEOUT_S
    while any(tensor._use_count() > 1 for tensor in untyped) and time.monotonic() < deadline:
        time.sleep(0)  # releases the lock


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as flat bytes; copy it only if the process group needs it elsewhere."""
    # Move first, because a device may not be able to view its memory as bytes.
    return tensor.detach().to(_transport_device(tensor.device)).reshape(-1).view(torch.uint8)


def _transport_device(device: torch.device) -> torch.device:
    """Return where a tensor must be for the process group to send it: the CPU for gloo, a device for others.

    A group may have both: ``cpu:gloo,tpu:tpu_dist``.
    """
    kind, backend = dist.get_backend(), context.current().backend
    if kind == "gloo":
        return torch.device("cpu")
    if "cpu:gloo" in kind.split(",") and (device.type == "cpu" or backend.exchanges_on_host):
        return torch.device("cpu")
    return device if device.type != "cpu" else torch.device(backend.device_type)


def _all_gather_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the bytes of a contiguous tensor from every rank, in rank order, into one flat tensor."""
    sent = _as_bytes(tensor)
    received = torch.empty(sent.numel() * world_size(), dtype=torch.uint8, device=sent.device)
    with waiting():
        _all_gather_flat(received, sent)
        _wait_until_released(received, sent)
    return received


def _gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    rows = (tensor.reshape(1) if tensor.ndim == 0 else tensor).contiguous()
    received = _all_gather_bytes(rows)
    shape = (rows.shape[0] * world_size(), *rows.shape[1:])
    return received.view(tensor.dtype).reshape(shape).to(tensor.device)


def _broadcast_tensor(tensor: torch.Tensor, from_process: int) -> torch.Tensor:
    dense = tensor.detach().contiguous()
    sent = _as_bytes(dense)
    with waiting():
        dist.broadcast(sent, src=from_process)
        _wait_until_released(sent)
    # If the tensor is not contiguous, or is on another device, the group sent a copy.
    if sent.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(sent.view(tensor.dtype).reshape(tensor.shape))
    return tensor


def _reduce_tensor(tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
    combined = tensor.detach().to(_transport_device(tensor.device), copy=True).contiguous()
    operation = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(reduction, dist.ReduceOp.SUM)
    with waiting():
        dist.all_reduce(combined, op=operation)
        _wait_until_released(combined)
    combined = combined.to(tensor.device)
    if reduction == "mean":
        combined = combined / world_size()
    return combined if scale == 1.0 else combined * scale


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was left unchanged, because its rows have different sizes."""


def _pad_tensor(tensor: torch.Tensor, dim: int, pad_index: float, pad_first: bool) -> torch.Tensor:
    if tensor.is_nested:
        warn(
            "pad_across_processes does not pad nested tensors; use torch.nested.to_padded_tensor first",
            CannotPadNestedTensorWarning,
        )
        return tensor
    if not -tensor.ndim <= dim < tensor.ndim:
        return tensor
    dim %= tensor.ndim
    sizes = _gather_tensor(torch.tensor([tensor.shape[dim]], device=tensor.device))
    missing = int(sizes.max()) - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = [*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]]
    padding = tensor.new_full(shape, pad_index)
    return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim=dim)
