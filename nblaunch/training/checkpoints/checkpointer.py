"""Checkpointer: what the ``Accelerator`` saves and loads with, and the files of a checkpoint.

The folder of a checkpoint, with the names that users of Hugging Face Accelerate know:

    model.safetensors (or pytorch_model.bin), optimizer.bin, scheduler.bin, sampler.bin, scaler.pt,
    random_states_<rank>.pkl, custom_checkpoint_<i>.pkl; the second of a kind has _1 in its name;
    nblaunch_checkpoint.json lists them all

Where ranks hold shards of models, weights and optimizers lie in folders instead, a file of each rank in them:
pytorch_model_fsdp_0/ and optimizer_0/ for FSDP2.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nblaunch.training.checkpoints import model_files
from nblaunch.training.checkpoints.restoring import Restorer
from nblaunch.training.checkpoints.saving import Saver
from nblaunch.training.checkpoints.snapshot import CheckpointSources
from nblaunch.training.models import bare_module
from nblaunch.training.options import ProjectConfiguration
from nblaunch.training.prepare import Preparer
from nblaunch.training.shared_state import SharedState


class Checkpointer:
    """Has the parts that save and load whole checkpoints; saves single models and objects itself.

    ``saver`` is for ``save_state``, ``restorer`` for ``load_state``; ``sources`` is what both read.

    Args:
        shared: what all Accelerators of this process share.
        preparer: has the prepared objects.
        project: says where checkpoints go and how many stay.
    """

    def __init__(self, shared: SharedState, preparer: Preparer, project: ProjectConfiguration) -> None:
        self.project = project
        self.sources = CheckpointSources(shared, preparer, project)
        self.saver = Saver(self.sources)
        self.restorer = Restorer(self.sources, self.saver.wait)

    @property
    def writes(self) -> bool:
        """Whether this process writes what is saved once: the main process of the job, or of every machine."""
        topology = self.sources.shared.process.topology
        on_each = self.project.save_on_each_node
        return topology.local_rank == 0 if on_each else topology.rank == 0

    @property
    def collects_weights(self) -> bool:
        """Whether this process takes part in collecting the whole weights of a model that is to be saved."""
        return self.writes or self.sources.strategy.holds_shards

    def register(self, objects: Sequence[Any]) -> None:
        """Include ``objects`` in checkpoints; see ``Accelerator.register_for_checkpointing``."""
        unfit = [
            f"Item at index {position} ({type(obj).__name__})"
            for position, obj in enumerate(objects)
            if not (
                callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))
            )
        ]
        if unfit:
            raise ValueError(
                f"objects to register need state_dict and load_state_dict, which these lack: {'; '.join(unfit)}"
            )
        self.sources.custom.extend(objects)

    def weights(self, model: torch.nn.Module, unwrap: bool) -> dict[str, Any]:
        """Return the whole weights of a model; see ``Accelerator.get_state_dict``."""
        return dict(self.sources.strategy.state_dict(bare_module(model) if unwrap else model))

    def save_weights(
        self,
        weights: dict[str, Any],
        folder: str | os.PathLike[str],
        max_shard_size: int | str,
        safe_serialization: bool,
    ) -> None:
        """Write the weights of a model where this process is to; see ``Accelerator.save_model``."""
        if self.writes:
            model_files.save_sharded(weights, Path(folder), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool) -> None:
        """Write a single object where this process is to; see ``Accelerator.save``."""
        model_files.refuse_parts(obj)
        if self.writes:
            model_files.write_object(obj, f, safe_serialization)
