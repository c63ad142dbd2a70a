"""A snapshot of a job's state: what one checkpoint is made of, from the live objects to the files of its folder."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nblaunch.training.checkpoints import files, model_files, names, rng_states, safe_save
from nblaunch.training.checkpoints.cpu_copies import CpuCopies
from nblaunch.training.checkpoints.files import Contents
from nblaunch.training.checkpoints.training_state import TrainingState
from nblaunch.training.data import resuming
from nblaunch.training.models import bare_module


@dataclass
class Snapshot:
    """What one checkpoint is made of, before it is written.

    Args:
        contents: what it says of itself.
        weights: state dict of every model that no hook took over.
        objects: state dicts, or their bytes, by file name.
        safe_serialization: weights in safetensors' format.
    """

    contents: Contents
    weights: list[Mapping[str, Any]] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    safe_serialization: bool = True

    def detach(self, copies: CpuCopies) -> None:
        """Copy everything to memory that training does not write to."""
        self.weights, self.objects = copies.take((self.weights, self.objects))

    def write(self, folder: Path) -> Contents:
        """Write all files to ``folder``; returns the contents with their sizes."""
        name = names.SAFE_WEIGHTS_NAME if self.safe_serialization else names.WEIGHTS_NAME
        for index, weights in enumerate(self.weights):
            model_files.write_weights(weights, folder / files.numbered(name, index), self.safe_serialization)
        for name, state in self.objects.items():
            files.write_object(state, folder / name)
        contents = replace(self.contents, models=len(self.weights), files=safe_save.files_below(folder))
        contents.write(folder)
        return contents


def collect(state: TrainingState, folder: Path, safe_serialization: bool) -> Snapshot:
    """What the main process saves. In ``folder`` is what ranks and hooks write there by themselves."""
    weights, optimizers, is_in_parts = _models_and_optimizers(state, folder)
    weights = _run_hooks(state, folder, weights)
    prepared = state.preparer
    contents = Contents(
        world_size=state.world_size,
        optimizers=len(prepared.optimizers),
        schedulers=len(prepared.schedulers),
        loaders=len(prepared.loaders),
        custom=len(state.custom),
        in_parts=state.strategy.name if is_in_parts else "",
        gradient_orders=[prepared.strategy.gradient_order(model) for model in prepared.models],
    )
    snapshot = Snapshot(contents, weights, {}, safe_serialization)
    schedulers = [scheduler.state_dict() for scheduler in prepared.schedulers]
    for name, states in ((files.OPTIMIZER, optimizers), (files.SCHEDULER, schedulers)):
        for index, one in enumerate(states):
            snapshot.objects[files.numbered(name, index)] = one
    for index, loader in enumerate(prepared.loaders):
        order = resuming.capture(loader, state.session)
        snapshot.objects[files.numbered(files.SAMPLER, index)] = order
        if hasattr(loader, "state_dict"):  # its position inside an epoch, where it can tell
            snapshot.objects[files.numbered(files.LOADER, index)] = _as_bytes(loader.state_dict())
    if state.scaler is not None:
        snapshot.objects[files.SCALER] = state.scaler.state_dict()
    for index, obj in enumerate(state.custom):
        # As bytes at once: what a person's object holds can't be told, nor copied safely.
        snapshot.objects[files.custom(index)] = _as_bytes(obj.state_dict())
    snapshot.objects[files.random_states(0)] = _random_states(state)
    return snapshot


def contribute(state: TrainingState, folder: Path) -> bytes:
    """What another rank than the main process saves: files in ``folder``, and its random states, returned."""
    has_parts = state.strategy.holds_parts
    _run_hooks(state, folder, _models_and_optimizers(state, folder)[0] if has_parts else None)
    return _random_states(state)


def _models_and_optimizers(
    state: TrainingState, folder: Path
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], bool]:
    """Whole weights and optimizer states to be written, or none and True: all ranks have written their parts."""
    prepared, strategy = state.preparer, state.strategy
    if strategy.save_parts(folder, prepared.models, prepared.optimizers):
        return [], [], True
    return (
        [strategy.state_dict(bare_module(model)) for model in prepared.models],
        [strategy.optimizer_state_dict(optimizer) for optimizer in prepared.optimizers],
        False,
    )


def _run_hooks(
    state: TrainingState, folder: Path, weights: list[Mapping[str, Any]] | None
) -> list[Mapping[str, Any]]:
    """Call the hooks with ``weights``, or those of this rank; returns the weights that they have left."""
    models = list(state.preparer.models)
    if weights is None:
        weights = [bare_module(model).state_dict() for model in models]
    for hook in list(state.save_hooks.values()):
        hook(models, weights, str(folder))
    return list(weights)


def _random_states(state: TrainingState) -> bytes:
    generators = rng_states.capture(state.session.member.backend)
    return _as_bytes({**generators, "step": state.session.gradients.step})


def _as_bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
