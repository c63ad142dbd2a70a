"""Rounds in which ranks save together: a collective without a deadline, through the store of their process group.

    rank 0    opens a round ── who comes? ── decides: who is present, which folder ──> reports ── writes ── outcome
    others    where they are: in save_state, or in which collective      ──> write their own files, report ──> outcome

Rank 0 waits until every other rank has come or has *passed*. A rank has passed if it has begun a collective that rank 0
has not: it waits there for rank 0, so it can't come to this round. That is how ``if accelerator.is_main_process:
save_state()`` is recognised, without a clock. A rank that has left the process group has passed as well. The counts are
those of torch's process groups (the sequence numbers of its flight recorder), so they cover the collectives of wrappers
such as DistributedDataParallel and those that scripts call themselves. Point-to-point messages over gloo are counted,
too (torch 2.13); where only some ranks exchange them, ``main_process_only=True`` is the way to save on rank 0 alone.

In every rank but the first, a thread answers rank 0 while the rank itself waits in a collective. What travels is JSON
of a fixed shape: any process that reaches the store may write there, so its values are never executed.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nblaunch.backends.base import Backend
from nblaunch.errors import CheckpointError
from nblaunch.training.joining import is_distributed, waiting
from nblaunch.wire import schema

_PREFIX = "nblaunch/saves"
_BUSY_S = (0.001, 0.05)  # first and longest pause between two looks at the store while something is awaited
_IDLE_S = 0.2  # pause while nothing is: how late a rank in a collective notices that rank 0 saves
_STOP_S = 5.0  # for the last message of a process that ends
_LEFT = "checkpoint {} was not saved; nothing was changed. Rank {} has left while it was saving"

Message = TypeVar("Message", "Round", "Whereabouts", "Report", "SaveOutcome")


# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One save, as rank 0 announces it."""

    number: int  # counts the saves of the process group, from 1
    is_decided: bool = False  # the ranks that take part are fixed
    present: tuple[int, ...] = ()  # the other ranks that take part
    folder: str = ""  # where they write to; empty if the save has failed, see its SaveOutcome
    target: str = ""  # the checkpoint's folder at last
    iteration: int = 0  # the number in its automatic name


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is."""

    number: int  # the round that this answers
    is_present: bool  # it has come to ``save_state``
    has_left: bool  # it has left the process group, or its process ends
    num_read: int  # the last round whose outcome it has read
    collectives: dict[str, int]  # how many it has begun, by process group


@dataclass(frozen=True)
class Report:
    """What a rank has contributed to a round: the checksums of its files, or the problem that it had."""

    number: int
    problem: str = ""
    checksums: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveOutcome:
    """How a round ended; an empty ``error_type``: the checkpoint is written."""

    error_type: str = ""
    error: str = ""

    def check(self) -> None:
        """Raise what rank 0 has raised: a ValueError for what the caller did wrong, else a CheckpointError."""
        if self.error_type:
            raise (ValueError if self.error_type == "ValueError" else CheckpointError)(self.error)


class _Mail:
    """Messages of this module in a store, through a connection of their own where the store can give one."""

    def __init__(self, store: Any) -> None:
        # Other threads may wait inside the store for what only rank 0 can do, and hold a shared connection (NCCL's
        # start does). Stores of torch 2.5 to 2.7 have no clone.
        own = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore(_PREFIX, own)

    def post(self, key: str, message: Round | Whereabouts | Report | SaveOutcome) -> None:
        self._store.set(key, schema.dump(message).decode())

    def read(self, key: str, kind: type[Message]) -> Message | None:
        """Return the message under ``key``; None before there is one."""
        if not self._store.check([key]):
            return None
        text = self._store.get(key)
        try:
            return schema.load(kind, text)
        except ValueError as error:
            raise CheckpointError(
                f"the job's store holds {len(text)} bytes under {_PREFIX}/{key} that no rank has written there. "
                "Another program writes to the store; was it given this job's address?"
            ) from error


class _Side:
    """What both sides have: their messages, and the process group that they belong to."""

    def __init__(self, backend: Backend) -> None:
        # The store has no public name; torch's own modules take it so, since 1.13 at least.
        self._mail = _Mail(dist.distributed_c10d._get_default_store())
        self._group = weakref.ref(dist.group.WORLD)
        self._backend = backend

    def is_current(self) -> bool:
        """Return whether this process is still in that group."""
        return is_distributed() and self._group() is dist.group.WORLD


# --- rank 0 -----------------------------------------------------------------------------------------------------------


class Coordinator(_Side):
    """Rank 0's side, one round after the other."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._held: Any = None
        self._number = 0
        self._is_decided = False
        self._target = ""
        self.present: list[int] = []

    def open(self) -> list[int]:
        """Open a round and wait for the other ranks; returns those that have passed. ``present`` has the others."""
        # It may live in this process, and would end with the group.
        self._held = dist.distributed_c10d._get_default_store()
        before = self._mail.read("round", Round)
        self._number = before.number + 1 if before is not None else 1
        self._is_decided, self.present = False, []
        own = _collectives_begun(self._backend)
        self._mail.post("round", Round(self._number))
        pending, passed = list(range(1, dist.get_world_size())), []
        pause = _Pause()
        with waiting():
            while pending:
                for rank in list(pending):
                    found = self._mail.read(f"rank/{rank}", Whereabouts)
                    if found is None or not (found.has_left or found.number == self._number):
                        continue
                    is_ahead = any(
                        count > own.get(group, count) for group, count in found.collectives.items()
                    )
                    if found.has_left or (not found.is_present and is_ahead):
                        passed.append(rank)
                    elif found.is_present:
                        self.present.append(rank)
                    else:
                        continue
                    pending.remove(rank)
                pause.sleep()
        self.present.sort()
        return sorted(passed)

    def begin(self, folder: str, target: str, iteration: int) -> None:
        """Let the present ranks write to ``folder``."""
        self._is_decided, self._target = True, target
        self._mail.post("round", Round(self._number, True, tuple(self.present), folder, target, iteration))

    def checksums(self) -> dict[str, str]:
        """Return checksums of all files of the present ranks, once these are written; raise where one could not."""
        reports: dict[int, Report] = {}
        pause = _Pause()
        while len(reports) < len(self.present):
            for rank in set(self.present) - reports.keys():
                where = self._mail.read(f"rank/{rank}", Whereabouts)
                report = self._mail.read(f"report/{rank}", Report)
                if report is not None and report.number == self._number:
                    reports[rank] = report
                elif where is not None and where.has_left:  # before it has reported
                    reports[rank] = Report(self._number, _LEFT.format(self._target, rank))
            pause.sleep()
        for _, report in sorted(reports.items()):
            if report.problem:
                raise CheckpointError(report.problem)
        return {name: value for report in reports.values() for name, value in report.checksums.items()}

    def wait_until_known(self) -> None:
        """Wait until the present ranks have the outcome: the store may be this process's own, and end with it."""
        pause = _Pause()
        while not all(self._is_through(rank) for rank in self.present):
            pause.sleep()
        self._held = None

    def announce(self, outcome: SaveOutcome) -> None:
        """Publish the outcome."""
        self._mail.post(f"outcome/{self._number}", outcome)
        if not self._is_decided:
            self._is_decided = True
            self._mail.post("round", Round(self._number, True, tuple(self.present)))

    def _is_through(self, rank: int) -> bool:
        found = self._mail.read(f"rank/{rank}", Whereabouts)
        return found is not None and (found.has_left or found.num_read >= self._number)


class _Pause:
    """Pauses between looks at the store, short ones first; one long wait would hold an interrupt back."""

    def __init__(self) -> None:
        self.next_s = _BUSY_S[0]

    def sleep(self) -> None:
        time.sleep(self.next_s)
        self.lengthen()

    def lengthen(self) -> None:
        self.next_s = min(2 * self.next_s, _BUSY_S[1])


# --- the others -------------------------------------------------------------------------------------------------------


class Participant(_Side):
    """Another rank's side, and the thread that answers rank 0 meanwhile; it ends with the process group."""

    def __init__(self, backend: Backend, rank: int) -> None:
        super().__init__(backend)
        self._rank = rank
        self._changed = threading.Condition()  # guards what follows
        self._is_present = False
        self._round: Round | None = None
        self._handled = 0
        self._awaited = 0
        self._num_read = 0
        self._outcomes: dict[int, SaveOutcome] = {}
        self._lost: Exception | None = None
        self._is_stopping = False
        self._has_ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nblaunch-saves", daemon=True)
        self._thread.start()
        # Not atexit, which a process of multiprocessing leaves out. It does nothing in forked children.
        self._finalizer = Finalize(None, self.leave, exitpriority=10)

    def arrive(self) -> Round:
        """Come to a round, and wait until rank 0 has decided on it."""
        try:
            with waiting(), self._changed:
                self._is_present, self._round = True, None
                self._wake.set()
                while self._round is None:
                    self._check_lost()
                    self._changed.wait()
                return self._round
        finally:
            self._is_present = False

    def report(self, number: int, problem: str = "", checksums: Mapping[str, str] | None = None) -> None:
        """Let rank 0 know what this rank has done for round ``number``."""
        self._mail.post(f"report/{self._rank}", Report(number, problem, dict(checksums or {})))

    def outcome(self, number: int) -> SaveOutcome:
        """Return how round ``number``, in which this rank was present, has ended; waits for it."""
        with waiting(), self._changed:
            while number not in self._outcomes:
                self._check_lost()
                self._changed.wait()
            return self._outcomes.pop(number)

    def failure_of(self, number: int) -> str | None:
        """Return why rank 0 has given up round ``number``; None where it has not, so far."""
        found = self._mail.read(f"outcome/{number}", SaveOutcome)
        return found.error if found is not None and found.error_type else None

    def leave(self) -> None:
        """Let rank 0 know that this rank comes no more."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join(_STOP_S)

    def _check_lost(self) -> None:
        if self._lost is not None:
            if isinstance(self._lost, CheckpointError):
                raise self._lost
            raise CheckpointError(
                f"rank {self._rank} waits in save_state, but the job's store is gone ({self._lost}). Has rank 0, or "
                "the launcher, ended before? Every rank that is to save must call save_state as often as rank 0"
            ) from self._lost
        if self._has_ended:
            raise CheckpointError(f"rank {self._rank} can't save: it has left the process group")

    def _run(self) -> None:
        try:
            self._answer()
        except Exception as error:  # raised where a message is awaited
            self._lost = error
        finally:
            with suppress(RuntimeError):  # the store may have gone with its host
                self._post(self._handled, {}, has_left=True)
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _answer(self) -> None:
        pause = _Pause()
        while self.is_current() and not self._is_stopping:
            is_busy = self._look(_collectives_begun(self._backend))
            if self._wake.wait(pause.next_s if is_busy else _IDLE_S) or not is_busy:
                self._wake.clear()
                pause = _Pause()
            else:
                pause.lengthen()

    def _look(self, collectives: dict[str, int]) -> bool:
        """Answer rank 0; returns whether something is awaited."""
        current = self._mail.read("round", Round)
        is_busy = self._is_present
        if current is not None and current.number > self._handled:
            if current.is_decided:
                with self._changed:
                    self._handled = current.number
                    if self._rank in current.present:
                        self._is_present, self._round, self._awaited = False, current, current.number
                        self._changed.notify_all()
            else:
                is_busy = True
                self._post(current.number, collectives)
        if self._awaited:
            found = self._mail.read(f"outcome/{self._awaited}", SaveOutcome)
            if found is None:
                return True
            with self._changed:
                self._outcomes[self._awaited] = found
                self._num_read, self._awaited = self._awaited, 0
                self._changed.notify_all()
            self._post(self._num_read, collectives)
        return is_busy

    def _post(self, number: int, collectives: dict[str, int], has_left: bool = False) -> None:
        # Whether it is present was true before its collectives were counted, if not for the last time.
        with self._changed:
            is_present = self._is_present
        found = Whereabouts(number, is_present, has_left, self._num_read, collectives)
        self._mail.post(f"rank/{self._rank}", found)


def _collectives_begun(backend: Backend) -> dict[str, int]:
    """Return how many collectives this rank has begun in each process group that rank 0 is in.

    Collectives that a device runs outside of torch's process groups are counted by its backend.
    """
    counts = {"device": backend.num_own_collectives}
    # Neither the list of groups nor their counts have public names; torch's flight recorder reads them so.
    groups: Collection[tuple[Any, str]] = list(dist.distributed_c10d._world.pg_names.items())
    for group, name in groups:
        try:
            if 0 not in dist.get_process_group_ranks(group):
                continue
            for device in sorted(str(kind) for kind in group._device_types):
                part = group._get_backend(torch.device(device))
                counts[f"{name}/{device}"] = part._get_sequence_number_for_group()
        except (RuntimeError, KeyError):  # it counts nothing, or has just been destroyed
            continue
    return counts
