"""The checks of ``nblaunch test``: each launches a job on the devices of this machine and checks its results.

A check returns what it has shown, or raises :class:`CheckFailed` with the evidence. Each has its own job, so that one
that hangs or breaks a device does not affect the others.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.fsdp

from nblaunch.backends.base import Backend
from nblaunch.cli import selfcheck_ranks as ranks
from nblaunch.errors import WorkerDied
from nblaunch.events import Event, LogLines
from nblaunch.launcher.job import Job
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import LaunchSpec
from nblaunch.wire.board import SlotReading

_HANG_TIMEOUT_S = 45.0
_START_TIMEOUT_S = 120.0  # the first use of a device can take a minute
_GONE_TIMEOUT_S = 10.0


class CheckFailed(Exception):
    """A wrong result: expected and actual values, and the ranks."""


@dataclass(frozen=True)
class Setup:
    """Settings of the checks' jobs.

    Args:
        backend: name of the device family.
        num_processes: number of workers.
        start_method: of the workers.
        log_dir: folder for logs.
        tolerance: largest relative difference of weights, for other orders of summation.
    """

    backend: str
    num_processes: int
    start_method: str
    log_dir: str
    tolerance: float

    def runner(self, function: Callable[..., Any], *args: Any, listeners: Sequence[Any] = ()) -> JobRunner:
        """Return the runner of a job of ``function`` that has not started."""
        spec = LaunchSpec(
            function=function, args=args, num_processes=self.num_processes, backend=self.backend,
            start_method=self.start_method, return_all=True, log_dir=self.log_dir,
            hang_timeout_s=_HANG_TIMEOUT_S, on_hang="stop", interrupt_grace_s=5.0,
        )  # fmt: skip
        return JobRunner(spec, plan_launch(spec), listeners)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a job of ``function`` and return every rank's value."""
        runner = self.runner(function, *args)
        runner.run()
        return list(Job(runner).result())


Check = Callable[[Setup], str]


def check_collectives(setup: Setup) -> str:
    """Check the results of every collective operation."""
    _expect_no_errors(setup.run(ranks.collectives))
    return "gather, reduce, broadcast, pad and gather_object are correct on every rank"


def check_gradients(setup: Setup) -> str:
    """Check that training on all ranks gives the weights of training in one process."""
    _expect_no_errors(setup.run(ranks.gradients, setup.tolerance))
    return "the weights equal those of a single process on the same samples"


def check_sharded(setup: Setup) -> str:
    """Check the same with sharded weights."""
    _expect_no_errors(setup.run(ranks.gradients, setup.tolerance, True))
    return "the same with sharded weights (FSDP2)"


def check_metrics(setup: Setup) -> str:
    """Check that metrics count every sample once, also if the ranks have unequal numbers of samples."""
    _expect_no_errors(setup.run(ranks.metrics))
    return "gather_for_metrics returns every sample of an uneven set once, in order"


def check_checkpoint(setup: Setup) -> str:
    """Check that training continues from a checkpoint as without an interruption."""
    with tempfile.TemporaryDirectory() as folder:
        _expect_no_errors(setup.run(ranks.checkpoint, str(Path(folder, "state")), setup.tolerance))
    return "steps after load_state equal those after save_state: weights, optimizer, random numbers"


def check_weights_back(setup: Setup) -> str:
    """Check that the trained weights are loaded into the module that was passed."""
    model = ranks.build_model()
    before = ranks.first_weights(model)
    trained = setup.run(ranks.train_passed_model, model)
    after = ranks.first_weights(model)
    if after != trained[0]:
        raise CheckFailed(f"rank 0's trained model begins with {trained[0]}, but the one here with {after}")
    if after == before:
        raise CheckFailed(f"training did not change the weights: they still begin with {before}")
    return "the model that was passed has rank 0's trained weights"


def check_errors(setup: Setup) -> str:
    """Check that an exception of a rank is raised here and ends the job."""
    runner = setup.runner(ranks.raise_in_last_rank)
    runner.run()
    job = Job(runner)
    error = job.exception()
    _expect_gone(job, [])
    if not isinstance(error, ZeroDivisionError) or "on purpose" not in str(error):
        raise CheckFailed(
            f"rank {setup.num_processes - 1} raised ZeroDivisionError, but the job raised {error!r}"
        )
    return "an exception of one rank is raised here, and ends the other ranks"


def check_interrupt(setup: Setup) -> str:
    """Check that every rank cleans up after an interrupt, and that no process is left."""
    with tempfile.TemporaryDirectory() as folder, _waiting_job(setup, folder) as (job, children):
        job.interrupt()
        error = job.exception(_START_TIMEOUT_S)
        if not isinstance(error, KeyboardInterrupt):
            raise CheckFailed(f"the job was interrupted, but ended with {error!r}")
        _expect_gone(job, children)
        left = [rank for rank in range(setup.num_processes) if not Path(folder, f"{rank}.finally").exists()]
        if left:
            raise CheckFailed(f"`finally` blocks did not run on ranks {left}")
    return "`finally` blocks ran; no worker or child process is left"


def check_kill(setup: Setup) -> str:
    """Check that a killed rank is reported, and that no process is left."""
    victim = setup.num_processes - 1
    with tempfile.TemporaryDirectory() as folder, _waiting_job(setup, folder) as (job, children):
        os.kill(job.pids[victim], signal.SIGKILL)
        error = job.exception(_START_TIMEOUT_S)
        if not isinstance(error, WorkerDied) or error.rank != victim or error.exitcode != -signal.SIGKILL:
            raise CheckFailed(f"rank {victim} was killed by SIGKILL, but the job ended with {error!r}")
        _expect_gone(job, children)
    return f"rank {victim} and SIGKILL are reported; no worker or child process is left"


CHECKS: dict[str, Check] = {
    "collectives": check_collectives,
    "gradients": check_gradients,
    "sharded": check_sharded,
    "metrics": check_metrics,
    "checkpoint": check_checkpoint,
    "weights-back": check_weights_back,
    "errors": check_errors,
    "interrupt": check_interrupt,
    "kill": check_kill,
}


def supported(backend: Backend) -> list[str]:
    """Return the names of the checks for a backend: FSDP2 needs torch 2.6, and is not for XLA devices."""
    can_shard = hasattr(torch.distributed.fsdp, "fully_shard") and not backend.reduces_gradients_at_step
    return [name for name in CHECKS if name != "sharded" or can_shard]


# --- helpers ---------------------------------------------------------------------------------------------------------


def _expect_no_errors(found: Sequence[Sequence[str]]) -> None:
    lines = [f"rank {rank}: {text}" for rank, wrong in enumerate(found) for text in wrong]
    if lines:
        raise CheckFailed("\n".join(lines))


class _waiting_job:  # a context manager, named as a function is
    """A job whose ranks wait for ever, each with a child process; leaving the context cancels it."""

    def __init__(self, setup: Setup, folder: str) -> None:
        self._folder = folder
        self._ready = _ReadyListener(setup.num_processes)
        self._runner = setup.runner(ranks.wait_with_child, folder, listeners=[self._ready])
        self._job = Job(self._runner)

    def __enter__(self) -> tuple[Job, list[int]]:
        self._runner.run_in_background()
        if not self._ready.event.wait(_START_TIMEOUT_S) or not self._job.is_running:
            self._job.cancel()
            error = self._job.exception(_START_TIMEOUT_S)
            raise CheckFailed(f"the ranks did not start to wait: {error!r}; logs: {self._job.log_dir}")
        children = [int(path.read_text()) for path in Path(self._folder).glob("*.child")]
        return self._job, children

    def __exit__(self, *_: object) -> None:
        self._job.cancel()
        self._job.wait(_START_TIMEOUT_S)


class _ReadyListener:
    """A listener that sets ``event`` when every rank has printed ``waits``, or the job has ended."""

    def __init__(self, num_processes: int) -> None:
        self.event = threading.Event()
        self._missing = set(range(num_processes))

    def on_event(self, event: Event) -> None:
        if isinstance(event, LogLines) and "waits" in event.lines:
            self._missing.discard(event.rank)
            if not self._missing:
                self.event.set()

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        pass

    def close(self) -> None:
        self.event.set()


def _expect_gone(job: Job, children: Sequence[int]) -> None:
    """Raise CheckFailed if workers or their child processes are still alive after a timeout."""
    names = {pid: f"rank {rank}" for rank, pid in job.pids.items()} | dict.fromkeys(
        children, "a child of a rank"
    )
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    alive = [pid for pid in names if _is_alive(pid)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = [pid for pid in alive if _is_alive(pid)]
    if alive:
        listed = ", ".join(f"{names[pid]} (pid {pid})" for pid in alive)
        raise CheckFailed(f"still running {_GONE_TIMEOUT_S:g} s after the job ended: {listed}")


def _is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc/self").exists()
