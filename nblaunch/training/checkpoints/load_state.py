"""The implementation of ``load_state``, which changes nothing until it knows that the checkpoint is intact and fits.

is it intact? ── read all but weights ── does it fit?
    ── only then: shards (then hooks), or hooks (then weights) ─ optimizers ─ ... ─ random states

Shards can be checked only while they are being loaded. If there are load hooks, the weights can be checked only after
the hooks have run. Otherwise, ``load_state`` checks the weights' names and shapes beforehand, but not their values. If
a different number of ranks saved the checkpoint, random states stay unchanged, and loaders continue after the samples
that were already read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nblaunch.errors import CheckpointError, warn
from nblaunch.training.arguments import argument_of
from nblaunch.training.checkpoints import files, model_files, registered
from nblaunch.training.checkpoints.files import Manifest
from nblaunch.training.checkpoints.load_weights import check_weights, load_weights
from nblaunch.training.checkpoints.registered import Places, Registered
from nblaunch.training.checkpoints.save_state import Saver
from nblaunch.training.checkpoints.snapshot import CheckpointedObjects
from nblaunch.training.collectives import nested, operations, rng
from nblaunch.training.data import resuming
from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.models import plain_module
from nblaunch.training.strategies.dtensor_strategy import in_own_order
from nblaunch.weights import is_sharded, plain_name

_MAP_LOCATIONS = (None, "cpu", "on_device")


def load_state(
    live: CheckpointedObjects,
    saver: Saver,
    input_dir: Any,
    load_kwargs: Mapping[str, Any] | None,
    map_location: str | None = None,
    strict: bool = True,
) -> None:
    """Load a checkpoint after ``saver`` has written the last one; see ``Accelerator.load_state``."""
    if map_location not in _MAP_LOCATIONS:
        raise TypeError(
            f"Unsupported optimizer map location passed: map_location={map_location!r}; valid values are None, "
            "'cpu' and 'on_device'"
        )
    saver.wait()
    device = live.shared.process.device if map_location == "on_device" else "cpu"
    folder = _common(_on_all_ranks(lambda: _find(live, input_dir)))
    manifest = _on_all_ranks(lambda: _checked(live, folder))
    checkpoint = _Checkpoint(live, folder, manifest, {"map_location": device, **(load_kwargs or {})})
    optimizers, loads = _on_all_ranks(lambda: checkpoint.read(strict))
    if not checkpoint.load_models(device, strict):
        for index, optimizer in enumerate(live.preparer.optimizers):
            if index == len(optimizers):
                raise CheckpointError(f"checkpoint {folder} has no {files.numbered(files.OPTIMIZER, index)}")
            live.strategy.load_optimizer_state_dict(optimizer, optimizers[index])
    for load in loads:
        load()
    number = files.iteration_of(folder)
    if live.project.automatic_checkpoint_naming and number is not None:
        live.project.iteration = max(live.project.iteration, number + 1)


def _on_all_ranks(work: Callable[[], Any]) -> Any:
    """Return ``work()``; if it fails on any rank, raise an error on every rank."""
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


def _find(live: CheckpointedObjects, input_dir: Any) -> Path:
    if input_dir is None and not live.project.automatic_checkpoint_naming:
        raise ValueError(
            "load_state needs an input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
        )
    folder = Path(input_dir).expanduser() if input_dir is not None else files.latest(live.project.checkpoints)
    if not folder.is_dir():
        raise ValueError(f"checkpoint {folder.absolute()} does not exist")
    if live.rank == 0:
        # Finish the commit of a process that was killed while it was overwriting this checkpoint.
        files.finish_commit(folder)
    return folder


def _common(folder: Path) -> Path:
    """Return ``folder``, or the main process's folder if only that one has a checkpoint.

    Ranks may pass different folders, for example from ``tempfile.mkdtemp()``; ``save_state`` wrote all files to the
    main process's folder.
    """
    (main,) = operations.broadcast_object_list([str(folder)])
    if not (folder / files.MANIFEST).is_file() and (Path(main) / files.MANIFEST).is_file():
        return Path(main)
    return folder


# --- is it intact? ----------------------------------------------------------------------------------------------------


def _checked(live: CheckpointedObjects, folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint after checking that it is intact; None if another tool wrote it."""
    manifest = files.read_manifest(folder)
    if manifest is None:
        count = len(list(folder.glob("custom_checkpoint_*.pkl")))
        _check_custom(folder, count, len(live.registered))
        return None
    if manifest.sharded_by and manifest.sharded_by != live.strategy.name:
        raise CheckpointError(
            f"checkpoint {folder} was saved in shards with strategy {manifest.sharded_by!r}, but this job uses "
            f"{live.strategy.name!r}; create the Accelerator with "
            f"Accelerator({argument_of(manifest.sharded_by)}=...)"
        )
    for kind in ("optimizers", "schedulers"):
        saved, here = getattr(manifest, kind), len(getattr(live.preparer, kind))
        if here > saved:
            raise CheckpointError(f"checkpoint {folder} has {saved} {kind}, but {here} are prepared")
    _check_custom(folder, manifest.custom, len(live.registered))
    # Each rank reads a share of the files, which puts all files into the file system's cache.
    files.check_files(folder, manifest, live.rank, live.world_size)
    return manifest


def _check_custom(folder: Path, saved: int, here: int) -> None:
    if saved != here:
        raise CheckpointError(
            f"checkpoint {folder} has {saved} registered objects, but {here} are registered now; call "
            "register_for_checkpointing with the same objects, in the same order, before load_state"
        )


# --- does it fit? -----------------------------------------------------------------------------------------------------


class _Checkpoint:
    """A checkpoint that is being loaded into the live objects.

    Args:
        live: the live objects.
        folder: the checkpoint's folder.
        manifest: the checkpoint's manifest; None if another tool wrote it.
        reading: arguments for ``torch.load``.
    """

    def __init__(
        self, live: CheckpointedObjects, folder: Path, manifest: Manifest | None, reading: Mapping[str, Any]
    ) -> None:
        self.live = live
        self.folder = folder
        self.manifest = manifest
        self.is_sharded = manifest is not None and bool(manifest.sharded_by)
        self.is_of_this_size = manifest is None or manifest.world_size == live.world_size
        self._reading = reading
        # Load all states but the optimizers' onto the CPU: generators, for example, accept only CPU tensors.
        self._on_cpu = {**reading, "map_location": "cpu"}

    def read(self, strict: bool) -> tuple[list[dict[str, Any]], list[Callable[[], object]]]:
        """Return the optimizers' states, and functions that load all other states except weights.

        If the strategy reads the optimizers together with the weights, the list of states is empty.

        Raises:
            CheckpointError: a state does not fit its object, or the weights do not fit a model.
        """
        optimizers = [] if self.is_sharded else list(self._read_optimizers())
        loads = list(self._read_others())
        if not self.live.load_hooks:  # a hook may load models in its own way
            self._check_weights(self.live.preparer.models, strict)
        return optimizers, loads

    def _read_optimizers(self) -> Iterator[dict[str, Any]]:
        for index, optimizer in enumerate(self.live.preparer.optimizers):
            path = self.folder / files.numbered(files.OPTIMIZER, index)
            if self.manifest is None and not path.is_file():
                return  # another tool may have stored it elsewhere
            state = files.read_object(path, **self._reading)
            if not self.live.strategy.holds_shards:
                _check_optimizer(optimizer, state, path)
            yield _in_own_order(optimizer, state, self.live.preparer.models, path)

    def _check_weights(self, models: Sequence[torch.nn.Module], strict: bool) -> None:
        """Raise CheckpointError if a weight file is missing or does not fit its model."""
        if self.is_sharded or (self.manifest is None and self.live.strategy.holds_shards):
            return  # the strategy checks its shards itself
        for index, model in enumerate(models):
            check_weights(model, files.weights_file(self.folder, index, self.manifest), strict)

    def load_models(self, device: Any, strict: bool) -> bool:
        """Load weights; return whether the strategy loaded both weights and optimizers."""
        live = self.live
        is_loaded = live.strategy.load_shards(
            self.folder, list(live.preparer.models), live.preparer.optimizers
        )
        # Hooks remove models from the list, as in Accelerate.
        models = [] if is_loaded else live.models_for_hooks()
        hooks = list(live.load_hooks.values())
        for hook in hooks:
            hook(models, str(self.folder))
        if is_loaded:
            return True
        if hooks:
            self._check_weights(models, strict)
        for index, model in enumerate(models):
            path = files.weights_file(self.folder, index, self.manifest)
            load_weights(model, model_files.read_weights(path, device), path, strict)
        return False

    # --- other states --------------------------------------------------------------------------------------------

    def _read_others(self) -> Iterator[Callable[[], object]]:
        """Read all states except weights and the optimizers' states; yield functions that load them."""
        live, folder = self.live, self.folder
        for index, scheduler in enumerate(live.preparer.schedulers):
            saved = files.read_object(folder / files.numbered(files.SCHEDULER, index), **self._on_cpu)
            yield partial(scheduler.load_state_dict, saved)
        for index, loader in enumerate(live.preparer.loaders):
            yield self._read_loader(index, loader)
        if live.scaler is not None and (folder / files.SCALER_NAME).is_file():
            saved = files.read_object(folder / files.SCALER_NAME, **self._on_cpu)
            yield partial(live.scaler.load_state_dict, saved)
        for index, entry in enumerate(live.registered):
            places = {} if self.manifest is None else self.manifest.places.get(files.custom(index), {})
            saved = self._read_registered(index, entry, places)
            yield partial(registered.load, entry.obj, saved, places, live.preparer.models)
        # Random states come last, because random numbers may be drawn while other states are being loaded.
        yield self._read_random_states()

    def _read_registered(self, index: int, entry: Registered, places: Places) -> Any:
        """Return the n-th registered object's state on this rank, with a full tensor at each position that ``places``
        lists.
        """
        path = self.folder / files.custom(index)
        # Map the file if tensors are sharded, so that each rank reads only its own part.
        mapped = {"mmap": True} if places else {}
        state = files.read_object(path, owner=entry.obj, **{**mapped, **self._on_cpu})
        if any(is_sharded(leaf) for leaf in nested.leaves(state)):
            raise CheckpointError(
                f"{path} holds only the shards of rank 0, because Hugging Face Accelerate wrote it. The shards of the "
                "other ranks are lost. Create the object again from the full weights in the checkpoint"
            )
        rank_file = registered.own_file(entry, index, self.manifest, self.live.rank, self.live.world_size)
        if rank_file is None:
            return state
        rest = files.read_object(self.folder / rank_file, owner=entry.obj, **self._on_cpu)
        return registered.with_shards(rest, state, places)

    def _read_loader(self, index: int, loader: PreparedLoader) -> Callable[[], object]:
        live, folder, manifest = self.live, self.folder, self.manifest
        path = folder / files.numbered(files.SAMPLER, index)
        if manifest is None or not path.is_file():
            return partial(
                warn,
                f"checkpoint {folder} has no position for loader {index}, which therefore starts with its first epoch",
            )
        order = files.read_object(path)
        if not self.is_of_this_size and not resuming.can_continue(loader, order):
            raise CheckpointError(
                f"loader {index} was in the middle of an epoch when {manifest.world_size} processes saved it, but "
                f"{live.world_size} processes can't continue there, because its stream is divided by the "
                f"dataset or among the DataLoader's worker processes. Start {manifest.world_size} processes, save at "
                "the end of an epoch, or read the stream with num_workers=0"
            )
        state: dict[str, Any] | None = None
        file = self._of_this_rank(partial(files.loader_state, index))
        if file is not None and self.is_of_this_size and loader.use_stateful_dataloader:
            state = files.read_object(file[0], **self._on_cpu)

        def load() -> None:
            resuming.restore(loader, order)
            if state is not None:
                loader.load_state_dict(state)

        return load

    def _read_random_states(self) -> Callable[[], object]:
        live = self.live
        file = self._of_this_rank(files.random_states)
        if file is None:
            return partial(
                warn, f"checkpoint {self.folder} has no random states; the generators keep their states"
            )
        path, rank = file
        saved = files.read_object(path, **self._on_cpu)

        def load() -> None:
            live.preparer.accumulation.step = saved.get("step", 0)
            if not self.is_of_this_size:
                return
            if rank == live.rank:
                rng.restore_states(saved, live.shared.process.backend)
            else:
                warn(f"checkpoint {self.folder} has no random states for rank {live.rank}, only for rank 0")

        return load

    def _of_this_rank(self, name_of: Callable[[int], str]) -> tuple[Path, int] | None:
        """Return this rank's file, or else rank 0's, and the rank that it belongs to; None if neither exists."""
        candidates = ((self.folder / name_of(rank), rank) for rank in (self.live.rank, 0))
        return next((candidate for candidate in candidates if candidate[0].is_file()), None)


def _check_optimizer(optimizer: Any, state: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if a state's parameter groups differ from the optimizer's."""
    saved, groups_here = state.get("param_groups"), getattr(optimizer, "param_groups", None)
    if not isinstance(saved, list) or not isinstance(groups_here, list):
        return  # another format, which the strategy understands
    sizes = [[len(group.get("params", ())) for group in groups] for groups in (saved, groups_here)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{path} does not fit the optimizer: it has groups of {sizes[0]} parameters, but the optimizer has "
            f"groups of {sizes[1]}"
        )


def _in_own_order(optimizer: Any, state: Any, models: Sequence[torch.nn.Module], path: Path) -> Any:
    """Sort the parameters of a state into the optimizer's order, if the state is keyed by names.

    Hugging Face Accelerate's FSDP version 1 stores parameters in the order of its flat parameters.
    """
    saved = state.get("param_groups")
    if not isinstance(saved, list) or not any(
        isinstance(item, str) for group in saved for item in group.get("params", ())
    ):
        return state
    names: dict[int, set[str]] = {}
    for model in models:
        for name, parameter in plain_module(model).named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), set()).add(plain_name(name))
    groups = optimizer.param_groups
    try:
        return in_own_order(
            state, [[names.get(id(item), set()) for item in group["params"]] for group in groups]
        )
    except ValueError as error:
        raise CheckpointError(f"{path} does not fit the optimizer: {error}") from None
