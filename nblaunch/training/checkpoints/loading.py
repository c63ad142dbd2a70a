"""Weights of a checkpoint into a module: :func:`load_weights`.

has memory        the module copies into it, by its own ``load_state_dict``
is on meta        the tensor of the file takes its place, converted and placed if need be; nothing is copied twice
is quantised      is compared: it is frozen, and its module may be unable to load it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nblaunch.errors import CheckpointError
from nblaunch.training.collectives import dtensor
from nblaunch.training.models import bare_module
from nblaunch.wire.weights import is_sharded, quantised_entries


def view_of(tensor: torch.Tensor) -> tuple[tuple[Any, ...] | None, int]:
    """Return what identifies the memory that a tensor shows, and the storage that this lies in; None where it has none.

    Of a sharded tensor: of this rank's shard.
    """
    tensor = dtensor.local(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        return None, 0
    if tensor.numel() == 0 or tensor.data_ptr() == 0:  # devices that don't show their memory say 0, as XLA's
        return None, 0
    view = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return view, tensor.untyped_storage().data_ptr()


def load_weights(
    model: torch.nn.Module,
    weights: Mapping[str, Any],
    source: Path,
    strict: bool = True,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Load a state dict into the module inside ``model``, also one whose names begin with ``module.``.

    Args:
        model: wrapped or not.
        weights: of all files, since a module's own loading must see all of its names at once.
        source: file or index, for messages.
        strict: names of the files and of the module must be the same.
        device: where what is on the meta device goes; None: the CPU.
        dtype: of what is on the meta device and of floating point; None: as the module says.

    Raises:
        CheckpointError: shapes don't fit, quantised weights are other ones, or names differ where they must not.
    """
    module, rest = bare_module(model), dict(weights)
    own = module.state_dict().keys()
    if rest and all(name.startswith("module.") for name in rest) and not own & rest.keys():
        rest = {name.removeprefix("module."): value for name, value in rest.items()}
    done = _fill_bare(module, rest, device or torch.device("cpu"), dtype)
    state = module.state_dict()
    _add_twins(rest, state)
    done |= _drop_quantised(module, rest, state, source)
    try:
        found = module.load_state_dict(dtensor.shard_state_dict(rest, state), strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{source} does not fit the model. {error}") from error
    if not strict or found is None:  # a method of the user's own may return nothing
        return
    lists = (("Missing", set(found.missing_keys) - done), ("Unexpected", set(found.unexpected_keys)))
    texts = [f"{what} key(s) in state_dict: {', '.join(sorted(names))}" for what, names in lists if names]
    if texts:
        raise CheckpointError(f"{source} does not fit the {type(module).__name__}. {'; '.join(texts)}")


def _add_twins(weights: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Add names that are tied to one in the files, which libraries write once."""
    held = {view_of(own[name])[0]: name for name in weights if isinstance(own.get(name), torch.Tensor)}
    for name in own.keys() - weights.keys():
        view = view_of(own[name])[0] if isinstance(own[name], torch.Tensor) else None
        if view is not None and view in held:
            weights[name] = weights[held[view]]


def _drop_quantised(
    module: torch.nn.Module, weights: dict[str, Any], own: Mapping[str, Any], source: Path
) -> set[str]:
    """Leave out what is quantised in the module, and return its names.

    What libraries keep beside quantised weights may differ in its last digits.
    """
    entries = quantised_entries(module, own)
    for name, is_weight in entries.items():
        saved = weights.pop(name, None)
        if is_weight and isinstance(saved, torch.Tensor) and not _is_equal(own[name], saved):
            raise CheckpointError(
                f"{source} has other quantised weights than the model, in {name}. They are frozen and "
                "are not loaded: load the base model that was trained, quantised as it was then"
            )
    return set(entries)


def _fill_bare(
    module: torch.nn.Module, weights: dict[str, Any], device: torch.device, dtype: torch.dtype | None
) -> set[str]:
    """Put tensors of the files in the place of those on the meta device.

    Returns:
        The names that are done, which are left out of ``weights``.
    """
    tensors = [entry for entry in _tensors(module) if entry[2].is_meta and not is_sharded(entry[2])]
    made: dict[int, torch.Tensor] = {}  # by the id of what was on the meta device, which tied names share
    addresses: set[int] = set()
    for name, owner, bare in tensors:
        saved = weights.get(name)
        if id(bare) in made or not isinstance(saved, torch.Tensor) or saved.shape != bare.shape:
            continue
        to = dtype if dtype is not None and bare.is_floating_point() else bare.dtype
        filled = (
            torch.empty_like(bare, device=device, dtype=to, requires_grad=False)
            if _loads_itself(owner)
            else saved.to(device, to)
        )
        if filled.numel() and filled.data_ptr() in addresses:
            filled = filled.clone()  # one tensor under two names of the files, and two in the module
        addresses.add(filled.data_ptr())
        is_parameter = isinstance(bare, torch.nn.Parameter)
        made[id(bare)] = torch.nn.Parameter(filled, bare.requires_grad) if is_parameter else filled
    done = set()
    for name, owner, bare in tensors:
        if id(bare) not in made:
            continue
        held = owner._parameters if isinstance(bare, torch.nn.Parameter) else owner._buffers
        held[name.rpartition(".")[2]] = made[id(bare)]  # type: ignore[assignment]
        if not _loads_itself(owner):
            done.add(name)
            weights.pop(name, None)
    return done


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """Yield every parameter and buffer, under each of its names, with the module that has it."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for held in (owner._parameters, owner._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    yield f"{path}.{name}" if path else name, owner, tensor


def _loads_itself(owner: torch.nn.Module) -> bool:
    """Return whether a module fills its tensors in a way of its own, for which they need memory."""
    return type(owner)._load_from_state_dict is not torch.nn.Module._load_from_state_dict


def _is_equal(held: torch.Tensor, saved: torch.Tensor) -> bool:
    if held.shape != saved.shape or held.dtype != saved.dtype:
        return False
    return bool(torch.equal(held.detach().to(saved.device), saved))
