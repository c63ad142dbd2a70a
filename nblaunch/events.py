"""What happens in a job, as plain data.

Workers send the first group to their launcher through a channel (``wire/channel.py``). The launcher adds the second
group and hands everything to its listeners: dashboards, logs, tests. Step counts do not travel as events; each rank
writes them to its slot of the shared board (``wire/board.py``), which the launcher samples.

``time_s`` is the worker's wall clock (``time.time()``) when the thing happened.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class WorkerState(enum.IntEnum):
    """What a worker is doing, as shown to users. Values are stored in the board."""

    STARTING = 0
    RUNNING = 1
    TRAINING = 2
    EVALUATING = 3
    WAITING = 4
    COMPILING = 5
    FINISHING = 6
    DONE = 7
    FAILED = 8
    STOPPED = 9

    @property
    def is_final(self) -> bool:
        return self >= WorkerState.DONE


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: ``code`` >= 0 is its exit code, ``code`` < 0 the negated signal number."""

    code: int

    @property
    def signal_name(self) -> str | None:
        """``"SIGKILL"`` and the like; None where the process was not killed by a signal."""
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    def __str__(self) -> str:
        return f"killed by {self.signal_name}" if self.code < 0 else f"exit code {self.code}"


@dataclass(frozen=True)
class FrameInfo:
    """One line of a worker's traceback.

    Args:
        filename: of the code.
        lineno: the line that was executing.
        name: of the function.
        line: the source text of that line, known even for notebook cells.
        is_user: not a library's or Python's own.
        first_lineno: where the function begins; 0 where unknown.
    """

    filename: str
    lineno: int
    name: str
    line: str = ""
    is_user: bool = True
    first_lineno: int = 0


@dataclass(frozen=True)
class ExceptionInfo:
    """An exception as text: what is left of it if it can't be pickled.

    Args:
        type_name: qualified name of its class.
        message: ``str(exception)``.
        frames: its traceback, outermost first, without the launcher's own frames.
        text: the whole traceback as Python prints it, with causes and contexts, the launcher's frames removed.
        cause: the exception that it was raised from, or that was being handled; None where there is none.
        parts: of an exception group, those that it holds.
        is_raised_from: whether ``cause`` was named by ``raise ... from``, and not only being handled.
    """

    type_name: str
    message: str
    frames: tuple[FrameInfo, ...] = ()
    text: str = ""
    cause: ExceptionInfo | None = None
    parts: tuple[ExceptionInfo, ...] = ()
    is_raised_from: bool = False


@dataclass(frozen=True)
class Event:
    """Base of all events."""

    rank: int
    time_s: float


# --- sent by workers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started(Event):
    """The worker runs, its output is captured; the user's function is called next."""

    pid: int = 0


@dataclass(frozen=True)
class Displayed(Event):
    """``display(...)`` or ``plt.show()`` in a worker: a mimebundle for the cell."""

    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    transient: Mapping[str, Any] = field(default_factory=dict)
    update: bool = False


@dataclass(frozen=True)
class Metric(Event):
    """Values logged by ``accelerator.log``."""

    step: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Note(Event):
    """One line for the user, from a worker or (``rank`` -1) from the launcher.

    Args:
        text: what there is to say.
        kind: ``"note"``; ``"warning"``: something may go wrong, and the summary of the job says so too; ``"hang"``: no
            progress, ``text`` goes on with a line for each place where ranks are.
    """

    text: str = ""
    kind: str = "note"

    @classmethod
    def of_job(cls, text: str, kind: str = "note") -> Note:
        """About the job as a whole rather than about one rank; of now."""
        return cls(rank=-1, time_s=time.time(), text=text, kind=kind)


@dataclass(frozen=True)
class Fact(Event):
    """What is known of the whole job only once it runs, for the head of its table; a later one of a name replaces it.

    Args:
        name: ``"precision"``, ``"compilations"``...
        text: a few words.
    """

    name: str = ""
    text: str = ""


@dataclass(frozen=True)
class Contents:
    """What of the return value a rank's outbox holds (``wire/outbox.py``).

    Args:
        value_at: where the return value is; -1 where there is none or it is not wanted.
        value_end: where it ends.
        unpicklable: paths of the parts of the return value that could not be written, as in ``result['model'].lock``.
    """

    value_at: int = -1
    value_end: int = -1
    unpicklable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finished(Event):
    """The function returned.

    Args:
        contents: its value.
        left_by_exit: the function left through ``sys.exit(0)`` rather than by returning.
        sends: places in the arguments of the modules whose weights follow, each with a :class:`WeightsSent`.
    """

    contents: Contents = field(default_factory=Contents)
    left_by_exit: bool = False
    sends: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class WeightsSent(Event):
    """A module's trained weights are in the rank's outbox (``wire/outbox.py``), or can't be.

    Args:
        place: of the module in the arguments (``wire/modules.py``).
        at: where in the outbox; -1 where there is nothing to send, or nothing could be sent.
        end: where the outbox ends then.
        lost: the parts that could not be pickled.
        error: why nothing could be sent.
    """

    place: int | str = 0
    at: int = -1
    end: int = -1
    lost: str = ""
    error: str = ""


@dataclass(frozen=True)
class Failed(Event):
    """The function raised.

    Args:
        info: the exception as text.
        exception: the exception pickled, or None if that is not possible.
        is_consequence: a collective or connection error, most likely caused by another rank's failure.
        evidence: what the device has to do with it, and what to try; lines.
    """

    info: ExceptionInfo = field(default_factory=lambda: ExceptionInfo("Exception", ""))
    exception: bytes | None = None
    is_consequence: bool = False
    evidence: tuple[str, ...] = ()


# --- added by the launcher ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobStarted(Event):
    """``rank`` is -1. The plan of the launch, in words for the user.

    Args:
        function_name: what runs.
        num_processes: on how many workers.
        backend: computing on what.
        start_method: started how.
        reason: why so.
        detour: a sentence about it where the usual one was not possible; harmless.
        log_dir: folder with this attempt's ``rank_<r>.log`` files.
        attempt: its number, from 0.
        label_template: label of lines, with ``${rank}``, ``${local_rank}``, ``${role_name}``; None = ``[rank]``.
        spans_devices: one worker drives all devices, rather than one each.
        mixed_precision: what accelerators in the workers use by default.
        first_rank: the lowest of this machine.
    """

    function_name: str = ""
    num_processes: int = 0
    backend: str = ""
    start_method: str = ""
    reason: str = ""
    detour: str = ""
    log_dir: str = ""
    attempt: int = 0
    label_template: str | None = None
    spans_devices: bool = False
    mixed_precision: str = ""
    first_rank: int = 0


@dataclass(frozen=True)
class LogLines(Event):
    """Whole lines that a rank printed, without their line ends, in order."""

    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class StatusLine(Event):
    r"""The text after a rank's last ``\r``: a progress bar, or a line not ended yet."""

    text: str = ""


@dataclass(frozen=True)
class HostMemory(Event):
    """What a worker's process takes of the host's memory, looked at from outside.

    Args:
        num_bytes: as a number.
        is_proportional: pages shared by several processes count in parts, so that the sum over ranks is what they
            take together; False: they count in full, because the system reports no more.
    """

    num_bytes: int = 0
    is_proportional: bool = True


@dataclass(frozen=True)
class DeviceUse(Event):
    """How busy a rank's device is, looked at from outside: the share of the last moments that it computed, 0 to 1."""

    share: float = 0.0


@dataclass(frozen=True)
class Exited(Event):
    """A worker process ended and was reaped."""

    status: ExitStatus = field(default_factory=lambda: ExitStatus(0))


@dataclass(frozen=True)
class JobFinished(Event):
    """``rank`` is -1. ``outcome`` is ``"done"``, ``"failed"``, ``"interrupted"`` or ``"cancelled"``.

    ``failed_rank`` is the rank with the root cause (None where there is none), ``message`` one line about it.
    ``is_early``: done, and before its time, because that was requested.
    """

    outcome: str = "done"
    failed_rank: int | None = None
    message: str = ""
    is_early: bool = False
