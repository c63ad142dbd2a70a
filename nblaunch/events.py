"""Events of a job, as plain data.

Workers send the first group to the launcher through a channel (``wire/channel.py``). The launcher adds the second group
and passes all events to its listeners: dashboards, the recorder of a detached job, the output of a session, and the
listeners of ``nblaunch launch``. Steps are not events: each rank writes them to its slot of the shared board
(``wire/board.py``), which the launcher samples. A step is a batch taken from a prepared loader, or an item of
``accelerator.progress``; optimizer steps are counted separately.

``time_s`` is the wall clock (``time.time()``) of the process that created the event: a worker for the first group, the
launcher for the second. Both create notes. In the other direction, a listener sends requests through :class:`Controls`.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol


class WorkerState(enum.IntEnum):
    """State of a worker, as shown to users. Values are stored on the board.

    Dashboards derive ``DONE`` and ``STOPPED`` from events. On the board, ``DONE`` means that a session's rank is
    waiting for a command.
    """

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
    """Exit status of a process: ``code`` >= 0 is its exit code, ``code`` < 0 the negated signal number.

    :data:`UNKNOWN_EXIT` stands for a status that is unknown.

    Args:
        code: the status.
        server_pid: process id of the forkserver, if the worker ended with it and this is the forkserver's status; 0 =
            the worker's own status.
    """

    code: int
    server_pid: int = 0

    @property
    def is_known(self) -> bool:
        """Whether the exit status of the process is known."""
        return self.code != _UNKNOWN_CODE

    @property
    def signal_name(self) -> str | None:
        """A name such as ``"SIGKILL"``; None if the process was not killed by a signal."""
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    def __str__(self) -> str:
        if not self.is_known:
            return "an unknown exit status"
        text = f"killed by {self.signal_name}" if self.code < 0 else f"exit code {self.code}"
        return f"ended with its forkserver (pid {self.server_pid}): {text}" if self.server_pid else text


# No process can have this exit code, because exit codes have 8 bits. The low 8 bits are set, so that no shell takes it
# for success.
_UNKNOWN_CODE = 511

UNKNOWN_EXIT = ExitStatus(_UNKNOWN_CODE)
"""The status of a process that other code has reaped, for example with ``waitpid(-1)``."""


@dataclass(frozen=True)
class FrameInfo:
    """One frame of a worker's traceback.

    Args:
        filename: file of the code.
        lineno: current line.
        name: name of the function.
        line: source text of the line, even if the line is in a notebook cell.
        is_user: whether the code is the user's, not a library's or Python's.
        first_lineno: first line of the function; 0 if unknown.
        variables: name and text (a literal or a description) of each local variable; only in the user's innermost
            frames.
    """

    filename: str
    lineno: int
    name: str
    line: str = ""
    is_user: bool = True
    first_lineno: int = 0
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ExceptionInfo:
    """An exception as text, even if the exception can't be pickled.

    Args:
        type_name: qualified name of the class.
        message: ``str(exception)``.
        frames: frames of the traceback, outermost first, without the launcher's frames.
        text: the whole traceback as Python prints it, with causes and contexts, but without the launcher's frames.
        cause: ``__cause__`` or ``__context__``; None if there is none.
        parts: exceptions in an exception group.
        is_raised_from: ``cause`` is ``__cause__``, set by ``raise ... from``.
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
    """Base class for all events.

    Args:
        rank: the rank that the event is about; -1 = the job as a whole.
        time_s: when the event was created, by the wall clock.
    """

    rank: int = -1
    time_s: float = field(default_factory=time.time)


# --- sent by workers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started(Event):
    """The worker is about to call the user's function; its output is captured."""

    pid: int = 0


@dataclass(frozen=True)
class Displayed(Event):
    """A MIME bundle for the cell, from a worker that called ``display(...)`` or ``plt.show()``."""

    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    transient: Mapping[str, Any] = field(default_factory=dict)
    update: bool = False


@dataclass(frozen=True)
class Metric(Event):
    """Values logged by ``accelerator.log``.

    Args:
        step: step passed to ``log``: a finite number, or anything else as text.
        values: the values by name.
        epoch: number of the current or last epoch, counted from 1; 0 before the first.
    """

    step: int | float | str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0


@dataclass(frozen=True)
class EpochEnded(Event):
    """A loop over a training loader ended, perhaps before its last batch.

    Args:
        epoch: number of the epoch, counted from 1.
        loss: mean of the rank's losses since its last ``EpochEnded``; None = no losses.
        duration_s: duration of the loop.
    """

    epoch: int = 0
    loss: float | None = None
    duration_s: float = 0.0


@dataclass(frozen=True)
class Note(Event):
    """One line for the user, from a worker or (``rank`` -1) from the launcher.

    Args:
        text: text of the note.
        kind: ``"note"``; ``"warning"``: also part of the job's summary; ``"hang"``: ranks that are making no progress,
            with one line for each position; ``"slow"``: why steps are slow; the text is empty once they are no longer
            slow.
    """

    text: str = ""
    kind: str = "note"

    @classmethod
    def of_job(cls, text: str, kind: str = "note") -> Note:
        """Return a note about the job as a whole, with the current time."""
        return cls(text=text, kind=kind)


@dataclass(frozen=True)
class InputAwaited(Event):
    """A rank waits for the user's input. Listeners show everything that has arrived before it.

    Rank 0 of a script sends it for ``input()``; the launcher sends it for a prompt of pdb, with ``rank`` -1.

    Args:
        prompt: the script's prompt, to be shown by the listener that prints lines. The launcher shows pdb's prompt.
        is_hidden: whether the terminal does not show what the user types, including the end of the line.
    """

    prompt: str = ""
    is_hidden: bool = False


@dataclass(frozen=True)
class InputRead(Event):
    """Rank 0 of a script has read the input that it waited for."""


@dataclass(frozen=True)
class Fact(Event):
    """A property of the whole job for the header of its table. A later fact with the same name replaces it.

    Args:
        name: ``"precision"``, ``"compilations"``...
        text: the value.
    """

    name: str = ""
    text: str = ""


@dataclass(frozen=True)
class Observation(Event):
    """An observation that a check of the training loop made on a rank (``nblaunch/training/checks``).

    Args:
        check: name of the check.
        problem: what is wrong, as the beginning of a sentence; empty: the check revokes its
            earlier observation.
        advice: what to do, as a sentence without its full stop.
        step: number of optimizer steps so far.
        value: values by which ranks are compared; the first says what is compared.
        judged_by: when the observation is a mistake. ``"itself"``: always. ``"equal"``: if the ranks' values at this
            step are not all equal. ``"distinct"``: if they are all the same. ``"overlapping"``: if every rank has
            several of the first rank's values, but in another order. ``"first"``: if the problem began on some ranks,
            and exactly one step later on all others; the value is the step at which it began. ``"together"``: if the
            values of several ranks differ at most in their last part. The first part is the path of a written file, the
            last a checksum of its contents; equal writes are not reported. ``"finally"``: if all ranks have sent the
            observation by the end of the job, and no rank has revoked it.
        filename: file of the user's line.
        lineno: number of the user's line.
        is_hint: whether the observed code may be intended.
    """

    check: str = ""
    problem: str = ""
    advice: str = ""
    step: int = 0
    value: Any = None
    judged_by: str = "itself"
    filename: str = ""
    lineno: int = 0
    is_hint: bool = False


@dataclass(frozen=True)
class RunTracked(Event):
    """An experiment tracker has started a run.

    Args:
        tracker: name of the tracker, such as ``"wandb"``.
        location: address of the run, or the command that shows it.
    """

    tracker: str = ""
    location: str = ""


@dataclass(frozen=True)
class ValueLocation:
    """Position of the return value in a rank's outbox (``wire/outbox.py``).

    Args:
        at: offset of the return value; -1 if there is none or it is not needed.
        end: offset of its end.
        unpicklable: paths of parts that can't be pickled, such as ``result['model'].lock``.
    """

    at: int = -1
    end: int = -1
    unpicklable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Returned(Event):
    """A rank's function has returned.

    Args:
        value_location: position of the return value.
        left_by_exit: whether the function called ``sys.exit(0)`` instead of returning.
        sends: argument paths of the modules and optimizers whose states follow, each with a :class:`StateSent`.
        changed: argument paths of the modules that are known to have changed on this rank.
    """

    value_location: ValueLocation = field(default_factory=ValueLocation)
    left_by_exit: bool = False
    sends: tuple[int | str, ...] = ()
    changed: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Interrupted(Event):
    """The user's interrupt ended a rank's function. The trained states follow, then :class:`Failed`.

    Args:
        step: number of completed optimizer steps.
        is_cut: whether the rank was in the middle of another step, and therefore sends nothing.
        sends: as in :class:`Returned`.
    """

    step: int = 0
    is_cut: bool = False
    sends: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class StateSent(Event):
    """The state dict of a module or optimizer is in the rank's outbox (``wire/outbox.py``), or could not be sent.

    Args:
        path: path of the module or optimizer in the arguments (``wire/argument_paths.py``).
        at: offset in the outbox; -1 if there was nothing to send or nothing could be sent.
        end: offset of its end.
        lost: the parts that could not be sent, and why.
        error: why nothing could be sent.
    """

    path: int | str = 0
    at: int = -1
    end: int = -1
    lost: str = ""
    error: str = ""


@dataclass(frozen=True)
class Failed(Event):
    """A rank's function raised an exception.

    Args:
        info: the exception as text.
        exception: the pickled exception, or None if it can't be pickled.
        is_consequence: whether it is a collective or connection error, which another rank's failure probably caused.
        evidence: lines about the state of the device, and what to try.
    """

    info: ExceptionInfo = field(default_factory=lambda: ExceptionInfo("Exception", ""))
    exception: bytes | None = None
    is_consequence: bool = False
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandEvent(Event):
    """An event of a session's command, reported as if the rank had been started for this command only.

    Args:
        number: number of the command.
        event: :class:`Started`, :class:`Returned`, :class:`StateSent`, :class:`Interrupted`, :class:`Failed`, or
            :class:`Exited`, a command's last event, although the rank's process continues.
        has_torch: whether the rank has imported torch.
    """

    number: int = 0
    event: Event = field(default_factory=Event)
    has_torch: bool = False


@dataclass(frozen=True)
class PutUnread(Event):
    """A rank can't end, because no process has read the items that its function put into queues.

    Args:
        pipes: inodes of the queues' pipes.
        has_tensors: whether items refer to the rank's memory, which is lost when the rank ends.
    """

    pipes: tuple[int, ...] = ()
    has_tensors: bool = False


# --- added by the launcher ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttemptStarted(Event):
    """An attempt of the job is starting; ``rank`` is -1.

    Args:
        function_name: name of the user's function.
        num_processes: number of workers.
        backend: device family.
        start_method: start method of the workers.
        reason: reason for the start method.
        fallback: why the usual start method was not possible, as a sentence; empty if it was possible.
        log_dir: folder with this attempt's ``rank_<r>.log`` files.
        attempt: number of the attempt, counted from 0.
        label_template: template for labels of output lines, with ``${rank}``, ``${local_rank}``, ``${role_name}``; None
            = ``[rank]``.
        is_spmd: whether one worker drives all devices.
        mixed_precision: default precision of accelerators in the workers.
        first_rank: lowest rank of this machine.
        ago_s: seconds since the start, for listeners that were added later.
    """

    function_name: str = ""
    num_processes: int = 0
    backend: str = ""
    start_method: str = ""
    reason: str = ""
    fallback: str = ""
    log_dir: str = ""
    attempt: int = 0
    label_template: str | None = None
    is_spmd: bool = False
    mixed_precision: str = ""
    first_rank: int = 0
    ago_s: float = 0.0


@dataclass(frozen=True)
class LogLines(Event):
    """Complete lines that a rank printed, without line endings, in order."""

    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class StatusLine(Event):
    r"""The text after a rank's last ``\r``: a progress bar, or an incomplete line."""

    text: str = ""


@dataclass(frozen=True)
class Hint(Event):
    """A probable mistake in the training loop that may be intentional, as text for ``Job.hints``; ``rank`` is -1."""

    text: str = ""


@dataclass(frozen=True)
class Stalled(Event):
    """A rank that is making no progress, with its position.

    Emitted after half of ``hang_timeout_s`` for ranks that are waiting in a collective, and after the full time for
    others.

    Args:
        where: the line of the rank, such as ``cell 5, line 14``.
        waiting_in: the collective that it is waiting in, such as ``all_reduce``; empty = none.
        for_s: seconds since its last progress.
        is_certain: whether the rank is certainly waiting or hanging; False if it may be working without taking steps.
    """

    where: str = ""
    waiting_in: str = ""
    for_s: float = 0.0
    is_certain: bool = True


@dataclass(frozen=True)
class HostMemory(Event):
    """Host memory of a worker's process, sampled by the launcher.

    Args:
        num_bytes: size of the memory.
        is_proportional: whether shared pages are divided by the number of processes that share them, so that the values
            of ranks can be added.
        peak_bytes: the peak so far; 0 = unknown.
        job_peak_bytes: the peak of all ranks on this machine together; 0 = unknown.
    """

    num_bytes: int = 0
    is_proportional: bool = True
    peak_bytes: int = 0
    job_peak_bytes: int = 0


@dataclass(frozen=True)
class DeviceUse(Event):
    """Recent utilisation of a rank's device, 0 to 1, sampled by the launcher."""

    share: float = 0.0


@dataclass(frozen=True)
class Exited(Event):
    """A worker process ended and was reaped.

    Args:
        status: how it ended.
        was_stopped: whether the launcher had already sent it a signal that ends it.
    """

    status: ExitStatus = field(default_factory=lambda: ExitStatus(0))
    was_stopped: bool = False


@dataclass(frozen=True)
class JobEnded(Event):
    """The job has ended. This is its last event; ``rank`` is -1.

    Args:
        outcome: ``"done"``, ``"failed"``, ``"interrupted"`` or ``"cancelled"``; ``"left"`` if a detached job continues
            and this process no longer follows it.
        failed_rank: the rank that failed first; None = no failure.
        message: one line about the failure.
        advice: explanation of the failure, and what to do.
        is_early: whether the job was stopped early on request.
        has_hung: whether the job was stopped because of a hang or mismatched collectives; the ranks' errors then do not
            explain the failure.
    """

    outcome: str = "done"
    failed_rank: int | None = None
    message: str = ""
    advice: tuple[str, ...] = ()
    is_early: bool = False
    has_hung: bool = False


# --- from listeners to the job ----------------------------------------------------------------------------------------


class Controls(Protocol):
    """Requests to a running job. They are safe in any thread and return immediately."""

    def stop(self) -> None:
        """Let all ranks leave their training loops at the same step."""

    def interrupt(self) -> None:
        """Interrupt the workers, with a grace period; a second call kills them."""

    def cancel(self) -> None:
        """Kill the workers immediately."""

    def ask_stacks(self) -> Future[str]:
        """Ask for the Python stacks of all ranks as text; they arrive within a second or two."""
