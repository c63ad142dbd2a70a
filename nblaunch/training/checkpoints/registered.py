"""States of registered objects, such as averaged weights or a sample buffer, in a checkpoint.

    custom_checkpoint_<i>.pkl            rank 0's state, with sharded tensors in full
    custom_checkpoint_<i>_rank<r>.pkl    rank r's state without shards, if it differs from rank 0's

Ranks compare their states when they save together. Any number of ranks can load a state that is the same on all ranks,
or that is sharded. If the states differ, each belongs to one rank, and only the same number of ranks can load them.

Ranks do not compare a module's buffers, because replicas keep their own batch normalisation statistics. Checkpoints
contain rank 0's buffers, as they do for prepared models.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nblaunch import formatting
from nblaunch.errors import CheckpointError
from nblaunch.training.checkpoints import files
from nblaunch.training.checkpoints.files import Manifest
from nblaunch.training.checkpoints.save_round import Coordinator, Participant
from nblaunch.training.collectives import dtensor, nested
from nblaunch.training.strategies.dtensor_strategy import load_by_places
from nblaunch.training.strategies.replicated import checksum
from nblaunch.weights import is_sharded, versions_of, with_versions

Places = dict[str, list[int | None]]
"""Position of a leaf in a nested state -> for each mesh dimension, the tensor dimension that it shards, or None."""


@dataclass(eq=False)
class Registered:
    """An object that checkpoints include.

    Args:
        obj: an object with ``state_dict`` and ``load_state_dict``.
        per_rank: whether to save each rank's state separately; None: only if the states differ.
    """

    obj: Any
    per_rank: bool | None = None


def as_bytes(state: Any) -> bytes:
    """Return a state as the contents of a file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


# --- saving -----------------------------------------------------------------------------------------------------------


def capture(
    registered: Sequence[Registered], rank: int, side: Coordinator | Participant | None
) -> tuple[dict[str, bytes], dict[str, Places]]:
    """Return the registered objects' states that this rank writes.

    Args:
        registered: the objects.
        rank: this process's rank.
        side: this rank's side of the round in which ranks save together; None: this process saves alone.

    Returns:
        File contents by file name, and the places of sharded leaves by the name of rank 0's file.

    Raises:
        CheckpointError: a state can't be saved completely. Raised on all ranks.
    """
    contents: dict[str, bytes] = {}
    all_places: dict[str, Places] = {}
    if isinstance(side, Participant) and not side.compares:  # rank 0 has no registered objects
        return contents, all_places
    states = [entry.obj.state_dict() for entry in registered]
    can_gather = side is not None and side.is_complete
    looks: list[str] = []
    main: Sequence[str] = ()
    if side is not None and (registered or rank != 0):
        looks = [_look(entry.obj, state) for entry, state in zip(registered, states, strict=True)]
        main = _main_looks(side, looks)
    for index, (entry, state) in enumerate(zip(registered, states, strict=True)):
        name = files.custom(index)
        shards = {number: leaf for number, leaf in enumerate(nested.leaves(state)) if is_sharded(leaf)}
        if shards:
            if not can_gather and dtensor.num_sharded(state):
                raise CheckpointError(
                    f"the state of the registered {type(entry.obj).__name__} has sharded tensors; call save_state on "
                    "all ranks, without main_process_only"
                )
            all_places[name] = {str(number): dtensor.dimensions(leaf) for number, leaf in shards.items()}
            state = _like(state, dtensor.gather(state, keep=rank == 0))
        if rank == 0:
            # Convert the state to bytes immediately: a user's object may hold anything, so copying it is
            # unsafe.
            contents[name] = as_bytes(state)
        elif _is_own(entry, looks[index], main[index : index + 1]):
            contents[files.custom(index, rank)] = as_bytes(state)
    return contents, all_places


def _main_looks(side: Coordinator | Participant, looks: Sequence[str]) -> Sequence[str]:
    """Return the fingerprints of rank 0's states; raise CheckpointError on all ranks if shards don't match."""
    if isinstance(side, Participant):
        return side.compare_states(looks)
    shapes_here = [_shapes(look) for look in looks]
    for rank, theirs in side.states_of_others().items():
        shapes = [_shapes(look) for look in theirs]
        if shapes_here != shapes and any(shapes_here + shapes):
            raise CheckpointError(
                f"the registered objects on rank {rank} and rank 0 hold shards of different tensors: "
                f"{shapes!r:.200} and {shapes_here!r:.200}. Register the same objects, in the same order, on all ranks"
            )
    side.publish_states(looks)
    return looks


def _is_own(entry: Registered, look: str, main: Sequence[str]) -> bool:
    """Return whether this rank writes its own state, given the fingerprint of rank 0's state, if any."""
    return entry.per_rank is not False and (bool(entry.per_rank) or [look] != list(main))


def _like(state: Any, mapped: Any) -> Any:
    """Return ``mapped``, a copy of ``state``, with the module versions that ``state`` carries."""
    versions = versions_of(state) if isinstance(state, Mapping) else None
    return mapped if versions is None else with_versions(mapped, versions)


def _look(obj: Any, state: Any) -> str:
    """Return a state's fingerprint, which ranks compare: a checksum of all but the shards, and the shards' full shapes.

    Raises:
        CheckpointError: shards are hidden in objects, where they can't be gathered.
    """
    shapes = [tuple(leaf.shape) for leaf in nested.leaves(state) if is_sharded(leaf)]
    compared = state
    if isinstance(obj, nn.Module) and isinstance(state, Mapping):
        buffers = dict(obj.named_buffers())
        compared = {name: value for name, value in state.items() if name not in buffers}
    value, num_shards = _summed_up(compared)
    if num_shards > len(shapes):
        raise CheckpointError(
            f"the state of the registered {type(obj).__name__} has sharded tensors inside other objects, where "
            "they can't be gathered. Return them in dicts, lists or tuples from state_dict()"
        )
    return f"{value:08x} {' '.join('x'.join(map(str, shape)) or 'scalar' for shape in shapes)}"


def _shapes(look: str) -> str:
    return look.partition(" ")[2]


def _summed_up(state: Any) -> tuple[int, int]:
    """Return a checksum of a state without its shards, and the number of shards."""
    try:
        return _Sum(is_by_value=True).of(state)
    except (ValueError, RecursionError):  # the state contains itself
        return _Sum(is_by_value=False).of(state)


class _Sum(pickle.Pickler):
    """Computes the checksum of a pickle without storing the pickle.

    Args:
        is_by_value: ignore whether equal parts are the same object.
    """

    def __init__(self, is_by_value: bool) -> None:
        super().__init__(self, protocol=4)  # this object serves as the file: the pickler only calls write()
        self.fast = is_by_value
        self._value = 0
        self._shards: set[int] = set()

    def of(self, state: Any) -> tuple[int, int]:
        self.dump(state)
        return self._value, len(self._shards)

    def write(self, data: Any) -> int:
        self._value = zlib.crc32(data, self._value)
        return len(data)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, (set, frozenset)):  # their iteration order differs between processes
            return "set", sorted(_summed_up(item) for item in obj)
        if not isinstance(obj, torch.Tensor):
            return None
        if is_sharded(obj):
            self._shards.add(id(obj))
            return "shard"
        return str(obj.dtype), tuple(obj.shape), _checksum(obj.detach())


def _checksum(tensor: torch.Tensor) -> int:
    try:
        return checksum(tensor.cpu())
    except (RuntimeError, TypeError, NotImplementedError):  # a sparse tensor, or one with another layout
        return zlib.crc32(as_bytes(tensor))


# --- loading ----------------------------------------------------------------------------------------------------------


def own_file(
    entry: Registered, index: int, manifest: Manifest | None, rank: int, world_size: int
) -> str | None:
    """Return the name of the file with this rank's own state of object ``index``; None if all ranks use rank 0's.

    Raises:
        CheckpointError: a different number of ranks wrote states that differ between ranks.
    """
    if manifest is None or entry.per_rank is False:
        return None
    others = [
        other for other in range(1, manifest.world_size) if files.custom(index, other) in manifest.files
    ]
    if others and manifest.world_size != world_size:
        raise CheckpointError(
            f"registered object {index}, {formatting.kind(entry.obj)}, had a different state on "
            f"{formatting.ranks(others)} than on rank 0 when {manifest.world_size} processes saved it, and "
            f"{world_size} processes can't share these states. Start {manifest.world_size} processes, or "
            "give all ranks rank 0's state: register_for_checkpointing(obj, per_rank=False)"
        )
    return files.custom(index, rank) if rank in others else None


def with_shards(rest: Any, main: Any, places: Places) -> Any:
    """Return a rank's own state, with rank 0's full tensors instead of shards."""
    if not places:
        return rest
    full = list(nested.leaves(main))
    numbers = iter(range(len(full)))

    def put(leaf: Any) -> Any:
        number = next(numbers)
        return full[number] if str(number) in places else leaf

    return _like(rest, nested.map_leaves(put, rest))


def load(obj: Any, state: Any, places: Places, models: Sequence[nn.Module]) -> None:
    """Load a state with full tensors into an object, sharding tensors that the object holds in shards.

    Args:
        obj: the object; its own state shows which tensors are sharded.
        state: the state from the checkpoint.
        places: places of sharded leaves, for tensors that the object does not have yet.
        models: the prepared models, whose shards determine the mesh for such leaves.
    """
    shards = [parameter for model in models for parameter in model.parameters() if is_sharded(parameter)]
    if not shards and not places:
        obj.load_state_dict(state)
        return
    if isinstance(obj, torch.optim.Optimizer):  # its own state may be empty before the first step
        load_by_places(obj, state)
        return
    counterparts = _counterparts(state, obj.state_dict())
    numbers = iter(range(1 << 62))

    def place(leaf: Any) -> Any:
        number, like = next(numbers), next(counterparts)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if like is None and str(number) in places:
            return dtensor.shard_along(leaf, places[str(number)], shards)
        return dtensor.shard_like(leaf, like)

    obj.load_state_dict(_like(state, nested.map_leaves(place, state)))


def _counterparts(state: Any, other: Any) -> Iterator[Any]:
    """Yield, for each leaf of ``state``, the leaf at the same place in ``other``; None if there is none."""
    parts, its_parts = nested.children(state), nested.children(other)
    if parts is None:
        yield other if its_parts is None else None
        return
    if isinstance(state, Mapping):
        its_parts = [other.get(key) for key in state] if isinstance(other, Mapping) else None
    elif isinstance(other, Mapping) or len(its_parts or ()) != len(parts):
        its_parts = None
    for part, its in zip(parts, its_parts or [None] * len(parts), strict=True):
        yield from _counterparts(part, its)
