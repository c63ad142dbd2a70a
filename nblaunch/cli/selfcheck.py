"""``nblaunch test``: runs small jobs to check that training works on this machine's devices.

This module selects the checks and prints their results; ``selfcheck_jobs.py`` contains the checks.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

from nblaunch import backends, formatting
from nblaunch.cli import UsageError
from nblaunch.launcher.plan import LaunchPlan, plan_launch
from nblaunch.spec import START_METHODS, LaunchSpec

if TYPE_CHECKING:
    from nblaunch.cli.selfcheck_jobs import Check, Setup

_CHECKS = "nblaunch.cli.selfcheck_jobs"  # imports torch, so it is imported only to run a check
_MAX_CPU_PROCESSES = 4


def set_up(parser: argparse.ArgumentParser) -> None:
    """Set up the command."""
    parser.description = (
        "Run small jobs on the devices of this machine and check collectives, gradients, metrics, checkpoints, "
        "weights and errors. Print one line per check, and exit with code 1 if a check fails."
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--backend", default="auto", help="device family; default: auto; `nblaunch env` lists all families"
    )
    parser.add_argument("--cpu", action="store_true", help="same as --backend cpu")
    parser.add_argument(
        "--num_processes", "--num-processes", type=int, metavar="N",
        help="default: one per device; 2 to 4 on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--start_method", "--start-method", default="auto", choices=START_METHODS, help="default: auto"
    )
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="run only these checks")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print a line for each; return 1 if any failed."""
    backend = "cpu" if arguments.cpu else arguments.backend
    spec, plan = _plan(backend, arguments.num_processes, arguments.start_method)
    jobs = importlib.import_module(_CHECKS)
    chosen = arguments.only or jobs.supported(plan.backend)
    unknown = [name for name in chosen if name not in jobs.CHECKS]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: valid checks are {', '.join(jobs.CHECKS)}")
    print(
        f"{formatting.count(plan.num_processes, 'process')} on {plan.backend.name} ({plan.backend.dist_backend}), "
        f"started by {plan.start_method}: {plan.reason}",
        flush=True,
    )
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nblaunch-test-") as log_dir:
        setup = jobs.Setup(
            replace(spec, num_processes=plan.num_processes, log_dir=log_dir),
            # TPUs multiply fp32 numbers in several bf16 passes; other devices differ only in the order of summation.
            tolerance=2e-2 if plan.backend.is_lazy else 1e-4,
        )
        failed = [name for name in chosen if not _passes(name, jobs.CHECKS[name], setup)]
    print(
        f"{formatting.count(len(chosen), 'check')} in {time.monotonic() - started_s:.1f} s: {_verdict(failed)}"
    )
    return 1 if failed else 0


def _plan(backend: str, num_processes: int | None, start_method: str) -> tuple[LaunchSpec, LaunchPlan]:
    """Return a launch on this machine and its plan; each check adds its own function to the launch.

    Raises:
        UsageError: the launch is not possible on this machine.
    """
    try:
        chosen = backends.choose(backend)
        if num_processes is None and chosen.is_oversubscribable:
            num_processes = min(_MAX_CPU_PROCESSES, max(2, chosen.device_count()))
        spec = LaunchSpec(
            function=int, num_processes=num_processes, backend=backend, start_method=start_method
        )
        return spec, plan_launch(spec)
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error


def _passes(name: str, check: Check, setup: Setup) -> bool:
    """Run a check; print its line, and the evidence if it failed."""
    began_s = time.monotonic()
    try:
        text, evidence = check(setup), ""
    except Exception as error:
        # The exception serves as this check's evidence; the other checks still run.
        text = f"{type(error).__name__}" if type(error).__name__ != "CheckFailed" else "wrong result:"
        evidence = str(error) if text.endswith(":") else traceback.format_exc()
    took_s = time.monotonic() - began_s
    print(f"  {'FAILED' if evidence else 'ok':<7}{name:<13}{took_s:5.1f} s  {text}", flush=True)
    for line in evidence.splitlines():
        print(f"          {line}", flush=True)
    return not evidence


def _verdict(failed: list[str]) -> str:
    if not failed:
        return "all passed"
    return (
        f"{len(failed)} failed ({', '.join(failed)}). Please report this, with the output above and the output of "
        "`nblaunch env`"
    )
