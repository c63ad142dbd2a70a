"""Where prepared loaders are: epoch, random order, and whether an epoch is under way.

A checkpoint taken in the middle of an epoch has the generators as they were at its *start*, because that is where the
order is drawn: reading the epoch again and skipping what was seen gives exactly what is left.

Not kept: what a dataset draws from the process's global generators while it is read; one batch is read ahead, so
these are one batch ahead of the training loop.
"""

from __future__ import annotations

from typing import Any

from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.samplers import SeedableRandomSampler, sampler_of
from nblaunch.training.session import Session


def capture(loader: PreparedLoader, session: Session) -> dict[str, Any]:
    """Where ``loader`` is."""
    reading = _being_read(loader, session) or loader
    is_mid_epoch = reading in session.gradients.loaders and not reading.end_of_dataloader
    # With its last batch in the person's hands, an epoch counts as done: what follows is the next one.
    is_done = reading in session.gradients.loaders and reading.end_of_dataloader
    generators = reading.epoch_start if is_mid_epoch else [one.get_state() for one in reading._generators()]
    state = {
        "iteration": reading.iteration + (1 if is_done else 0),
        "generators": generators,
        "is_mid_epoch": is_mid_epoch,
    }
    sampler = sampler_of(loader.batch_sampler)
    if isinstance(sampler, SeedableRandomSampler):
        state["seed"] = sampler.seed
    return state


def restore(loader: PreparedLoader, state: dict[str, Any], session: Session) -> None:
    """Bring ``loader`` to where :func:`capture` saw it."""
    loader.set_epoch(state["iteration"])
    for generator, saved in zip(loader._generators(), state["generators"], strict=False):
        generator.set_state(saved.cpu())
    sampler = sampler_of(loader.batch_sampler)
    if "seed" in state and isinstance(sampler, SeedableRandomSampler):
        sampler.seed = state["seed"]
    if state["is_mid_epoch"]:
        session.is_resuming = True


def _being_read(loader: PreparedLoader, session: Session) -> PreparedLoader | None:
    """The loader that reads what ``loader`` would: itself, or one made of it that skips its first batches."""
    sampler = sampler_of(loader.batch_sampler)
    for other in session.gradients.loaders:
        if other is loader or (sampler is not None and sampler_of(other.batch_sampler) is sampler):
            return other
    return None
