"""Weights of a checkpoint into a module, file by file: :class:`WeightLoading`.

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
from nblaunch.wire import quantised
from nblaunch.wire.sharded_tensor import is_sharded


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


class WeightLoading:
    """Load the state dicts of one or several files into a module.

    Args:
        module: the user's own.
        source: file or index, for messages.
        device: where what is on the meta device goes.
        dtype: of what is on the meta device and of floating point; None: as the module says.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        source: Path,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._module = module
        self._source = source
        self._device = device or torch.device("cpu")
        self._dtype = dtype
        self._made: dict[
            int, torch.Tensor
        ] = {}  # by the id of what was on the meta device, which tied names share
        self._bare: list[torch.Tensor] = []  # keeps those alive, and so their ids
        self._addresses: set[int] = set()
        self._filled: set[str] = set()
        self._rest: dict[str, Any] = {}

    def add(self, weights: Mapping[str, Any]) -> None:
        """Take over what one file has; its names may begin with ``module.``.

        What has memory waits for :meth:`finish`: a module's own loading must see all of its names at once.
        """
        own = self._module.state_dict().keys()
        if weights and all(name.startswith("module.") for name in weights) and not own & weights.keys():
            weights = {name.removeprefix("module."): value for name, value in weights.items()}
        rest = dict(weights)
        self._fill_bare(rest)
        self._rest |= rest

    def finish(self, strict: bool) -> None:
        """Load the rest, once all files are added.

        Args:
            strict: names of the files and of the module must be the same.

        Raises:
            CheckpointError: shapes don't fit, quantised weights are other ones, or names differ where they must not.
        """
        own = self._module.state_dict()
        self._add_twins(self._rest, own)
        self._drop_quantised(self._rest, own)
        try:
            found = self._module.load_state_dict(dtensor.shard_state_dict(self._rest, own), strict=False)
        except RuntimeError as error:
            raise CheckpointError(f"{self._source} does not fit the model. {error}") from error
        if not strict or found is None:  # a method of the user's own may return nothing
            return
        lists = (
            ("Missing", set(found.missing_keys) - self._filled),
            ("Unexpected", set(found.unexpected_keys)),
        )
        texts = [f"{what} key(s) in state_dict: {', '.join(sorted(names))}" for what, names in lists if names]
        if texts:
            kind = type(self._module).__name__
            raise CheckpointError(f"{self._source} does not fit the {kind}. {'; '.join(texts)}")

    def _add_twins(self, weights: dict[str, Any], own: Mapping[str, Any]) -> None:
        """Add names that are tied to one in the file, which libraries write once."""
        held = {view_of(own[name])[0]: name for name in weights if isinstance(own.get(name), torch.Tensor)}
        for name in own.keys() - weights.keys():
            view = view_of(own[name])[0] if isinstance(own[name], torch.Tensor) else None
            if view is not None and view in held:
                weights[name] = weights[held[view]]

    def _drop_quantised(self, weights: dict[str, Any], own: Mapping[str, Any]) -> None:
        """Leave out what is quantised in the module. What libraries keep beside it may differ in its last digits."""
        for name, is_weight in quantised.entries_in(self._module, own).items():
            self._filled.add(name)
            saved = weights.pop(name, None)
            if is_weight and isinstance(saved, torch.Tensor) and not _is_equal(own[name], saved):
                raise CheckpointError(
                    f"{self._source} has other quantised weights than the model, in {name}. They are frozen and "
                    "are not loaded: load the base model that was trained, quantised as it was then"
                )

    def _fill_bare(self, weights: dict[str, Any]) -> None:
        """Put tensors of the file in the place of those on the meta device, and leave them out of ``weights``."""
        for name, owner, tensor in self._tensors():
            saved = weights.get(name)
            if id(tensor) not in self._made and saved is not None and _can_stand_for(saved, tensor):
                self._made[id(tensor)] = self._filled_with(tensor, saved, _loads_itself(owner))
                self._bare.append(tensor)
        for name, owner, tensor in list(self._tensors()):
            if id(tensor) not in self._made:
                continue
            held = owner._parameters if isinstance(tensor, torch.nn.Parameter) else owner._buffers
            held[name.rpartition(".")[2]] = self._made[id(tensor)]  # type: ignore[assignment]
            if not _loads_itself(owner):
                self._filled.add(name)
                weights.pop(name, None)

    def _tensors(self) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
        """Yield every parameter and buffer, under each of its names, with the module that has it."""
        for path, owner in self._module.named_modules(remove_duplicate=False):
            for held in (owner._parameters, owner._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        yield f"{path}.{name}" if path else name, owner, tensor

    def _filled_with(self, bare: torch.Tensor, saved: torch.Tensor, is_empty: bool) -> torch.Tensor:
        """Return what takes the place of a tensor without memory; ``is_empty``: its module fills it itself."""
        dtype = self._dtype if self._dtype is not None and bare.is_floating_point() else bare.dtype
        made = (
            torch.empty_like(bare, device=self._device, dtype=dtype, requires_grad=False)
            if is_empty
            else saved.to(self._device, dtype)
        )
        if made.numel() and made.data_ptr() in self._addresses:
            made = made.clone()  # one tensor under two names of the file, and two in the module
        self._addresses.add(made.data_ptr())
        is_parameter = isinstance(bare, torch.nn.Parameter)
        return torch.nn.Parameter(made, bare.requires_grad) if is_parameter else made


def _loads_itself(owner: torch.nn.Module) -> bool:
    return type(owner)._load_from_state_dict is not torch.nn.Module._load_from_state_dict


def _can_stand_for(saved: Any, tensor: torch.Tensor) -> bool:
    is_bare = tensor.is_meta and not is_sharded(tensor)
    return is_bare and isinstance(saved, torch.Tensor) and saved.shape == tensor.shape


def _is_equal(held: torch.Tensor, saved: torch.Tensor) -> bool:
    if held.shape != saved.shape or held.dtype != saved.dtype:
        return False
    return bool(torch.equal(held.detach().to(saved.device), saved))
