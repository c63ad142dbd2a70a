"""The job of ``nblaunch launch``: output, signals, failures and exit code in a terminal.

    SIGINT             interrupt: ``finally`` blocks run; a second SIGINT kills the workers
    SIGTERM, SIGHUP    termination with time for a checkpoint; see ``launcher/escalation.py``
    SIGUSR1, SIGUSR2   passed on to the ranks that handle them; batch systems send them before the time limit
    exit code          0 on success; 1 if the script raised an exception; the exit code of the rank whose process died;
                       128 + N after signal N; 2 if nothing was started

``--print_plan`` shows every setting with its source, and the plan of the launch on this machine.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from nblaunch import formatting
from nblaunch.cli import UsageError
from nblaunch.config.launching import spec_of, with_setting_names
from nblaunch.config.settings import DEFAULT, SETTINGS, ConfigError, Resolved
from nblaunch.dashboard import text_dashboards
from nblaunch.dashboard.base import Dashboard, GuardedDashboard
from nblaunch.dashboard.lines import LinesPrinter
from nblaunch.debugging import with_breakpoints
from nblaunch.errors import CollectiveMismatch, JobCancelled, JobHung, LaunchError, WorkerDied
from nblaunch.events import AttemptStarted, Event, Failed, JobEnded, Started
from nblaunch.launcher import store
from nblaunch.launcher.plan import LaunchPlan, plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.notebook import make_runner
from nblaunch.spec import LaunchSpec
from nblaunch.worker.script import Script


def print_plan(resolved: Resolved, script: str | None) -> int:
    """Print the plan; start nothing.

    Raises:
        UsageError: the settings contradict each other.
    """
    spec = spec_of_script(resolved, script or "script.py", (), is_module=False)
    rows = [
        (name, _text(resolved[name]), resolved.sources[name])
        for name in SETTINGS
        if resolved.sources[name] != DEFAULT or resolved[name] not in (None, False)
    ]
    print("\n".join(formatting.columns([("setting", "value", "from"), *rows])))
    if spec.accelerator_arguments:
        print("\nUnless the script passes other values, its Accelerator() uses:")
        defaults = [(f"  {name}", _text(value)) for name, value in spec.accelerator_defaults.items()]
        print("\n".join(formatting.columns(defaults)))
    print()
    try:
        plan = _plan_of(spec)
    except UsageError as problem:
        print(f"not possible on this machine: {problem}")
    else:
        machines = f" (one of {resolved['num_machines']} machines)" if resolved["num_machines"] != 1 else ""
        print(
            f"on this machine{machines}: "
            f"{formatting.count(plan.num_processes, f'{plan.backend.name} process')} with "
            f"{formatting.count(plan.num_threads, 'CPU thread')} per process, started by {plan.start_method}"
        )
        for text in filter(None, (plan.fallback, *plan.warnings)):
            print(f"note: {text}")
    return 0


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={inner}" for key, inner in value.items())
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def launch_script(
    resolved: Resolved,
    script: str,
    arguments: Sequence[str],
    *,
    is_module: bool,
    timeline: Path | None,
) -> int:
    """Run a script in all processes and return the exit code for the shell.

    Args:
        resolved: the settings.
        script: path of the script, or name of a module.
        arguments: arguments of the script.
        is_module: whether ``script`` is the name of a module.
        timeline: file for the timeline of the ranks; None: no timeline.

    Raises:
        UsageError: the launch is not possible; nothing was started.
    """
    spec = with_breakpoints(spec_of_script(resolved, script, arguments, is_module=is_module))
    plan = _plan_of(spec, checks_port=True)
    preloader = _TorchPreloader() if plan.num_processes > 1 and plan.start_method != "fork" else None
    failures = _Failures()
    # Print all lines from all ranks, because programs may read them.
    if resolved["dashboard"] == "none":
        shown: list[Dashboard] = [GuardedDashboard(LinesPrinter(shortens=False, notes_to_stderr=True))]
    else:
        shown = text_dashboards(shortens=False)
    try:
        runner = make_runner(spec, plan, [*shown, failures, *([preloader] if preloader else [])])
    except LaunchError as problem:
        raise UsageError(_in_one_line(problem)) from None
    # The exit code does not change if an interrupt arrives after the script has ended, or if the script handles it on
    # every rank.
    with suppress(KeyboardInterrupt), _signals_to(runner, resolved["stop_grace_s"]) as received:
        runner.run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job has ended; only messages follow
    error = runner.outcome.error if runner.outcome is not None else None
    if isinstance(error, LaunchError) and not failures.has_started:
        raise UsageError(_in_one_line(error))
    code = exit_code(error, received)
    if timeline is not None:
        _write_timeline(runner, timeline)
    if error is not None:
        failures.report(error)
    if preloader is not None and preloader.is_loading:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # do not wait for a thread that is still importing
    return code


def _write_timeline(runner: JobRunner, path: Path) -> None:
    """Write the timeline of a job that has ended; a failure does not change the exit code."""
    try:
        print(
            f"nblaunch: timeline: {runner.timeline(path)} (open it in https://ui.perfetto.dev)",
            file=sys.stderr,
        )
    except (OSError, RuntimeError) as error:
        print(f"nblaunch: no timeline was written to {path}: {error}", file=sys.stderr)


def spec_of_script(
    resolved: Resolved, script: str, arguments: Sequence[str], *, is_module: bool
) -> LaunchSpec:
    """Return the settings for launching a script, with ``spawn`` unless another start method is set.

    Raises:
        UsageError: the settings contradict each other.
    """
    function = Script(script, tuple(arguments), is_module=is_module, folder=os.getcwd())
    method: dict[str, Any] = {} if resolved.is_set("start_method") else {"start_method": "spawn"}
    try:
        return spec_of(resolved, function, is_script=True, sync_weights=False, **method)
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _plan_of(spec: LaunchSpec, *, checks_port: bool = False) -> LaunchPlan:
    """Return the plan of the launch on this machine.

    Args:
        spec: the launch.
        checks_port: also check whether the rendezvous port is free.

    Raises:
        UsageError: the launch is not possible.
    """
    try:
        if checks_port and spec.master_port and not spec.is_elastic:
            store.StoreHost(spec.master_addr, spec.master_port).close()
        return plan_launch(spec)
    except (LaunchError, ValueError, RuntimeError) as error:
        raise UsageError(_in_one_line(error)) from None


@final
class _Failures(Dashboard):
    """Keeps the ranks' failures, so that the root cause's traceback can be printed."""

    def __init__(self) -> None:
        self._failed: dict[int, Failed] = {}
        self._failed_rank = -1
        self.has_started = False

    def on_event(self, event: Event) -> None:
        if isinstance(event, AttemptStarted):
            self._failed = {}
        elif isinstance(event, Started):
            self.has_started = True
        elif isinstance(event, Failed):
            self._failed.setdefault(event.rank, event)
        elif isinstance(event, JobEnded) and event.failed_rank is not None:
            self._failed_rank = event.failed_rank

    def report(self, error: BaseException) -> None:
        """Print the root cause to stderr: the traceback, then notes about its location and the other ranks."""
        root = self._failed.get(self._failed_rank)
        if root is not None and not isinstance(error, (WorkerDied, JobHung, CollectiveMismatch)):
            text = f"rank {root.rank} failed:\n{root.info.text.rstrip()}"
        elif isinstance(error, (KeyboardInterrupt, JobCancelled)):
            return
        else:
            text = str(error)
        print("\n".join([text, *getattr(error, "__notes__", [])]), file=sys.stderr)


def exit_code(error: BaseException | None, received: Sequence[int]) -> int:
    """Return the exit code of a command whose job has ended.

    Args:
        error: the error that ended the job; None if it succeeded.
        received: signals that ended the job.
    """
    if received:
        return 128 + received[0]
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, WorkerDied) and error.exitcode:
        return 128 - error.exitcode if error.exitcode < 0 else error.exitcode
    return 1


@contextmanager
def _signals_to(runner: JobRunner, grace_s: float) -> Iterator[list[int]]:
    """Terminate the job on SIGTERM and SIGHUP while the block runs; yield the list of received signals.

    SIGUSR1 and SIGUSR2 are passed on to the ranks.
    """
    received: list[int] = []

    def on_signal(signum: int, frame: object) -> None:
        received.append(signum)
        runner.requests.terminate(grace_s)

    # A program started with nohup ignores SIGHUP.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in numbers}
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        before[number] = signal.signal(number, lambda signum, frame: runner.requests.pass_on(signum))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@final
class _TorchPreloader(Dashboard):
    """Imports torch in a thread while the workers start, because the store in this process needs it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def is_loading(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def on_event(self, event: Event) -> None:
        if isinstance(event, AttemptStarted) and self._thread is not None:
            self._thread.join()  # a restart looks up torch's types, so torch must be fully imported
        elif isinstance(event, Started) and self._thread is None:
            self._thread = threading.Thread(target=importlib.import_module, args=("torch.distributed",))
            self._thread.start()


def _in_one_line(error: BaseException) -> str:
    return with_setting_names(" ".join(str(error).split()))
