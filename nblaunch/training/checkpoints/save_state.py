"""The implementation of ``save_state``: ranks write to a temporary folder, which the main process then renames.

    all ranks     join a save round; the main process creates the folder
    all ranks     call the save hooks, and collect their own states: random states, positions of stateful loaders,
                  shards of weights and optimizers if the strategy has them ────┐ Snapshot ── written to the folder,
    main process  collects full weights and optimizers, and all other states ───┘             committed by a rename

``files.Staging`` replaces folders atomically. ``save_round`` lets the ranks save together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from nblaunch import context, formatting
from nblaunch.errors import CheckpointError, warn
from nblaunch.events import Note
from nblaunch.training.checkpoints import files
from nblaunch.training.checkpoints.files import Manifest, Staging
from nblaunch.training.checkpoints.save_round import Coordinator, Participant, Round, SaveOutcome, side_of
from nblaunch.training.checkpoints.snapshot import CheckpointedObjects, CpuCopies, Snapshot, collect
from nblaunch.training.joining import is_distributed, waiting


class Saver:
    """Saves checkpoints, one at a time. On every rank but 0, a thread answers rank 0's messages from the start."""

    def __init__(self, live: CheckpointedObjects) -> None:
        self._live = live
        self._project = live.project
        self._thread: threading.Thread | None = None
        self._thread_error: BaseException | None = None
        self._copies = CpuCopies()
        self._is_warned = False
        self._side_of_round()  # starts the thread that answers rank 0

    def save(
        self, output_dir: Any, safe_serialization: bool, asynchronous: bool, main_process_only: bool
    ) -> str:
        """Save a checkpoint; see ``Accelerator.save_state``."""
        self.wait()
        self._warn_of_open_window()
        if self._project.automatic_checkpoint_naming:
            target = self._project.checkpoints / f"checkpoint_{self._project.iteration}"
        elif output_dir is not None:
            target = Path(output_dir).expanduser()
        else:
            raise ValueError(
                "save_state needs an output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        strategy = self._live.strategy
        if main_process_only and strategy.holds_shards and self._live.world_size > 1:
            raise ValueError(
                f"main_process_only=True, but with {strategy.name} every rank holds a shard of the weights; call "
                "save_state on all ranks, without main_process_only"
            )
        if self._live.rank == 0:
            coordinator = None if main_process_only else self._side_of_round()
            self._save_as_main(target, coordinator, safe_serialization, asynchronous)
        elif not main_process_only:
            target = self._save_as_other(safe_serialization, asynchronous)
        if self._project.automatic_checkpoint_naming:
            self._project.iteration += 1
        return str(target)

    def close(self) -> None:
        """Do what :meth:`wait` does, and release the memory of asynchronous checkpoints."""
        try:
            self.wait()
        finally:
            self._copies = CpuCopies()

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise the error if writing it failed."""
        if self._thread is not None:
            self._thread.join()  # after an interrupt here, the next call joins it
            self._thread = None
        error, self._thread_error = self._thread_error, None
        if error is not None:
            raise error

    def _side_of_round(self) -> Any:
        """Return this rank's side of the save rounds, a Coordinator or a Participant; None in a single process."""
        if self._live.world_size == 1 or not is_distributed():
            return None
        return side_of(self._live.shared.process.backend, self._live.rank)

    # --- the main process ----------------------------------------------------------------------------------------

    def _save_as_main(
        self, target: Path, coordinator: Coordinator | None, safe: bool, asynchronous: bool
    ) -> None:
        passed = coordinator.open() if coordinator is not None else []
        staging = None
        try:
            self._judge_absence(passed)
            staging = self._open(target)
            if coordinator is not None:
                compares = bool(self._live.registered)
                coordinator.begin(str(staging.folder), str(target), self._project.iteration, compares)
            copies = self._copies if asynchronous else None
            snapshot = collect(self._live, staging.folder, safe, copies, coordinator)
        except BaseException as error:
            _give_up(coordinator, staging, target, error)
            raise
        write = partial(self._write, staging, snapshot, coordinator, asynchronous)
        if asynchronous:
            self._start_thread(target, write)
        else:
            write()

    def _judge_absence(self, passed: Sequence[int]) -> None:
        """Raise CheckpointError if missing ranks hold shards; otherwise warn that their random states are not saved."""
        if not passed:
            return
        is_alone = len(passed) == self._live.world_size - 1
        who = "only on the main process" if is_alone else f"without {formatting.ranks(passed)}"
        strategy = self._live.strategy
        if strategy.holds_shards:
            raise CheckpointError(
                f"save_state was called {who}, but with {strategy.name} every rank holds a shard of the weights; call "
                "it on all ranks, not under `if accelerator.is_main_process`"
            )
        if not self._is_warned:
            self._is_warned = True
            warn(
                f"save_state was called {who}: the other ranks have entered another collective or ended. Their "
                "random states, and states of registered objects that differ from rank 0's, are not in the "
                "checkpoint. To be able to resume exactly where training stopped, call save_state on all ranks. To "
                "save only what the main process has, pass main_process_only=True"
            )

    def _open(self, target: Path) -> Staging:
        if self._project.automatic_checkpoint_naming:
            if target.exists():
                raise ValueError(
                    f"checkpoint {target} already exists; call load_state() first to continue its numbering, or set "
                    "ProjectConfiguration(iteration=...)"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            files.remove_leftovers(target.parent, lambda name: files.iteration_of(Path(name)) is not None)
        staging = Staging(target)
        try:
            staging.create()
        except OSError as error:  # a full disk, or no free inodes
            raise CheckpointError(_not_saved(target, 0, error)) from error
        return staging

    def _write(
        self, staging: Staging, snapshot: Snapshot, coordinator: Coordinator | None, asynchronous: bool
    ) -> None:
        """Write and commit a checkpoint, and only then remove surplus ones."""
        target = staging.target
        try:
            before: Manifest | None = None
            with suppress(CheckpointError):  # a damaged checkpoint is about to be replaced
                before = files.read_manifest(target)
            snapshot.write(staging.folder)
            checksums: dict[str, str] = {}
            if coordinator is not None:
                with nullcontext() if asynchronous else waiting():  # a thread waits while the rank trains
                    checksums = coordinator.wait_for_reports()
            manifest = snapshot.manifest.write(staging.folder, checksums)
            staging.commit(before.files.keys() - manifest.files.keys() if before is not None else ())
        except BaseException as error:
            _give_up(coordinator, staging, target, error)
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(_not_saved(target, 0, error)) from error
        if coordinator is not None:
            coordinator.announce(SaveOutcome())
            coordinator.wait_until_known()
        self._remove_oldest(target)

    def _remove_oldest(self, newest: Path) -> None:
        limit = self._project.total_limit
        if not self._project.automatic_checkpoint_naming or limit is None:
            return
        # Remove only folders that save_state created. A link or another folder of that name may hold anything.
        others = [
            path
            for path in files.in_order(newest.parent)
            if path != newest and (path / files.MANIFEST).is_file() and not path.is_symlink()
        ]
        for path in others[: max(0, len(others) + 1 - limit)]:
            try:
                files.remove_folder(path)
            except OSError as error:  # training can continue: the new checkpoint is complete
                warn(
                    f"the older checkpoint {path} exceeds total_limit={limit}, but could not be removed: {error}"
                )

    # --- other ranks ---------------------------------------------------------------------------------------------

    def _save_as_other(self, safe: bool, asynchronous: bool) -> Path:
        """Write this rank's files to the folder that rank 0 chose; return the checkpoint's final path."""
        participant: Participant | None = self._side_of_round()
        if participant is None:
            raise CheckpointError(
                f"rank {self._live.rank} has left the process group and can no longer save; call save_state "
                "before end_training"
            )
        round = participant.arrive()
        if not round.folder:
            participant.outcome(round.number).check()
        target = Path(round.target)
        try:
            with self._reporting_errors(participant, round):
                copies = self._copies if asynchronous else None
                snapshot = collect(self._live, self._folder_of(round), safe, copies, participant)
        except CheckpointError:
            if not asynchronous or participant.failure_of(round.number) is None:
                raise
            # Rank 0 has given up, and raises the error when it waits for the checkpoint. Do the same on this rank.
            self._start_thread(target, participant.outcome(round.number).check)
            return target
        self._project.iteration = round.iteration
        write = partial(self._contribute, snapshot, participant, round)
        if asynchronous:
            self._start_thread(target, write)
        else:
            with waiting():
                write()
        return target

    def _folder_of(self, round: Round) -> Path:
        """Return the folder that rank 0 created for the files of a round."""
        folder = Path(round.folder)
        if not folder.is_dir():
            raise CheckpointError(
                f"checkpoint {round.target} was not saved; nothing was changed. Rank {self._live.rank} can't find "
                f"{folder.absolute()}, which rank 0 created; all machines must share the folder"
            )
        return folder

    def _contribute(self, snapshot: Snapshot, participant: Participant, round: Round) -> None:
        """Write this rank's files, and wait until all ranks have written theirs."""
        with self._reporting_errors(participant, round):
            try:
                snapshot.write(Path(round.folder))
                checksums = self._checksums_of_own(snapshot, Path(round.folder))
            except OSError as error:  # a full disk
                raise CheckpointError(_not_saved(Path(round.target), self._live.rank, error)) from error
        participant.report(round.number, checksums=checksums)
        participant.outcome(round.number).check()

    def _checksums_of_own(self, snapshot: Snapshot, folder: Path) -> dict[str, str]:
        """Return checksums of this rank's files. The rank that wrote a file can read it quickly from the cache."""
        pattern = self._live.strategy.shard_files.format(rank=self._live.rank)
        shards = [path.relative_to(folder).as_posix() for path in folder.glob(pattern)] if pattern else []
        return files.checksums(folder, [*snapshot.objects, *shards])

    @contextmanager
    def _reporting_errors(self, participant: Participant, round: Round) -> Iterator[None]:
        """Report an error in the block to rank 0; if rank 0 has already given up, raise rank 0's error instead."""
        try:
            yield
        except BaseException as error:
            failure = participant.failure_of(round.number)
            problem = failure or _not_saved(Path(round.target), self._live.rank, error)
            participant.report(round.number, problem)
            if failure is not None:  # the main process has given up, and the folder is gone
                raise CheckpointError(failure) from error
            raise

    # --- in a thread ---------------------------------------------------------------------------------------------

    def _start_thread(self, target: Path, write: Callable[[], None]) -> None:
        def run() -> None:
            try:
                write()
            except BaseException as error:  # wait() raises it later
                self._thread_error = error
                if self._live.rank == 0:  # rank 0 knows all ranks' problems
                    context.current().emit(Note(rank=0, text=str(error)))

        # The thread is not a daemon: the process must wait for it before it exits.
        self._thread = threading.Thread(target=run, name=f"nblaunch-save-{target.name}")
        self._thread.start()

    def _warn_of_open_window(self) -> None:
        accumulation = self._live.preparer.accumulation
        window = accumulation.open_window
        if window is not None:
            where = f"micro-step {window.size} of {accumulation.num_steps}"
            if window.modules:
                where += f" for {', '.join(type(model).__name__ for model in window.modules)}"
            warn(
                f"save_state was called during gradient accumulation ({where}): accumulated gradients are not saved. "
                "To be able to resume training exactly where it stopped, save when accelerator.sync_gradients is True."
            )


def _give_up(
    coordinator: Coordinator | None, staging: Staging | None, target: Path, error: BaseException
) -> None:
    """Publish why the checkpoint is not saved, and remove the files written so far."""
    outcome = SaveOutcome("CheckpointError", _not_saved(target, 0, error))
    # The path is a file: raise the same ValueError on all ranks.
    if isinstance(error, ValueError) and staging is None:
        outcome = SaveOutcome("ValueError", str(error))
    try:
        if coordinator is not None:
            coordinator.announce(outcome)  # before removing the folder, which other ranks may be looking for
    finally:
        if staging is not None:
            staging.drop()
    if coordinator is not None and isinstance(error, Exception):
        coordinator.wait_until_known()
        if staging is not None:
            staging.drop()  # again, because another rank may have written to it in the meantime


def _not_saved(target: Path, rank: int, error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"checkpoint {target} was not saved; nothing was changed. Rank {rank}: {type(error).__name__}: {error}"
