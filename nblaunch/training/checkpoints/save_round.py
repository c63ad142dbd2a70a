"""Save rounds, in which ranks save together: collectives without deadlines, through the process group's store.

    rank 0    opens a round ── who arrives? ── fixes present ranks and folder ── writes ──> collects reports ── outcome
    others    answer: in save_state, or in another collective ── write their own files, report ──> outcome

Before the ranks write, they compare the states of registered objects, if rank 0 has any.

Rank 0 waits until every other rank has arrived or has *passed*. A rank has passed if it has begun a collective that
rank 0 has not begun. There, the rank is waiting for rank 0, so it can't reach this round. This is how nblaunch
recognises ``if accelerator.is_main_process: save_state()`` without a timeout. A rank that has left the process group
has also passed. torch's process groups count their collectives (the sequence numbers in torch's flight recorder). The
counts include collectives from wrappers such as DistributedDataParallel, and collectives that scripts call themselves.
They also include point-to-point messages over gloo (torch 2.13). If only some ranks exchange such messages, use
``main_process_only=True`` to save only on rank 0.

On every other rank, a thread answers rank 0 even while the rank is waiting in a collective. Until rank 0 wakes it, the
thread waits inside the store and uses no processor time. Messages are JSON with a fixed schema and are never executed,
because any process that can reach the store may write to it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nblaunch.backends.base import Backend
from nblaunch.errors import CheckpointError
from nblaunch.training.joining import is_distributed, waiting
from nblaunch.wire import schema

_PREFIX = "nblaunch/saves"
_BUSY_S = (0.001, 0.05)  # first and longest pause between reads of the store during a round
_IDLE_S = 0.2  # pause between reads outside rounds, if a thread can't wait inside the store
_RING_S = timedelta(days=7)  # timeout of one ``wait_for_ring`` call; poll(2) counts milliseconds in an int
_STOP_S = 5.0  # timeout for an exiting process's last message
_LEFT = "checkpoint {} was not saved; nothing was changed. Rank {} left while it was saving"

T = TypeVar("T")
Message = TypeVar("Message", "Round", "Whereabouts", "States", "Report", "SaveOutcome")


# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One save, which rank 0 announces."""

    number: int  # counts the process group's saves, from 1
    is_decided: bool = False  # whether ``present`` is final
    present: tuple[int, ...] = ()  # the other ranks that take part
    folder: str = ""  # where ranks write; empty if the save has failed (see its SaveOutcome)
    target: str = ""  # the checkpoint's final folder
    iteration: int = 0  # the number in its automatic name
    compares: bool = False  # whether the ranks compare States


@dataclass(frozen=True)
class Whereabouts:
    """A rank's reply when rank 0 asks where the rank is."""

    number: int  # the round that this reply is for
    is_present: bool  # the rank has called ``save_state``
    has_left: bool  # the rank has left the process group, or its process is exiting
    collectives: dict[str, int]  # number of collectives that it has begun, by process group


@dataclass(frozen=True)
class States:
    """Fingerprints of a rank's registered objects. Rank 0 posts its own after it has received all others."""

    number: int
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A present rank's report that it has written its files or failed to write them."""

    number: int
    problem: str = ""
    is_through: bool = False  # the rank has stopped waiting for the outcome
    checksums: dict[str, str] = field(default_factory=dict)  # checksums of its files, by name


@dataclass(frozen=True)
class SaveOutcome:
    """The outcome of a round; an empty ``error_type`` means that the checkpoint was written."""

    error_type: str = ""
    error: str = ""

    def check(self) -> None:
        """Raise the error that rank 0 raised: ValueError for an invalid argument, CheckpointError otherwise."""
        if self.error_type:
            raise (ValueError if self.error_type == "ValueError" else CheckpointError)(self.error)


class _Mail:
    """Posts and reads messages in a store, over a separate connection if possible.

    Args:
        store: the process group's store.
        is_shared: use the process group's own connection instead of a separate one.

    ``can_wait``: True if no other thread uses the connection, so :meth:`wait_for_ring` may be called.
    """

    def __init__(self, store: Any, *, is_shared: bool = False) -> None:
        # Other threads may block a shared connection while they wait for rank 0, as NCCL does when it starts. Stores in
        # torch 2.5 to 2.7 have no ``clone``.
        self.can_wait = not is_shared and hasattr(store, "clone")
        self._store = dist.PrefixStore(_PREFIX, store.clone() if self.can_wait else store)

    def ring(self, ranks: Iterable[int]) -> None:
        """Wake the threads of ``ranks`` that are in :meth:`wait_for_ring`, so that they read new messages."""
        with _reaching_the_store():
            for rank in ranks:
                self._store.set(f"bell/{rank}", "")

    def wait_for_ring(self, rank: int) -> None:
        """Wait until another rank rings for ``rank``; return immediately if one has rung since the last wait."""
        key = f"bell/{rank}"
        with _reaching_the_store():
            self._store.wait([key], _RING_S)
            self._store.delete_key(key)

    def post(self, key: str, message: Round | Whereabouts | States | Report | SaveOutcome) -> None:
        with _reaching_the_store():
            self._store.set(key, schema.dump(message).decode())

    def read(self, key: str, kind: type[Message]) -> Message | None:
        """Return the message under ``key``; None if there is none yet."""
        with _reaching_the_store():
            text = self._store.get(key) if self._store.check([key]) else None
        if text is None:
            return None
        try:
            return schema.load(kind, text)
        except ValueError as error:
            raise CheckpointError(
                f"the job's store holds {len(text)} bytes under {_PREFIX}/{key} that no rank wrote. Is another "
                "program using this job's address?"
            ) from error


@contextmanager
def _reaching_the_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            f"save_state can't reach the other ranks, because the job's store has ended ({error}), perhaps with rank "
            "0 or the launcher. Every rank must call save_state as often as rank 0 does"
        ) from error


def _wait_for(look: Callable[[], T | None]) -> T:
    """Call ``look`` until it returns a value other than None, and return this value. An interrupt can end the wait."""
    pause_s = _BUSY_S[0]
    while (value := look()) is None:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _BUSY_S[1])
    return value


class _Side:
    """Base class for both sides, with the process group, and the backend, which counts collectives."""

    def __init__(self, backend: Backend) -> None:
        self._group = weakref.ref(dist.group.WORLD)
        self._backend = backend

    def is_current(self) -> bool:
        """Return whether this process is still in the process group."""
        return is_distributed() and self._group() is dist.group.WORLD


def _default_store() -> Any:
    # There is no public function; torch's own modules have used this one since 1.13.
    return dist.distributed_c10d._get_default_store()


_side: Any = None


def side_of(backend: Backend, rank: int) -> Any:
    """Return this rank's side of the save rounds: a Coordinator on rank 0, otherwise a Participant.

    The first call in a process group creates this side.
    """
    global _side
    if _side is None or not _side.is_current():
        before, _side = _side, Coordinator(backend) if rank == 0 else Participant(backend, rank)
        if isinstance(before, Participant):
            before.leave()  # its thread may still be waiting in the previous group's store
    return _side


# --- rank 0 -----------------------------------------------------------------------------------------------------------


class Coordinator(_Side):
    """Rank 0's side of the save rounds. ``present`` lists the other ranks in the current round."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._mail = _Mail(_default_store())
        self._held: Any = None
        self._number = 0
        self._is_decided = False
        self._target = ""
        self.present: list[int] = []

    def open(self) -> list[int]:
        """Open a round, wait until every other rank has arrived or passed, and return the ranks that passed."""
        # Keep a reference to the store: this process may host it, and would otherwise close it with the group.
        self._held = _default_store()
        before = self._mail.read("round", Round)
        self._number = before.number + 1 if before is not None else 1
        self._is_decided, self.present = False, []
        begun = _collectives_begun(self._backend)
        self._mail.post("round", Round(self._number))
        others = range(1, dist.get_world_size())
        self._mail.ring(others)
        with waiting():
            has_come = {rank: _wait_for(partial(self._has_come, rank, begun)) for rank in others}
        self.present = [rank for rank in others if has_come[rank]]
        return [rank for rank in others if not has_come[rank]]

    def _has_come(self, rank: int, begun: Mapping[str, int]) -> bool | None:
        """Return True if a rank is present, False if it has passed, and None while it may still come."""
        whereabouts = self._mail.read(f"rank/{rank}", Whereabouts)
        if whereabouts is not None and whereabouts.has_left:
            return False
        if whereabouts is None or whereabouts.number != self._number:
            return None
        if whereabouts.is_present:
            return True
        is_ahead = any(count > begun.get(group, count) for group, count in whereabouts.collectives.items())
        return False if is_ahead else None

    def _has_left(self, rank: int) -> bool:
        where = self._mail.read(f"rank/{rank}", Whereabouts)
        return where is not None and where.has_left

    def begin(self, folder: str, target: str, iteration: int, compares: bool = False) -> None:
        """Make the ranks in ``present`` write to ``folder``; if ``compares`` is set, they compare states first."""
        self._is_decided, self._target = True, target
        round = Round(self._number, True, tuple(self.present), folder, target, iteration, compares)
        self._mail.post("round", round)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks are present, so that they can call collectives."""
        return len(self.present) == dist.get_world_size() - 1

    def states_of_others(self) -> dict[int, tuple[str, ...]]:
        """Wait for the ``States`` of the ranks in ``present``, and return the texts by rank.

        Raises:
            CheckpointError: a rank failed before it posted its states.
        """
        with waiting():
            return {rank: _wait_for(partial(self._states_of, rank)) for rank in self.present}

    def _states_of(self, rank: int) -> tuple[str, ...] | None:
        states = self._mail.read(f"states/{rank}", States)
        if states is not None and states.number == self._number:
            return states.texts
        report = self._report_of(rank)
        if report is not None:
            raise CheckpointError(report.problem)
        return None

    def publish_states(self, texts: Sequence[str]) -> None:
        """Post rank 0's states for the other ranks."""
        self._mail.post("states/0", States(self._number, tuple(texts)))

    def wait_for_reports(self) -> dict[str, str]:
        """Wait until the ranks in ``present`` have written their files; return the checksums that they report.

        Raises:
            CheckpointError: a rank could not write its files.
        """
        checksums: dict[str, str] = {}
        for report in [_wait_for(partial(self._report_of, rank)) for rank in self.present]:
            if report.problem:
                raise CheckpointError(report.problem)
            checksums |= report.checksums
        return checksums

    def _report_of(self, rank: int) -> Report | None:
        has_left = self._has_left(rank)  # checked first, because the rank may report and then leave
        report = self._mail.read(f"report/{rank}", Report)
        if report is not None and report.number == self._number:
            return report
        return Report(self._number, _LEFT.format(self._target, rank), is_through=True) if has_left else None

    def announce(self, outcome: SaveOutcome) -> None:
        """Post the outcome for the other ranks."""
        self._mail.post(f"outcome/{self._number}", outcome)
        if not self._is_decided:
            self._is_decided = True
            self._mail.post("round", Round(self._number, True, tuple(self.present)))

    def wait_until_known(self) -> None:
        """Wait until the ranks in ``present`` have read the outcome: the store may end with this process."""
        for rank in self.present:
            _wait_for(partial(self._is_through, rank))
        self._held = None

    def _is_through(self, rank: int) -> bool | None:
        report = self._report_of(rank)
        return self._has_left(rank) or (report is not None and report.is_through) or None


# --- other ranks ------------------------------------------------------------------------------------------------------


class Participant(_Side):
    """Another rank's side of the save rounds: a thread answers rank 0 until the process group ends."""

    def __init__(self, backend: Backend, rank: int) -> None:
        super().__init__(backend)
        self._rank = rank
        self._store = _default_store()
        self._thread_mail = _Mail(self._store)  # the thread waits in the store through this object
        # The lock is held while this rank replies that it is present, and while it takes the round to which
        # it replied.
        self._lock = threading.Lock()
        self._is_present = False
        self._num_taken = 0
        self.is_complete = False  # whether all ranks are present in the latest round
        self.compares = False  # whether the ranks compare states in the latest round
        self._is_stopping = False
        self._problem: CheckpointError | None = None  # the error that ended the thread
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._answer_rank_0, name="nblaunch-saves", daemon=True)
        self._thread.start()
        # multiprocessing's processes skip atexit, but run finalizers. Forked children of this process do not run this
        # one.
        self._finalizer = Finalize(None, self.leave, exitpriority=10)

    @cached_property
    def _mail(self) -> _Mail:
        return _Mail(self._store)

    def arrive(self) -> Round:
        """Wait until rank 0 has started a round with this rank, and return the round."""
        self._is_present = True
        self._wake.set()
        try:
            with waiting():
                return _wait_for(self._take_round)
        finally:
            self._is_present = False

    def _take_round(self) -> Round | None:
        """Return the new round if it is decided and this rank takes part in it; None otherwise."""
        with self._lock:
            newest = self._mail.read("round", Round)
            if newest is not None and newest.is_decided and newest.number > self._num_taken:
                self._num_taken = newest.number
                if self._rank in newest.present:
                    self._is_present = False
                    self.is_complete = len(newest.present) == dist.get_world_size() - 1
                    self.compares = newest.compares
                    return newest
        if not self._thread.is_alive():
            left = CheckpointError(f"rank {self._rank} can't save, because it has left the process group")
            raise self._problem or left
        return None

    def compare_states(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Send this rank's states to rank 0, and return rank 0's states.

        Raises:
            CheckpointError: rank 0 has given up.
        """
        self._mail.post(f"states/{self._rank}", States(self._num_taken, tuple(texts)))
        with waiting():
            return _wait_for(self._states_of_main)

    def _states_of_main(self) -> tuple[str, ...] | None:
        failure = self.failure_of(self._num_taken)
        if failure is not None:
            raise CheckpointError(failure)
        states = self._mail.read("states/0", States)
        return states.texts if states is not None and states.number == self._num_taken else None

    def report(self, number: int, problem: str = "", checksums: Mapping[str, str] | None = None) -> None:
        """Report to rank 0 that this rank's files for round ``number`` are written, or why they are not."""
        self._mail.post(f"report/{self._rank}", Report(number, problem, bool(problem), dict(checksums or {})))

    def outcome(self, number: int) -> SaveOutcome:
        """Wait until round ``number``, in which this rank was present, has ended; return its outcome."""
        try:
            return _wait_for(partial(self._mail.read, f"outcome/{number}", SaveOutcome))
        finally:
            self._mail.post(f"report/{self._rank}", Report(number, is_through=True))

    def failure_of(self, number: int) -> str | None:
        """Return the reason why rank 0 has given up round ``number``; None if it has not."""
        outcome = self._mail.read(f"outcome/{number}", SaveOutcome)
        return outcome.error if outcome is not None and outcome.error_type else None

    def leave(self) -> None:
        """Report to rank 0 that this rank will not join further rounds."""
        self._is_stopping = True
        self._wake.set()
        # Wake this rank's thread from another thread: a blocked connection must not keep this process alive.
        ringing = threading.Thread(target=self._ring_for_itself, name="nblaunch-saves-end", daemon=True)
        ringing.start()
        # Before Python 3.14, a thread that returns from C++ during interpreter shutdown aborts the process.
        deadline_s = time.monotonic() + _STOP_S
        for thread in (self._thread, ringing):
            thread.join(max(deadline_s - time.monotonic(), 0.0))

    def _ring_for_itself(self) -> None:
        with suppress(CheckpointError):  # the store may have ended with its host process
            _Mail(self._store, is_shared=True).ring([self._rank])

    def _answer_rank_0(self) -> None:
        pause_s = _BUSY_S[0]
        try:
            while self.is_current() and not self._is_stopping:
                is_busy = self._answer()
                if not is_busy and self._thread_mail.can_wait:
                    self._thread_mail.wait_for_ring(self._rank)
                    continue
                is_woken = self._wake.wait(pause_s if is_busy else _IDLE_S)
                self._wake.clear()
                pause_s = min(2 * pause_s, _BUSY_S[1]) if is_busy and not is_woken else _BUSY_S[0]
        except CheckpointError as error:
            self._problem = error  # arrive() raises it
        finally:
            with suppress(CheckpointError):  # the store may have ended with its host process
                self._thread_mail.post(f"rank/{self._rank}", Whereabouts(0, False, True, {}))

    def _answer(self) -> bool:
        """Post where this rank is if rank 0 is asking; return whether rank 0 is asking, or is about to."""
        collectives = _collectives_begun(self._backend)  # counted before checking whether the rank is present
        with self._lock:
            newest = self._thread_mail.read("round", Round)
            if newest is None or newest.is_decided:
                return self._is_present
            whereabouts = Whereabouts(newest.number, self._is_present, False, collectives)
            self._thread_mail.post(f"rank/{self._rank}", whereabouts)
            return True


def _collectives_begun(backend: Backend) -> dict[str, int]:
    """Return how many collectives this rank has begun in each of its process groups that include rank 0.

    The backend counts collectives that a device runs outside torch's process groups.
    """
    counts = {"device": backend.num_own_collectives}
    # torch has no public functions for the groups and their counts. Its flight recorder reads them in the same way.
    groups: Collection[tuple[Any, str]] = list(dist.distributed_c10d._world.pg_names.items())
    for group, name in groups:
        try:
            if 0 not in dist.get_process_group_ranks(group):
                continue
            for device in sorted(str(kind) for kind in group._device_types):
                part = group._get_backend(torch.device(device))
                counts[f"{name}/{device}"] = part._get_sequence_number_for_group()
        except (RuntimeError, KeyError):  # the group does not count, or has just been destroyed
            continue
    return counts
