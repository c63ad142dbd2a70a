"""The folder of a detached job: everything about it, readable after any crash.

    <jobs folder>/                  mode 0700, owned by this user; otherwise nothing in it is read
      .key                          the user's key, which signs the pickles below
      train-3f9a2c/                 a job's log folder, with the files of any job (``launcher/joblog.py``), and
        record.json                 what was launched, and the job process (``record.py``)
        launch                      the remaining facts, for processes that attach: a signed pickle
        events                      events, appended as they happen: signed packets of ``wire/channel.py``. Output is
                                    only in the ranks' logs, and samples are only in the snapshot
        snapshot                    the last readings of the board, and the last samples of memory and devices:
                                    a signed pickle, replaced several times a second
        result, weights, error      return values, trained weights, or the error: signed pickles
        end.json                    how the job ended
        end.reserve                 space reserved for end.json, in case the disk is full
        socket                      receives requests while the job process runs
        job.log                     output of the job process

Files are replaced atomically, so readers never see a partial file. ``events`` ends with
:class:`~nblaunch.events.JobEnded`, which is written after all other files.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import os
import pickle
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from nblaunch import env, events
from nblaunch.detached import record
from nblaunch.detached.record import End, Head, OtherFormat, Record
from nblaunch.detached.requests import Endpoint
from nblaunch.errors import LaunchError
from nblaunch.events import Event, Failed
from nblaunch.host import exhaustion, files
from nblaunch.host.machine import ProcessState
from nblaunch.launcher.joblog import LogFolder, log_root
from nblaunch.launcher.plan import LaunchPlan
from nblaunch.spec import LaunchSpec
from nblaunch.wire import signing
from nblaunch.wire.board import SlotReading
from nblaunch.wire.pickling import payload

# --- the folder that contains the folders of jobs, and the user's key -------------------------------------------------

#     $NBLAUNCH_LOG_DIR/detached              if set
#     $XDG_STATE_HOME/nblaunch/jobs           otherwise; by default ~/.local/state/nblaunch/jobs
#     <temporary folder>/nblaunch-<uid>/detached      if the user has no home or can't write there
#
# The temporary folder is the last resort: a restart may empty it, and tools that clean up temporary files remove old
# files.

KEY_NAME = ".key"
_KEY_BYTES = 32


@dataclass(frozen=True)
class Home:
    """The folder that contains the folders of new jobs.

    Args:
        path: path of the folder.
        key: the user's key, which signs the pickles in it.
        why_temporary: why the folder is temporary; empty if it is not.
    """

    path: Path
    key: bytes
    why_temporary: str = ""


def open_home() -> Home:
    """Return the folder for new jobs; create it if it does not exist.

    Raises:
        LaunchError: it can't be created.
        PermissionError: other users can change it.
    """
    if env.read("NBLAUNCH_LOG_DIR"):
        path = log_root() / "detached"
        return Home(path, _made_key(path))
    state, why = _state_folder()
    if state is not None:
        try:
            key = _made_key(state)
            if os.access(state, os.W_OK):
                return Home(state, key)
            why = f"{state} is not writable"  # although it has a key, from an earlier job
        except PermissionError as error:
            if error.errno is None:  # the folder exists and is open to other users
                raise
            why = f"{state} is not writable: {error.strerror}"
        except OSError as error:
            why = f"{state} is not writable: {files.reason_of(state, error)}"
    path = log_root() / "detached"
    return Home(path, _made_key(path), why)


def present_homes() -> list[Path]:
    """Return the folders that may contain jobs, whether they exist or not."""
    if env.read("NBLAUNCH_LOG_DIR"):
        return [log_root() / "detached"]
    state, _ = _state_folder()
    try:
        temporary = Path(tempfile.gettempdir()) / f"nblaunch-{os.getuid()}"
    except FileNotFoundError:  # no temporary folder is writable
        return [state] if state is not None else []
    if state is None:
        return [temporary / "detached"]
    # Another user may have created the temporary folder, which has jobs only if the state folder could not be used.
    is_own = temporary.is_dir() and temporary.stat().st_uid == os.getuid()
    return [state, temporary / "detached"] if is_own else [state]


def private_problem(path: Path, error: PermissionError) -> PermissionError:
    """Return the error for a folder that :func:`files.open_private` rejected, with advice."""
    if error.errno is not None:  # a system error: this user may not enter it
        return error
    advice = (
        f"If only you have written to this folder, run: chmod 700 {path}"
        if path.stat().st_uid == os.getuid() and path.is_dir()
        else "Choose another place for jobs with NBLAUNCH_LOG_DIR."
    )
    return PermissionError(
        f"{path} {error}, so nothing in it was read: jobs are private to their user. {advice}"
    )


def _state_folder() -> tuple[Path | None, str]:
    """Return the jobs folder in the user's state folder; if there is none, return None and the reason."""
    chosen = Path(env.read("XDG_STATE_HOME"))
    if chosen.is_absolute():  # relative paths are ignored (XDG Base Directory Specification)
        return chosen / "nblaunch" / "jobs", ""
    try:
        home = Path.home()
    except RuntimeError:
        return (
            None,
            f"HOME is not set, and user {os.getuid()} has no home folder in the system's user database",
        )
    if not home.is_absolute():
        return None, f"HOME={str(home)!r} is not an absolute path"
    return home / ".local" / "state" / "nblaunch" / "jobs", ""


def _made_key(path: Path) -> bytes:
    """Return the user's key from the jobs folder; create the folder and the key if they are missing.

    Raises:
        OSError: the folder or the key can't be created. An error without an errno means that the folder exists but
            other users can change it.
        LaunchError: the key is damaged.
    """
    files.make_private_folder(path)
    try:
        with files.private_folder(path) as fd:
            key = files.make_once(fd, KEY_NAME, secrets.token_bytes(_KEY_BYTES))
    except PermissionError as error:
        raise private_problem(path, error) from None
    if len(key) != _KEY_BYTES:
        raise LaunchError(
            f"the key {path / KEY_NAME} is damaged ({len(key)} bytes, not {_KEY_BYTES}): remove it. Results of "
            "earlier jobs can't be read after that"
        )
    return key


# --- the folder of a job ----------------------------------------------------------------------------------------------

RECORD, END, END_RESERVE, EVENTS = "record.json", "end.json", "end.reserve", "events"
RESULT, WEIGHTS, ERROR = "result", "weights", "error"
MAX_END_BYTES = 1 << 16


@dataclass(frozen=True)
class Launch:
    """The facts that a process needs to attach, in addition to the record.

    Args:
        spec: settings of the launch, without the function and its arguments.
        registered_backend: the pickled backend, if it is not part of nblaunch.
        plan: the settings in the launching process's :class:`nblaunch.launcher.plan.LaunchPlan`.
        sources: file name -> text of the notebook's cells, for tracebacks.
    """

    spec: LaunchSpec
    registered_backend: bytes
    plan: Mapping[str, Any]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Snapshot:
    """The current state of all ranks.

    Args:
        samples: each rank's last event of every sampled kind (host memory, device use).
    """

    time_s: float
    readings: Sequence[SlotReading]
    samples: Sequence[Event]


@dataclass(frozen=True)
class JobError:
    """The error that ended a job.

    Args:
        failed: the error, with its text and frames as IPython shows them.
        notes: notes to show with a worker's error; None = the error is shown as the launcher's.
    """

    failed: Failed
    notes: Sequence[str] | None


_Pickled = TypeVar("_Pickled", Launch, Snapshot, JobError)
_NAMES = {Launch: "launch", Snapshot: "snapshot", JobError: ERROR}


class Unusable(LookupError):
    """This process can't attach to a job.

    Args:
        status: status of the job in the list.
        reason: the reason in a few words.
        message: the full message.
        head: the part of another version's record that this version can read.
    """

    def __init__(self, status: str, reason: str, message: str, head: Head | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.head = head or Head()


class JobFolder(LogFolder):
    """The folder of a detached job. It is opened and checked for each access.

    Args:
        path: path of the folder.
        patience_s: how long a reader waits while this process has no free descriptor.

    Attributes:
        id: short name of the job.
        user_key: the user's key, available once the folder has been opened; empty if it is missing.
    """

    def __init__(self, path: Path, patience_s: float = 10.0) -> None:
        super().__init__(path)
        self.id = path.name
        self._patience_s = patience_s
        self.user_key = b""

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the folder for the duration of the block, and yield its descriptor.

        Raises:
            PermissionError: other users can change it.
            FileNotFoundError: the folder was removed.
        """
        place = self.path.parent
        try:
            with files.private_folder(place) as home_fd:
                self.user_key = self.user_key or files.read(home_fd, KEY_NAME) or b""
                place = self.path
                fd = files.open_private(self.id, home_fd)
        except PermissionError as error:
            raise private_problem(place, error) from None
        try:
            yield fd
        finally:
            os.close(fd)

    def opener(self, path: str, flags: int) -> int:
        """Open a file in the folder, like :func:`os.open`."""

        def opened() -> int:
            with self.opened() as fd:
                return os.open(Path(path).relative_to(self.path), flags, dir_fd=fd)

        return exhaustion.when_free(opened, self._patience_s)

    def key(self, name: str) -> bytes:
        """Return the key that signs a file; it is not valid for other files or jobs.

        Raises:
            ValueError: the user's key is missing.
        """
        if not self.user_key:
            with self.opened():
                pass
        if not self.user_key:
            raise ValueError(f"its signing key is missing: {self.path.parent / KEY_NAME}")
        return signing.digest(self.user_key, os.fsencode(self.id), b"/", os.fsencode(name))

    def modified(self, name: str) -> tuple[int, int] | None:
        """Return a value that changes when a file is replaced, and its modification time in ns; None if missing."""

        def status() -> os.stat_result:
            with self.opened() as fd:
                return os.stat(name, dir_fd=fd, follow_symlinks=False)

        try:
            file_status = exhaustion.when_free(status, self._patience_s)
        except FileNotFoundError:
            return None
        return file_status.st_ino, file_status.st_mtime_ns

    # --- reading -------------------------------------------------------------------------------------------------

    def load_record(self) -> Record:
        """Return the record of the job: what was launched.

        Raises:
            Unusable: the record can't be read.
            LookupError: there is no job in the folder.
        """
        record = self._load_plain(RECORD, Record)
        if record is None:
            if self.modified(EVENTS) is None:
                raise LookupError(f"{self.path} is not the folder of a detached job")
            raise self.damaged(RECORD, "it is missing")
        if record.id != self.id:
            raise self.damaged(RECORD, f"it belongs to {record.id!r:.80}")
        return record

    def load_end(self) -> End | None:
        """Return how the job ended; None if its end has not been recorded.

        Raises:
            Unusable: it can't be read.
        """
        return self._load_plain(END, End)

    def load(self, cls: type[_Pickled]) -> _Pickled | None:
        """Return the value of this type from its file; None if the file has not been written yet.

        Raises:
            Unusable: the file can't be read. Only data that is signed with the user's key is unpickled.
        """
        name = _NAMES[cls]
        sealed = self._read(name)
        if sealed is None:
            return None
        try:
            body = signing.unseal(sealed, self.key(name))
        except ValueError as error:
            raise self.damaged(name, str(error)) from None
        try:
            value = pickle.loads(body)
            if not isinstance(value, cls) or not all(hasattr(value, field.name) for field in fields(cls)):
                raise TypeError(f"{type(value).__name__} is not the expected {cls.__name__}")
        except Exception as error:  # this version lacks the module, class or enum member
            raise self.of_another_version(Head(), f"{name}: {type(error).__name__}: {error}") from None
        return value

    def load_payload(self, name: str) -> Any:
        """Return the result or the weights, with tensors mapped from their file; None if the file is missing.

        Raises:
            ValueError: the file is damaged, or is not signed with the user's key.
            FileNotFoundError: the folder was removed.
            Exception: any error during unpickling.
        """
        if self.modified(name) is None:
            with self.opened():  # raises if the folder is missing
                return None
        fd = self.opener(str(self.path / name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return payload.load_mapped(fd, key=self.key(name))
        finally:
            os.close(fd)

    def process_state(self, record: Record | Head) -> ProcessState:
        """Return the state of the process that runs the job. If it has ended, its files are complete."""
        state = ProcessState.HIDDEN
        if record.process is not None:
            written = [self.modified(name) for name in (RECORD, EVENTS, _NAMES[Snapshot])]
            last_ns = max((time_ns for _, time_ns in filter(None, written)), default=0)
            state = record.process.state(last_ns / 1e9)
        if state is not ProcessState.HIDDEN:
            return state
        is_served = Endpoint(self.path, record.address).is_served()
        return ProcessState.RUNS if is_served else ProcessState.ENDED

    def _names(self) -> list[str]:
        with self.opened() as fd:
            return os.listdir(fd)

    def _read(self, name: str) -> bytes | None:
        def read() -> bytes | None:
            with self.opened() as fd:
                return files.read(fd, name)

        try:
            return exhaustion.when_free(read, self._patience_s)
        except FileNotFoundError:
            return None

    def _load_plain(self, name: str, cls: type[Any]) -> Any:
        text = self._read(name)
        if text is None:
            return None
        try:
            return record.load(cls, text)
        except OtherFormat as error:
            raise self.of_another_version(error.head, f"{name}: {error}") from None
        except ValueError as error:
            raise self.damaged(name, str(error)) from None

    def damaged(self, name: str, what: str) -> Unusable:
        """Return the error for a file that can't be read."""
        reason = f"{name} can't be read: {what}"
        return Unusable("damaged", reason, f"{self.id} is damaged: {reason}. Its logs are in {self.path}")

    def of_another_version(self, head: Head, reason: str) -> Unusable:
        """Return the error for a job launched by another version, with the commands that still work."""
        launcher, own_version = head.launcher, sys.modules["nblaunch"].__version__
        text = (
            f"{self.id} was launched by {launcher}, and nblaunch {own_version} can't read its files ({reason}). Attach "
            f"to it with {launcher}. Here, `nblaunch logs {self.id}` prints its output, and `nblaunch stop {self.id}` "
            f"ends it. Its files are in {self.path}"
        )
        return Unusable("other version", reason, text, head)

    # --- writing, only by the job process ------------------------------------------------------------------------

    def write_plain(self, value: Record | End) -> None:
        """Replace the file for this type of value. An :class:`End` can be written even if the disk is full.

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
            OSError: writing failed, for example because the disk is full; the file is unchanged.
        """
        name = _NAMES[type(value)]
        sealed = signing.seal(pickle.dumps(value), self.key(name))
        is_lasting = not isinstance(value, Snapshot)
        with self.opened() as fd:
            files.replace(fd, name, lambda file: file.write(sealed), is_lasting=is_lasting)

    def write_payload(self, name: str, value: Any) -> None:
        """Replace the result file or the weights file.

        Raises:
            OSError: writing failed, for example because the disk is full; the file is unchanged.
            Exception: any error during pickling.
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


# --- the layout of the pickles ----------------------------------------------------------------------------------------


@cache
def own_layout() -> str:
    """Return the layout of this process's pickles in a job's folder, as a short string.

    It lists their classes with the names and types of the fields, so the version of nblaunch does not matter. A process
    attaches only to jobs with its own layout, because an event with missing or different fields would cause an error
    somewhere in a dashboard.
    """
    texts: dict[Any, str] = {}
    for cls in (Launch, LaunchPlan, Snapshot, JobError, *vars(events).values()):
        if inspect.isclass(cls):
            _add_layout(cls, texts)
    return hashlib.sha256("\n".join(sorted(texts.values())).encode()).hexdigest()[:16]


def _add_layout(hint: Any, texts: dict[Any, str]) -> None:
    """Add the classes that ``hint`` names, with the classes of their fields."""
    for argument in get_args(hint):
        _add_layout(argument, texts)
    if not inspect.isclass(hint) or hint in texts:
        return
    if issubclass(hint, enum.Enum):
        texts[hint] = f"{hint.__qualname__}: {[(member.name, member.value) for member in hint]}"
    elif dataclasses.is_dataclass(hint):
        fields = dataclasses.fields(hint)
        texts[hint] = (
            f"{hint.__module__}.{hint.__qualname__}: {[(field.name, field.type) for field in fields]}"
        )
        hints = get_type_hints(hint)
        for field in fields:
            _add_layout(hints[field.name], texts)
