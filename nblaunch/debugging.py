"""``nblaunch.debug``: use pdb in a worker from the running cell or the terminal.

worker: pdb ── Prompted ──> DebugClient ──> printed here, input() ── Line ──> worker

The modules of the debugger:

    debugging.py                   asks the user, in the kernel
    launcher/debug_client.py       sends commands to workers, receives replies and prompts; keeps the failure of a job
      session/client.py            keeps the failure of a session's last command
    wire/worker_commands.py        messages between client and worker
    worker/debugger.py             answers in a worker, with pdb
      worker/frames.py             the current line and variables of the user's code
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Protocol

from nblaunch import dashboard as dashboards
from nblaunch.dashboard.text import is_terminal, live_hidden
from nblaunch.diagnosis.exceptions import HiddenLauncherFrames
from nblaunch.events import Note
from nblaunch.launcher.debug_client import DebugClient, latest_kept_failure
from nblaunch.launcher.job import jobs_at_breakpoints, last_job
from nblaunch.launcher.requests import interrupts_as_requests
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import LaunchSpec
from nblaunch.user_code import cell_name
from nblaunch.wire.worker_commands import Prompted


class Debugged(Protocol):
    """A job or a session, for :func:`debug`."""

    def find_debugger(self, rank: int | None = None) -> tuple[DebugClient, int]:
        """Return the client of the debugger, and the rank to debug. None = the rank that failed first."""


def debug(rank: int | None = None, *, job: Debugged | None = None) -> None:
    """Open pdb in a worker: where a job with ``post_mortem=True`` failed, or at a ``breakpoint()``.

    This also works after a session command has failed, until the next command.

    All pdb commands work. After a failure, and on ranks that are waiting for others, you can inspect frames but not
    continue. ``q`` leaves pdb; at a ``breakpoint()``, ``c`` continues, and ``q`` ends the job.

    Args:
        rank: rank to debug. None = the rank that failed, or the first that is waiting at a ``breakpoint()``.
        job: a job or a session. None = the most recent one that is kept after a failure or is waiting at a
            ``breakpoint()``; if there is none, the last job.

    Raises:
        RuntimeError: no worker is waiting for a debugger, or there is no interactive input.
        ValueError: the rank does not exist, or has not failed.
    """
    __tracebackhide__ = True
    with HiddenLauncherFrames():
        job = job or _latest_waiting() or last_job()
        if job is None:
            raise RuntimeError(
                "no worker can be debugged: no job was launched, and no session command has failed"
            )
        if not can_type():
            raise RuntimeError(
                "nblaunch.debug() needs a front end that allows input(). inspect('name') and compare() of "
                "the job or session show variables without input"
            )
        debugger, rank = job.find_debugger(rank)
        debugger.open_pdb(rank)
        while (prompt := debugger.wait_for_prompt(rank)) is not None:
            if isinstance(job, JobRunner):
                job.requests.ask_logs().result()  # output before the prompt comes first
            debugger.send_line(rank, _ask(rank, prompt))
        _print(debugger.take_printed(rank))


def _latest_waiting() -> Debugged | None:
    """Return the latest job that is kept after a failure or is waiting at a ``breakpoint()``; None if there is none."""
    waiting: list[tuple[float, Debugged]] = [*jobs_at_breakpoints()]
    kept = latest_kept_failure()
    if kept is not None:
        waiting.append((kept.since_s, kept))
    return max(waiting, key=itemgetter(0))[1] if waiting else None


def on_prompts(runner: JobRunner) -> None:
    """In the running cell, ask the user for the next line to send to the first rank's pdb.

    In the thread of a background job, print a hint instead.
    """
    debugger = runner.debugger
    assert debugger is not None, "a rank is waiting"
    if threading.current_thread() is threading.main_thread():
        answer_prompt(debugger, runner.requests.interrupt)
        return
    rank = debugger.next_prompt()
    if rank is not None:
        _announce(runner, debugger, rank)


def answer_prompt(debugger: DebugClient, interrupt: Callable[[], None]) -> None:
    """Ask the user for the next line to send to the first rank's pdb; on an interrupt, call ``interrupt()``."""
    rank = debugger.next_prompt()
    if rank is None or (prompt := debugger.prompts.get(rank)) is None:
        return
    with interrupts_as_requests(_raise_interrupt):  # otherwise the launcher would count the interrupts
        try:
            debugger.send_line(rank, _ask(rank, prompt))
        except KeyboardInterrupt:
            interrupt()


def can_type() -> bool:
    """Return whether a user can answer ``input()`` in this process."""
    if dashboards.kernel_shell() is not None:
        return dashboards.is_interactive()
    return is_terminal(sys.stdin) and is_terminal(sys.stdout)


def with_breakpoints(spec: LaunchSpec, *, background: bool = False) -> LaunchSpec:
    """Return the spec with ``has_breakpoints``, if this process can ask the user for all workers of the launch."""
    if spec.is_elastic or spec.is_on_nodes or spec.is_detached or not takes_breakpoints(background):
        return spec
    return replace(spec, has_breakpoints=True)


def takes_breakpoints(background: bool) -> bool:
    """Return whether ``breakpoint()`` in a worker can open pdb, which needs a main thread that can ask for input.

    A cell that waits for its job asks the user; for a background job, :func:`debug` asks.
    """
    return can_type() and (background or threading.current_thread() is threading.main_thread())


def _announce(runner: JobRunner, debugger: DebugClient, rank: int) -> None:
    """Report a breakpoint only once, even though the job's loop calls this function repeatedly."""
    prompt = debugger.prompts.get(rank)  # debug() in the main thread may be answering it right now
    if prompt is not None and prompt.stop is not None and prompt.stop not in debugger.announced_stops:
        debugger.announced_stops.add(prompt.stop)
        filename, line, _ = prompt.stop
        where = f"breakpoint() in {cell_name(filename)}, line {line}"
        text = f"rank {rank} is waiting at {where}: nblaunch.debug() opens pdb"
        runner.emit(Note.of_job(text, "warning"))


def _ask(rank: int, prompt: Prompted) -> str:
    """Show pdb's output, and return the user's line, or ``q`` at the end of the input."""
    with live_hidden():
        if prompt.stop is not None:
            filename, line, _ = prompt.stop
            _print(f"rank {rank} at breakpoint() in {cell_name(filename)}, line {line}:\n")
        _print(prompt.text)
        try:
            return input(f"[{rank}] {prompt.prompt}")
        except EOFError:
            return "q"


def _print(text: str) -> None:
    if text:
        print(text, end="" if text.endswith("\n") else "\n", flush=True)


def _raise_interrupt() -> None:
    raise KeyboardInterrupt
