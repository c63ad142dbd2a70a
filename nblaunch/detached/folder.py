"""The folder of a detached job: everything about it, readable after any crash.

    <folder of jobs>/               mode 0700, of this user; nothing in it is read otherwise. See ``home.py``
      .key                          of the user: signs the pickles below
      train-3f9a2c/                 a job's log folder, with what other jobs have (``launcher/joblog.py``), and
        record.json                 what was launched, and by which process (``record.py``)
        launch                      the rest of it, for those that attach: a signed pickle
        events                      what has happened, appended as it happens: the packets of ``wire/channel.py``, each
                                    signed; but lines, which a follower reads from the logs of the ranks, and samples
        snapshot                    the last readings of the board, and the last samples of memory and use of devices:
                                    a signed pickle, replaced several times a second
        result, weights, error      what the ranks returned, trained weights, or why it failed: signed pickles
        end.json                    how the job ended
        end.reserve                 room for it, should the disk be full by then
        socket                      for requests, while the job process runs
        job.log                     what the job process printed

Files are replaced atomically, so that no reader sees half of one. ``events`` ends with
:class:`~nblaunch.events.JobEnded`, behind all other files.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from nblaunch.detached import home, record
from nblaunch.detached.record import End, Head, OtherFormat, Record
from nblaunch.detached.requests import Endpoint
from nblaunch.events import Event, Failed
from nblaunch.host import descriptors, files
from nblaunch.host.machine import ProcessState
from nblaunch.launcher.joblog import LogFolder
from nblaunch.spec import LaunchSpec
from nblaunch.wire import signing
from nblaunch.wire.board import SlotReading
from nblaunch.wire.pickling import payload

RECORD, END, END_RESERVE, EVENTS = "record.json", "end.json", "end.reserve", "events"
RESULT, WEIGHTS = "result", "weights"
MAX_END_BYTES = 1 << 16
_RETRY_S = 0.1


@dataclass(frozen=True)
class Launch:
    """What a process needs to attach, besides the record.

    Args:
        spec: settings of the launch, without the function and its arguments.
        registered_backend: the pickled backend, if it is not part of nblaunch.
        plan: the settings of the :class:`nblaunch.launcher.plan.LaunchPlan` of the launching process.
        sources: file name -> text of the notebook's cells, for tracebacks.
    """

    spec: LaunchSpec
    registered_backend: bytes
    plan: Mapping[str, Any]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Snapshot:
    """The present state of all ranks.

    Args:
        samples: the last sampled event of each kind and rank: memory, utilisation of devices.
    """

    time_s: float
    readings: Sequence[SlotReading]
    samples: Sequence[Event]


@dataclass(frozen=True)
class JobError:
    """The error that ended a job.

    Args:
        failed: with its text and frames as IPython shows it.
        notes: notes of an error that is shown as a worker's error; None = it is shown as an error of the launcher.
    """

    failed: Failed
    notes: Sequence[str] | None


_Pickled = TypeVar("_Pickled", Launch, Snapshot, JobError)
_NAMES = {Launch: "launch", Snapshot: "snapshot", JobError: "error"}


class Unusable(LookupError):
    """This process can't attach to a job.

    Args:
        status: status of the job in the list.
        reason: why, in a few words.
        message: the whole message.
        head: what can be read of the record of another version.
    """

    def __init__(self, status: str, reason: str, message: str, head: Head | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.head = head or Head()


class JobFolder(LogFolder):
    """The folder of a detached job. It is opened and checked for each access.

    Attributes:
        id: short name of the job.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.id = path.name
        self._user_key = b""

    def open(self) -> int:
        """Open the folder; return the descriptor.

        Raises:
            PermissionError: other users can change it.
            FileNotFoundError: it was removed.
        """
        place = self.path.parent
        try:
            with files.private_folder(place) as home_fd:
                self._user_key = self._user_key or home.read_key(home_fd)
                place = self.path
                return files.open_private(self.id, home_fd)
        except PermissionError as error:
            raise home.private_problem(place, error) from None

    @property
    def user_key(self) -> bytes:
        """The key of the user, once the folder was opened; empty = missing."""
        return self._user_key

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the folder within the block; raises the same as :meth:`open`."""
        fd = self.open()
        try:
            yield fd
        finally:
            os.close(fd)

    def opener(self, path: str, flags: int) -> int:
        """Open a file of the folder, as :func:`os.open`."""
        with self.opened() as fd:
            return os.open(Path(path).relative_to(self.path), flags, dir_fd=fd)

    def key(self, name: str) -> bytes:
        """Return the key of a file: it fits no other file, and no other job.

        Raises:
            ValueError: the key of the user is missing.
        """
        if not self._user_key:
            with self.opened():
                pass
        if not self._user_key:
            raise ValueError(f"its signing key is missing: {self.path.parent / home.KEY_NAME}")
        return signing.digest(self._user_key, os.fsencode(self.id), b"/", os.fsencode(name))

    def modified(self, name: str) -> tuple[int, int] | None:
        """Return a value that changes when a file is replaced, and its time in nanoseconds; None without the file."""
        try:
            with self.opened() as fd:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    # --- reading -------------------------------------------------------------------------------------------------

    def load_record(self) -> Record:
        """Return what was launched.

        Raises:
            Unusable: the record can't be read.
            LookupError: there is no job in the folder.
        """
        found = self._load_plain(RECORD, Record)
        if found is None:
            if self.modified(EVENTS) is None:
                raise LookupError(f"{self.path} is not the folder of a detached job")
            raise self._damaged(RECORD, "it is missing")
        if found.id != self.id:
            raise self._damaged(RECORD, f"it belongs to {found.id!r:.80}")
        return found

    def load_end(self) -> End | None:
        """Return how the job ended; None if nothing has recorded it.

        Raises:
            Unusable: it can't be read.
        """
        return self._load_plain(END, End)

    def load(self, cls: type[_Pickled]) -> _Pickled | None:
        """Return the value in the file for this type; None if it was not written yet.

        Raises:
            Unusable: it can't be read. Only data that is signed with the user's key is unpickled.
        """
        name = _NAMES[cls]
        sealed = self._read(name)
        if sealed is None:
            return None
        try:
            body = signing.unseal(sealed, self.key(name))
        except ValueError as error:
            raise self._damaged(name, str(error)) from None
        try:
            value = pickle.loads(body)
            if not isinstance(value, cls) or not all(hasattr(value, field.name) for field in fields(cls)):
                raise TypeError(f"{type(value).__name__} is not the expected {cls.__name__}")
        except Exception as error:  # this version has no such module, class, or member of an enum
            raise self.of_another_version(Head(), f"{name}: {type(error).__name__}: {error}") from None
        return value

    def load_payload(self, name: str) -> Any:
        """Return the result or the weights, with tensors on the pages of their file; None without the file.

        Raises:
            ValueError: the file is damaged, or is not signed with the key of the user.
            FileNotFoundError: the folder was removed.
            Exception: what unpickling raises.
        """
        with self.opened() as folder_fd:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
            except FileNotFoundError:
                return None
        try:
            return payload.load_mapped(fd, key=self.key(name))
        finally:
            os.close(fd)

    def process_state(self, known: Record | Head) -> ProcessState:
        """Return the state of the process that runs the job. If it has ended, its files are complete."""
        state = ProcessState.HIDDEN
        if known.process is not None:
            written = [self.modified(name) for name in (RECORD, EVENTS, _NAMES[Snapshot])]
            last_ns = max((time_ns for _, time_ns in filter(None, written)), default=0)
            state = known.process.state(last_ns / 1e9)
        if state is not ProcessState.HIDDEN:
            return state
        is_served = Endpoint(self.path, known.address).is_served()
        return ProcessState.RUNS if is_served else ProcessState.ENDED

    def _names(self) -> list[str]:
        with self.opened() as fd:
            return os.listdir(fd)

    def _read(self, name: str) -> bytes | None:
        """Return what a file holds; wait while this process has no descriptor left to open it with."""
        while True:
            try:
                with self.opened() as fd:
                    return files.read(fd, name)
            except FileNotFoundError:
                return None
            except OSError as error:
                if not descriptors.have_run_out(error):
                    raise
                time.sleep(_RETRY_S)

    def _load_plain(self, name: str, cls: type[Any]) -> Any:
        text = self._read(name)
        if text is None:
            return None
        try:
            return record.load(cls, text)
        except OtherFormat as error:
            raise self.of_another_version(error.head, f"{name}: {error}") from None
        except ValueError as error:
            raise self._damaged(name, str(error)) from None

    def _damaged(self, name: str, what: str) -> Unusable:
        reason = f"{name} can't be read: {what}"
        return Unusable("damaged", reason, f"{self.id} is damaged: {reason}. Its logs are in {self.path}")

    def of_another_version(self, head: Head, reason: str) -> Unusable:
        """Return the refusal to attach to a job of another version, with what works all the same."""
        its, own = head.launcher, sys.modules["nblaunch"].__version__
        text = (
            f"{self.id} was launched by {its}, and nblaunch {own} can't read its files ({reason}). Attach to it with "
            f"{its}. Here, `nblaunch logs {self.id}` prints its output, and `nblaunch stop {self.id}` ends it. Its "
            f"files are in {self.path}"
        )
        return Unusable("other version", reason, text, head)

    # --- writing: the job process alone ------------------------------------------------------------------------

    def write_plain(self, value: Record | End) -> None:
        """Replace the file for this type of value. The end can be written even to a full disk.

        Raises:
            OSError: the file can't be written.
        """
        data = record.dump(value)
        with self.opened() as fd:
            if isinstance(value, Record):
                files.replace(fd, RECORD, lambda file: file.write(data))
            else:
                files.replace_within(fd, END, data, END_RESERVE)

    def write(self, value: Launch | Snapshot | JobError) -> None:
        """Replace the file for this type of value.

        Raises:
            OSError: the disk is full, for example; the file is as it was.
        """
        name = _NAMES[type(value)]
        sealed = signing.seal(pickle.dumps(value), self.key(name))
        is_lasting = not isinstance(value, Snapshot)
        with self.opened() as fd:
            files.replace(fd, name, lambda file: file.write(sealed), is_lasting=is_lasting)

    def write_payload(self, name: str, value: Any) -> None:
        """Replace the file of the result or the weights.

        Raises:
            OSError: the disk is full, for example; the file is as it was.
            Exception: what pickling raises.
        """
        key = self.key(name)
        with self.opened() as fd:
            files.replace(
                fd,
                name,
                lambda file: payload.PayloadWriter(file.fileno()).append(
                    value, main_by_reference=True, key=key
                ),
            )
