"""The work behind ``save_state``: ranks meet, the main process writes a folder aside, and gives it its name.

    hooks ─ state dicts ─ random states of every rank ──> Snapshot ── written aside by the main process ── renamed

How files are made safe is ``safe_save.py``'s, how ranks find each other ``meeting.py``'s business.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nblaunch import context
from nblaunch.errors import CheckpointError
from nblaunch.events import Note
from nblaunch.training import advice
from nblaunch.training.checkpoints import files, safe_save
from nblaunch.training.checkpoints.cpu_copies import CpuCopies
from nblaunch.training.checkpoints.files import Contents
from nblaunch.training.checkpoints.meeting import PATIENCE_S, SHORT_PATIENCE_S, Meeting
from nblaunch.training.checkpoints.safe_save import Staging
from nblaunch.training.checkpoints.snapshot import Snapshot, collect, contribute
from nblaunch.training.checkpoints.training_state import TrainingState


class Saver:
    """Saves checkpoints, one after the other.

    Args:
        state: what is saved.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._project = state.project
        self._pending: Meeting | None = None
        self._thread: threading.Thread | None = None
        self._thread_error: BaseException | None = None
        self._copies = CpuCopies()
        self._patience_s = PATIENCE_S
        self._is_warned = False

    def save(self, output_dir: Any, safe_serialization: bool, asynchronous: bool) -> str:
        """See ``Accelerator.save_state``."""
        self.wait()
        self._warn_of_open_window()
        target = self._new_target(output_dir)
        meeting = Meeting(f"save/{target}", self._state.rank, self._state.world_size)
        if self._state.rank == 0:
            self._save_as_main(target, meeting, safe_serialization, asynchronous)
        else:
            self._save_as_other(meeting)
            self._pending = meeting
            if not asynchronous:
                self.wait()
        if self._project.automatic_checkpoint_naming:
            self._project.iteration += 1
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
        if self._project.automatic_checkpoint_naming:
            return self._project.checkpoints / files.folder_name(self._project.iteration)
        if output_dir is None:
            raise ValueError(
                "save_state needs an output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        return Path(output_dir)

    def _open(self, target: Path) -> Staging:
        if self._project.automatic_checkpoint_naming:
            if target.exists():
                raise ValueError(
                    f"checkpoint {target} exists; continue its numbers with ProjectConfiguration(iteration=...), or "
                    "load it first: load_state() does that"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            safe_save.remove_leftovers(target.parent, lambda name: files.iteration_of(Path(name)) is not None)
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
            snapshot = collect(self._state, staging.folder, safe)
            for rank, random_states in self._random_states_of_others(meeting, target).items():
                snapshot.objects[files.random_states(rank)] = random_states
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
        meeting.post(f"here/{self._state.rank}", True)
        folder = meeting.read("folder")
        if isinstance(folder, Exception):
            raise folder
        try:
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder.absolute()}, which rank 0 made, is not there; the folder must be one that all machines "
                    "share"
                )
            answer = None, contribute(self._state, folder)
        except BaseException as error:
            if meeting.has("verdict"):  # the main process has given up, and the folder is gone
                raise CheckpointError(meeting.read("verdict")) from error
            meeting.post(f"state/{self._state.rank}", (f"{type(error).__name__}: {error}", b""))
            raise
        meeting.post(f"state/{self._state.rank}", answer)

    def _require_all(self, meeting: Meeting) -> None:
        """Where every rank has a part of the state, none can save it alone."""
        strategy = self._state.strategy
        if strategy.holds_parts and self._state.world_size > 1 and not meeting.arrivals(PATIENCE_S):
            raise CheckpointError(
                f"save_state was called on the main process alone, but with {strategy.name} every rank holds a part "
                "of the weights; call it on all ranks, not under `if accelerator.is_main_process`"
            )

    def _random_states_of_others(self, meeting: Meeting, target: Path) -> dict[int, bytes]:
        """Random states by rank. None come where only the main process saves, which many scripts have it do."""
        states: dict[int, bytes] = {}
        came = meeting.arrivals(self._patience_s)
        if not came and self._state.world_size > 1:
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
            raise CheckpointError(_not_saved(target, self._state.rank, error)) from error
        meeting.post("verdict", None)
        self._remove_oldest(target)

    def _write_in_thread(self, staging: Staging, snapshot: Snapshot, meeting: Meeting) -> None:
        try:
            self._write(staging, snapshot, meeting)
        except BaseException as error:  # raised where somebody waits for it
            self._thread_error = error
            context.current().emit(Note(rank=self._state.rank, time_s=time.time(), text=str(error)))

    def _remove_oldest(self, newest: Path) -> None:
        limit = self._project.total_limit
        if not self._project.automatic_checkpoint_naming or limit is None:
            return
        others = [
            path for path in files.in_order(newest.parent) if path != newest and files.is_removable(path)
        ]
        for path in others[: max(0, len(others) + 1 - limit)]:
            safe_save.remove_folder(path)

    def _warn_of_open_window(self) -> None:
        gradients = self._state.session.gradients
        if not gradients.sync_gradients and gradients.step % gradients.num_steps:
            advice.warn(
                f"save_state in the middle of gradient accumulation (micro-step {gradients.step % gradients.num_steps} "
                f"of {gradients.num_steps}): accumulated gradients are not saved. Save where "
                "accelerator.sync_gradients is True to continue training exactly."
            )


def _not_saved(target: Path, rank: int, error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"checkpoint {target} was not saved; nothing was changed. Rank {rank}: {type(error).__name__}: {error}"
