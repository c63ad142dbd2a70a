"""Where prepared loaders are in their epochs, for checkpoints.

A checkpoint taken in the middle of an epoch has the generators as they were at its *start*, because that is where the
order is drawn: reading the epoch again and skipping what was seen gives exactly what is left. What was seen is kept as
a :class:`EpochPosition`, from which any number of ranks can go on.

Not kept: what a dataset draws from the process's global generators while it is read; one batch is read ahead, so these
are one batch ahead of the training loop.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.position import EpochPosition
from nblaunch.training.data.samplers import SeedableRandomSampler
from nblaunch.training.shared_state import SharedState


def capture(loader: PreparedLoader, shared: SharedState) -> dict[str, Any]:
    """Return where ``loader`` is."""
    reading = _being_read(loader, shared)
    is_read = reading in shared.loaders.entered()
    is_mid_epoch = is_read and not reading.end_of_dataloader
    # With its last batch returned, an epoch counts as done: what follows is the next one.
    is_done = is_read and reading.end_of_dataloader
    generators = reading.epoch_start if is_mid_epoch else [one.get_state() for one in reading._generators()]
    state = {
        "iteration": reading.iteration + (1 if is_done else 0),
        "num_partial_epochs": reading.num_partial_epochs,
        "generators": generators,
        "is_mid_epoch": is_mid_epoch,
        "position": asdict(reading.position) if is_mid_epoch and reading.has_portable_position else None,
    }
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler):
        state["seed"] = sampler.initial_seed
    return state


def can_continue(loader: PreparedLoader, state: dict[str, Any]) -> bool:
    """Return whether ``loader`` can go on where another number of ranks was."""
    if not state["is_mid_epoch"]:
        return True
    return state.get("position") is not None and loader.has_portable_position


def restore(loader: PreparedLoader, state: dict[str, Any], shared: SharedState) -> None:
    """Bring ``loader`` to where :func:`capture` saw it: to its epoch, and to the generators at its start.

    The first part of the epoch is left out by :func:`skip_first_batches`, or by a loader that resumes by itself.
    """
    loader.set_epoch(state["iteration"])
    loader.num_partial_epochs = state.get("num_partial_epochs", 0)  # checkpoints of older versions have none
    for generator, saved in zip(loader._generators(), state["generators"], strict=False):
        generator.set_state(saved.cpu())
    sampler = loader.get_sampler()
    if "seed" in state and isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = state["seed"]
    loader.resume_at(None)
    loader.saved_position = None
    if state["is_mid_epoch"]:
        shared.is_resuming = True
        if can_continue(loader, state):
            loader.saved_position = EpochPosition(**state["position"])


def _being_read(loader: PreparedLoader, shared: SharedState) -> PreparedLoader:
    """Return the loader that reads what ``loader`` would: itself, or one made of it that begins further on."""
    for other in shared.loaders.entered():
        if isinstance(other, PreparedLoader) and loader in other.followed():
            return other
    return loader
