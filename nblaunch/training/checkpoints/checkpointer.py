"""The work behind ``save_state`` and ``load_state``: collecting, writing, checking and putting back.

    save    hooks ─ state dicts ─ random states of every rank ──> Snapshot ── written aside by the main process, renamed
    load    is it whole? does it fit? ── only then: hooks ─ weights ─ optimizers ─ ... ─ random states

How files are made safe is ``safe_save.py``'s, what they are called ``files.py``'s, and how ranks find each
other ``meeting.py``'s business.
"""

from __future__ import annotations

import io
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from nblaunch import context
from nblaunch.errors import CheckpointError
from nblaunch.events import Note
from nblaunch.training import advice, collectives
from nblaunch.training.checkpoints import files, model_files, names, rng_states, safe_save
from nblaunch.training.checkpoints.cpu_copies import CpuCopies
from nblaunch.training.checkpoints.files import Contents
from nblaunch.training.checkpoints.meeting import PATIENCE_S, SHORT_PATIENCE_S, Meeting
from nblaunch.training.checkpoints.safe_save import Staging
from nblaunch.training.data import loader_states
from nblaunch.training.prepare import Preparer
from nblaunch.training.project import ProjectConfiguration
from nblaunch.training.state import Session
from nblaunch.training.strategies import PLUGINS, Strategy
from nblaunch.training.wrappers import bare_module

_PLACES = (None, "cpu", "on_device")


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


class Checkpointer:
    """Saves and loads the state of one process's share of a job.

    Args:
        session: its session.
        preparer: has the prepared objects.
        project: says where and how many.
    """

    def __init__(self, session: Session, preparer: Preparer, project: ProjectConfiguration) -> None:
        self.session = session
        self.preparer = preparer
        self.project = project
        self.custom: list[Any] = []
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._pending: Meeting | None = None
        self._thread: threading.Thread | None = None
        self._thread_error: BaseException | None = None
        self._copies = CpuCopies()
        self._patience_s = PATIENCE_S
        self._is_warned = False

    def add_hook(
        self, hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]
    ) -> RemovableHandle:
        """Register a hook; the handle removes it."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    @property
    def _rank(self) -> int:
        return self.session.member.topology.rank

    @property
    def _world_size(self) -> int:
        return self.session.member.topology.world_size

    @property
    def _strategy(self) -> Strategy:
        return self.preparer.strategy

    # --- saving --------------------------------------------------------------------------------------------------

    def save(self, output_dir: Any, safe_serialization: bool, asynchronous: bool) -> str:
        """See ``Accelerator.save_state``."""
        self.wait()
        self._warn_of_open_window()
        target = self._new_target(output_dir)
        meeting = Meeting(f"save/{target}", self._rank, self._world_size)
        if self._rank == 0:
            self._save_as_main(target, meeting, safe_serialization, asynchronous)
        else:
            self._save_as_other(meeting)
            self._pending = meeting
            if not asynchronous:
                self.wait()
        if self.project.automatic_checkpoint_naming:
            self.project.iteration += 1
        return str(target)

    def close(self) -> None:
        """:meth:`wait`, and give the memory of asynchronous checkpoints back."""
        try:
            self.wait()
        finally:
            self._copies = CpuCopies()

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            CheckpointError: it could not be.
        """
        meeting, self._pending = self._pending, None
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            error, self._thread_error = self._thread_error, None
            if error is not None:
                raise error
        elif meeting is not None:
            problem = meeting.read("verdict")
            if problem is not None:
                raise CheckpointError(problem)

    def _new_target(self, output_dir: Any) -> Path:
        if self.project.automatic_checkpoint_naming:
            return self.project.checkpoints / files.folder_name(self.project.iteration)
        if output_dir is None:
            raise ValueError(
                "save_state needs an output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        return Path(output_dir)

    def _open(self, target: Path) -> Staging:
        if self.project.automatic_checkpoint_naming:
            if target.exists():
                raise ValueError(
                    f"checkpoint {target} exists; continue its numbers with ProjectConfiguration(iteration=...), or "
                    "load it first: load_state() does that"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            safe_save.remove_leftovers(target.parent)
        staging = Staging(target)
        staging.create()
        return staging

    def _save_as_main(self, target: Path, meeting: Meeting, safe: bool, asynchronous: bool) -> None:
        try:
            staging = self._open(target)
        except Exception as error:
            meeting.post("folder", error)
            raise
        meeting.post("folder", staging.folder)
        try:
            self._require_all(meeting)
            snapshot = self._collect(staging.folder, safe)
            for rank, state in self._states_of_others(meeting, target).items():
                snapshot.objects[files.random_states(rank)] = state
            if asynchronous:
                snapshot.detach(self._copies)
        except BaseException as error:
            meeting.post(
                "verdict", _not_saved(target, 0, error)
            )  # before the folder goes: others may look for it
            staging.discard()
            raise
        if not asynchronous:
            self._write(staging, snapshot, meeting)
            return
        self._thread = threading.Thread(
            target=self._write_in_thread,
            args=(staging, snapshot, meeting),
            name=f"nblaunch-save-{target.name}",
        )
        self._thread.start()

    def _save_as_other(self, meeting: Meeting) -> None:
        meeting.post(f"here/{self._rank}", True)
        folder = meeting.read("folder")
        if isinstance(folder, Exception):
            raise folder
        try:
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder.absolute()}, which rank 0 made, is not there; the folder must be one that all machines "
                    "share"
                )
            self._run_save_hooks(folder, self._states(folder)[0] if self._strategy.holds_parts else None)
            answer = None, self._random_states()
        except BaseException as error:
            if meeting.has("verdict"):  # the main process has given up, and the folder is gone
                raise CheckpointError(meeting.read("verdict")) from error
            meeting.post(f"state/{self._rank}", (f"{type(error).__name__}: {error}", b""))
            raise
        meeting.post(f"state/{self._rank}", answer)

    def _require_all(self, meeting: Meeting) -> None:
        """Where every rank has a part of the state, none can save it alone."""
        if self._strategy.holds_parts and self._world_size > 1 and not meeting.arrivals(PATIENCE_S):
            raise CheckpointError(
                f"save_state was called on the main process alone, but with {self._strategy.name} every rank holds a "
                "part of the weights; call it on all ranks, not under `if accelerator.is_main_process`"
            )

    def _states_of_others(self, meeting: Meeting, target: Path) -> dict[int, bytes]:
        """Random states by rank. None come where only the main process saves, which many scripts have it do."""
        states: dict[int, bytes] = {}
        came = meeting.arrivals(self._patience_s)
        if not came and self._world_size > 1:
            if not self._is_warned:
                self._is_warned = True
                advice.warn(
                    "save_state was called on the main process alone; the other ranks' random states are not in the "
                    "checkpoint. Call it on all ranks to continue training exactly."
                )
            self._patience_s = min(self._patience_s, SHORT_PATIENCE_S)
        for rank in came:
            problem, states[rank] = meeting.read(f"state/{rank}")
            meeting.forget(f"state/{rank}")
            if problem is not None:
                raise CheckpointError(
                    f"checkpoint {target} was not saved; nothing was changed. Rank {rank}: {problem}"
                )
        return states

    def _collect(self, folder: Path, safe_serialization: bool) -> Snapshot:
        weights, optimizers, is_in_parts = self._states(folder)
        weights = self._run_save_hooks(folder, weights)
        prepared = self.preparer
        contents = Contents(
            world_size=self._world_size,
            optimizers=len(prepared.optimizers),
            schedulers=len(prepared.schedulers),
            loaders=len(prepared.loaders),
            custom=len(self.custom),
            in_parts=self._strategy.name if is_in_parts else "",
            gradient_orders=[prepared.strategy.gradient_order(model) for model in prepared.models],
        )
        snapshot = Snapshot(contents, weights, {}, safe_serialization)
        schedulers = [scheduler.state_dict() for scheduler in prepared.schedulers]
        for name, states in ((files.OPTIMIZER, optimizers), (files.SCHEDULER, schedulers)):
            for index, state in enumerate(states):
                snapshot.objects[files.numbered(name, index)] = state
        for index, loader in enumerate(prepared.loaders):
            state = loader_states.capture(loader, self.session)
            snapshot.objects[files.numbered(files.SAMPLER, index)] = state
            if hasattr(loader, "state_dict"):  # its position inside an epoch, where it can tell
                snapshot.objects[files.numbered(files.LOADER, index)] = _as_bytes(loader.state_dict())
        scaler = self._scaler
        if scaler is not None:
            snapshot.objects[files.SCALER] = scaler.state_dict()
        for index, obj in enumerate(self.custom):
            # As bytes at once: what a person's object holds can't be told, nor copied safely.
            snapshot.objects[files.custom(index)] = _as_bytes(obj.state_dict())
        snapshot.objects[files.random_states(0)] = self._random_states()
        return snapshot

    def _states(self, folder: Path) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], bool]:
        """Whole weights and optimizer states to be written, or none and True: all ranks have written their parts."""
        prepared, strategy = self.preparer, self._strategy
        if strategy.save_parts(folder, prepared.models, prepared.optimizers):
            return [], [], True
        return (
            [strategy.state_dict(bare_module(model)) for model in prepared.models],
            [strategy.optimizer_state_dict(optimizer) for optimizer in prepared.optimizers],
            False,
        )

    def _run_save_hooks(
        self, folder: Path, weights: list[Mapping[str, Any]] | None
    ) -> list[Mapping[str, Any]]:
        """Call the hooks with ``weights``, or those of this rank; returns the weights that they have left."""
        models = list(self.preparer.models)
        if weights is None:
            weights = [bare_module(model).state_dict() for model in models]
        for hook in list(self.save_hooks.values()):
            hook(models, weights, str(folder))
        return list(weights)

    def _random_states(self) -> bytes:
        state = rng_states.capture(self.session.member.backend)
        return _as_bytes({**state, "step": self.session.gradients.step})

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return self.session.precision.scaler if self.session.precision is not None else None

    def _write(self, staging: Staging, snapshot: Snapshot, meeting: Meeting) -> None:
        """Write, commit, and only then remove what is too many."""
        target = staging.target
        try:
            before: Contents | None = None
            with suppress(CheckpointError):  # a damaged one is about to be replaced
                before = files.contents_of(target)
            contents = snapshot.write(staging.folder)
            staging.commit(before.files.keys() - contents.files.keys() if before is not None else ())
        except BaseException as error:
            staging.discard()
            meeting.post("verdict", _not_saved(target, 0, error))
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(_not_saved(target, self._rank, error)) from error
        meeting.post("verdict", None)
        self._remove_oldest(target)

    def _write_in_thread(self, staging: Staging, snapshot: Snapshot, meeting: Meeting) -> None:
        try:
            self._write(staging, snapshot, meeting)
        except BaseException as error:  # raised where somebody waits for it
            self._thread_error = error
            context.current().emit(Note(rank=self._rank, time_s=time.time(), text=str(error)))

    def _remove_oldest(self, newest: Path) -> None:
        limit = self.project.total_limit
        if not self.project.automatic_checkpoint_naming or limit is None:
            return
        others = [path for path in files.in_order(newest.parent) if path != newest]
        for path in others[: max(0, len(others) + 1 - limit)]:
            safe_save.remove_folder(path)

    def _warn_of_open_window(self) -> None:
        gradients = self.session.gradients
        if not gradients.sync_gradients and gradients.step % gradients.num_steps:
            advice.warn(
                f"save_state in the middle of gradient accumulation (micro-step {gradients.step % gradients.num_steps} "
                f"of {gradients.num_steps}): accumulated gradients are not saved. Save where "
                "accelerator.sync_gradients is True to continue training exactly."
            )

    # --- loading -------------------------------------------------------------------------------------------------

    def load(
        self,
        input_dir: Any,
        load_kwargs: Mapping[str, Any] | None,
        any_world_size: bool,
        map_location: str | None = None,
        strict: bool = True,
    ) -> None:
        """See ``Accelerator.load_state``."""
        if map_location not in _PLACES:
            raise TypeError(
                f"map_location={map_location!r} is unknown; valid are None, 'cpu' and 'on_device'"
            )
        place = self.session.member.device if map_location == "on_device" else "cpu"
        reading = {"map_location": place, **(load_kwargs or {})}
        self.wait()
        folder = self._agree(lambda: self._find(input_dir))
        contents = self._agree(lambda: self._checked(folder, any_world_size))
        if contents is not None:
            for model, order in zip(self.preparer.models, contents.gradient_orders, strict=False):
                self.preparer.strategy.set_gradient_order(model, order)
        if not self._load_models(folder, place, strict):
            for index, optimizer in enumerate(self.preparer.optimizers):
                state = files.read_object(folder / files.numbered(files.OPTIMIZER, index), **reading)
                self._strategy.load_optimizer_state_dict(optimizer, state)
        self._load_objects(folder, contents, reading)
        self._load_random_states(folder, contents, reading)
        number = files.iteration_of(folder)
        if self.project.automatic_checkpoint_naming and number is not None:
            self.project.iteration = max(self.project.iteration, number + 1)

    def _agree(self, work: Callable[[], Any]) -> Any:
        """``work()``, or on every rank an error where it fails on any, so that none goes on alone."""
        error: Exception | None = None
        value = None
        try:
            value = work()
        except Exception as caught:
            error = caught
        problems = collectives.gather_object([str(error) if error is not None else None])
        if error is not None:
            raise error
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise CheckpointError(f"rank {rank}: {problem}")
        return value

    def _find(self, input_dir: Any) -> Path:
        if input_dir is None and not self.project.automatic_checkpoint_naming:
            raise ValueError(
                "load_state needs an input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        folder = Path(input_dir) if input_dir is not None else files.latest(self.project.checkpoints)
        if not folder.is_dir():
            raise ValueError(f"checkpoint {folder.absolute()} does not exist")
        if self._rank == 0:
            safe_save.finish_commit(
                folder
            )  # of a process that was killed while it overwrote this very checkpoint
        return folder

    def _checked(self, folder: Path, any_world_size: bool) -> Contents | None:
        contents = files.contents_of(folder)
        if contents is None:
            found = len(list(folder.glob("custom_checkpoint_*.pkl")))
            _check_custom(folder, found, len(self.custom))
            return None
        files.check_whole(folder, contents)
        if contents.world_size != self._world_size and not any_world_size:
            raise CheckpointError(
                f"checkpoint {folder} was saved by {contents.world_size} processes, but this job has "
                f"{self._world_size}; its random states and the order of its data don't fit. Start "
                f"{contents.world_size} processes, or pass load_state(..., any_world_size=True) to take over the rest"
            )
        if contents.in_parts and contents.in_parts != self._strategy.name:
            raise CheckpointError(
                f"checkpoint {folder} was saved in parts, by the ranks of strategy {contents.in_parts!r}, and this "
                f"job's is {self._strategy.name!r}; build the Accelerator as then: "
                f"Accelerator({PLUGINS.get(contents.in_parts, '...')}=...)"
            )
        for kind in ("optimizers", "schedulers"):
            saved, here = getattr(contents, kind), len(getattr(self.preparer, kind))
            if here > saved:
                raise CheckpointError(f"checkpoint {folder} has {saved} {kind}, but {here} are prepared")
        _check_custom(folder, contents.custom, len(self.custom))
        return contents

    def _load_models(self, folder: Path, place: Any, strict: bool) -> bool:
        """Load weights; whether the strategy did it, and loaded optimizers as well."""
        models = list(self.preparer.models)
        for hook in list(self.load_hooks.values()):
            hook(models, str(folder))
        if self._strategy.load_parts(folder, models, self.preparer.optimizers):
            return True
        for index, model in enumerate(models):
            path = files.weights_file(folder, index)
            model_files.load_weights(model, model_files.read_weights(path, place), path, strict)
        return False

    def _load_objects(self, folder: Path, contents: Contents | None, reading: Mapping[str, Any]) -> None:
        prepared = self.preparer
        for index, scheduler in enumerate(prepared.schedulers):
            name = files.numbered(files.SCHEDULER, index)
            scheduler.load_state_dict(files.read_object(folder / name, **reading))
        for index, loader in enumerate(prepared.loaders):
            path = folder / files.numbered(files.SAMPLER, index)
            if contents is not None and path.is_file():
                loader_states.restore(loader, files.read_object(path), self.session)
                inside = folder / files.numbered(files.LOADER, index)
                if hasattr(loader, "load_state_dict") and inside.is_file():
                    loader.load_state_dict(files.read_object(inside, **reading))
            else:
                advice.warn(
                    f"checkpoint {folder} does not say where loader {index} was; it starts its first epoch"
                )
        scaler = self._scaler
        if scaler is not None and (folder / files.SCALER).is_file():
            scaler.load_state_dict(files.read_object(folder / files.SCALER, **reading))
        for index, obj in enumerate(self.custom):
            obj.load_state_dict(
                files.read_object(folder / files.custom(index), **{**reading, "map_location": "cpu"})
            )

    def _load_random_states(
        self, folder: Path, contents: Contents | None, reading: Mapping[str, Any]
    ) -> None:
        """Last of all, because loading may draw random numbers."""
        is_same_size = contents is None or contents.world_size == self._world_size
        path = folder / files.random_states(self._rank)
        if not path.is_file():
            path = folder / files.random_states(0)
            if not path.is_file():
                advice.warn(f"checkpoint {folder} has no random states; the generators stay as they are")
                return
            if is_same_size:
                advice.warn(
                    f"checkpoint {folder} has no random states of rank {self._rank}, only those of rank 0"
                )
        state = files.read_object(path, **{**reading, "map_location": "cpu"})
        self.session.gradients.step = state.get("step", 0)
        if is_same_size and path.name == files.random_states(self._rank):
            rng_states.restore(state, self.session.member.backend)


def _check_custom(folder: Path, saved: int, here: int) -> None:
    if saved != here:
        raise CheckpointError(
            f"checkpoint {folder} has {saved} registered objects, but {here} are registered now; call "
            "register_for_checkpointing with the same objects, in the same order, before load_state"
        )


def _not_saved(target: Path, rank: int, error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"checkpoint {target} was not saved; nothing was changed. Rank {rank}: {type(error).__name__}: {error}"


def _as_bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
