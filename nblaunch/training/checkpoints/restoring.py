"""The work behind ``load_state``: nothing is changed before it is known that the checkpoint is whole and fits.

is it whole? does it fit? ── only then: hooks ─ weights ─ optimizers ─ ... ─ random states

On another number of ranks, random states stay as they are, and loaders go on behind the samples that were seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nblaunch.errors import CheckpointError, warn
from nblaunch.training.arguments import argument_of
from nblaunch.training.checkpoints import contents, files, model_files, safe_save
from nblaunch.training.checkpoints.contents import Contents
from nblaunch.training.checkpoints.files import Manifest
from nblaunch.training.checkpoints.loading import load_weights
from nblaunch.training.checkpoints.snapshot import CheckpointSources, restore_random_states
from nblaunch.training.collectives import operations
from nblaunch.training.data import resuming
from nblaunch.training.data.loader import PreparedLoader

_MAP_LOCATIONS = (None, "cpu", "on_device")


class Restorer:
    """Loads checkpoints.

    Args:
        state: what is loaded into.
        wait_for_save: waits for a checkpoint that is still being written.
    """

    def __init__(self, state: CheckpointSources, wait_for_save: Callable[[], None]) -> None:
        self._state = state
        self._project = state.project
        self._wait_for_save = wait_for_save

    def load(
        self,
        input_dir: Any,
        load_kwargs: Mapping[str, Any] | None,
        any_world_size: bool,
        map_location: str | None = None,
        strict: bool = True,
    ) -> None:
        """Load a checkpoint; see ``Accelerator.load_state``."""
        if map_location not in _MAP_LOCATIONS:
            raise TypeError(
                f"Unsupported optimizer map location passed: map_location={map_location!r}; valid are None, 'cpu' "
                "and 'on_device'"
            )
        device = self._state.shared.process.device if map_location == "on_device" else "cpu"
        reading = {"map_location": device, **(load_kwargs or {})}
        self._wait_for_save()
        folder = self._common(self._on_all_ranks(lambda: self._find(input_dir)))
        manifest = self._on_all_ranks(lambda: self._checked(folder, any_world_size))
        if manifest is not None:
            # Each rank reads a share of the files, which it then finds in the file system's cache.
            self._on_all_ranks(
                lambda: files.check_bytes(folder, manifest, self._state.rank, self._state.world_size)
            )
        found = self._on_all_ranks(lambda: contents.read(self._state, folder, manifest, reading))
        if not self._state.load_hooks:  # a hook may take models over, and load them in its own way
            self._on_all_ranks(
                lambda: self._check_weights(folder, self._state.preparer.models, manifest, strict)
            )
        for model, order in zip(
            self._state.preparer.models, manifest.gradient_orders if manifest else (), strict=False
        ):
            self._state.strategy.set_gradient_order(model, order)
        if not self._load_models(folder, manifest, device, strict):
            for index, optimizer in enumerate(self._state.preparer.optimizers):
                if index == len(found.optimizers):
                    raise CheckpointError(
                        f"checkpoint {folder} has no {files.numbered(files.OPTIMIZER, index)}"
                    )
                self._state.strategy.load_optimizer_state_dict(optimizer, found.optimizers[index])
        self._load_objects(folder, found)
        self._load_random_states(folder, found, manifest)
        number = files.iteration_of(folder)
        if self._project.automatic_checkpoint_naming and number is not None:
            self._project.iteration = max(self._project.iteration, number + 1)

    def _on_all_ranks(self, work: Callable[[], Any]) -> Any:
        """Return ``work()``, or raise on every rank where it fails on any, so that none goes on alone."""
        error: Exception | None = None
        value = None
        try:
            value = work()
        except Exception as caught:
            error = caught
        problems = operations.gather_object([str(error) if error is not None else None])
        if error is not None:
            raise error
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise CheckpointError(f"rank {rank}: {problem}")
        return value

    def _find(self, input_dir: Any) -> Path:
        if input_dir is None and not self._project.automatic_checkpoint_naming:
            raise ValueError(
                "load_state needs an input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        folder = Path(input_dir) if input_dir is not None else files.latest(self._project.checkpoints)
        if not folder.is_dir():
            raise ValueError(f"checkpoint {folder.absolute()} does not exist")
        if self._state.rank == 0:
            safe_save.finish_commit(
                folder
            )  # of a process that was killed while it overwrote this very checkpoint
        return folder

    def _common(self, folder: Path) -> Path:
        """Return ``folder``, or the main process's where only that has a checkpoint: ranks may name their own.

        So do scripts that save to ``tempfile.mkdtemp()``; ``save_state`` has written all files to the main one's.
        """
        (main,) = operations.broadcast_object_list([str(folder)])
        if not (folder / files.MANIFEST).is_file() and (Path(main) / files.MANIFEST).is_file():
            return Path(main)
        return folder

    def _checked(self, folder: Path, any_world_size: bool) -> Manifest | None:
        manifest = files.read_manifest(folder)
        if manifest is None:
            found = len(list(folder.glob("custom_checkpoint_*.pkl")))
            _check_custom(folder, found, len(self._state.custom))
            return None
        files.check_whole(folder, manifest)
        if manifest.world_size != self._state.world_size and not any_world_size:
            raise CheckpointError(
                f"checkpoint {folder} was saved by {manifest.world_size} processes, but this job has "
                f"{self._state.world_size}; its random states don't fit. Start {manifest.world_size} processes, or "
                "call load_state(..., any_world_size=True) to take over the rest"
            )
        if manifest.sharded_by and manifest.sharded_by != self._state.strategy.name:
            raise CheckpointError(
                f"checkpoint {folder} was saved in shards, by the ranks of strategy {manifest.sharded_by!r}, and this "
                f"job's is {self._state.strategy.name!r}; build the Accelerator as then: "
                f"Accelerator({argument_of(manifest.sharded_by)}=...)"
            )
        for kind in ("optimizers", "schedulers"):
            saved, here = getattr(manifest, kind), len(getattr(self._state.preparer, kind))
            if here > saved:
                raise CheckpointError(f"checkpoint {folder} has {saved} {kind}, but {here} are prepared")
        _check_custom(folder, manifest.custom, len(self._state.custom))
        return manifest

    def _check_weights(
        self, folder: Path, models: Sequence[torch.nn.Module], manifest: Manifest | None, strict: bool
    ) -> None:
        """Raise CheckpointError where a file of weights is missing, or one does not fit its model."""
        if manifest is not None and manifest.sharded_by:
            return
        for index, model in enumerate(models):
            if manifest is None and self._state.strategy.holds_shards:
                return  # another tool's shards, which the strategy looks for
            contents.check_weights(model, files.weights_file(folder, index), strict)

    def _load_models(self, folder: Path, manifest: Manifest | None, device: Any, strict: bool) -> bool:
        """Load weights; whether the strategy did it, and loaded optimizers as well."""
        models = list(self._state.preparer.models)
        hooks = list(self._state.load_hooks.values())
        for hook in hooks:
            hook(models, str(folder))
        if self._state.strategy.load_shards(folder, models, self._state.preparer.optimizers):
            return True
        if hooks:
            self._check_weights(folder, models, manifest, strict)
        for index, model in enumerate(models):
            path = files.weights_file(folder, index)
            load_weights(model, model_files.read_weights(path, device), path, strict)
        return False

    def _load_objects(self, folder: Path, found: Contents) -> None:
        prepared = self._state.preparer
        for scheduler, state in zip(prepared.schedulers, found.schedulers, strict=True):
            scheduler.load_state_dict(state)
        for index, loader in enumerate(prepared.loaders):
            self._load_loader(folder, index, loader, found)
        if self._state.scaler is not None and found.scaler is not None:
            self._state.scaler.load_state_dict(found.scaler)
        for obj, state in zip(self._state.custom, found.custom, strict=True):
            obj.load_state_dict(state)

    def _load_loader(self, folder: Path, index: int, loader: PreparedLoader, found: Contents) -> None:
        order, own = found.orders[index], found.loaders[index]
        if order is None:
            warn(f"checkpoint {folder} has no position of loader {index}, which starts its first epoch")
            return
        resuming.restore(loader, order, self._state.shared)
        if own is not None:
            loader.load_state_dict(own)
        elif loader.use_stateful_dataloader:
            loader.resume_at(loader.saved_position)

    def _load_random_states(self, folder: Path, found: Contents, manifest: Manifest | None) -> None:
        """Load random states last of all, because loading may draw random numbers."""
        if found.random is None:
            warn(f"checkpoint {folder} has no random states; the generators stay as they are")
            return
        is_same_size = manifest is None or manifest.world_size == self._state.world_size
        is_own = found.random_rank == self._state.rank
        self._state.preparer.accumulation.step = found.random.get("step", 0)
        if is_same_size and is_own:
            restore_random_states(found.random, self._state.shared.process.backend)
        elif is_same_size:
            warn(f"checkpoint {folder} has no random states of rank {self._state.rank}, only those of rank 0")


def _check_custom(folder: Path, saved: int, here: int) -> None:
    if saved != here:
        raise CheckpointError(
            f"checkpoint {folder} has {saved} registered objects, but {here} are registered now; call "
            "register_for_checkpointing with the same objects, in the same order, before load_state"
        )
