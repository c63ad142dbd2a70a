"""``nblaunch env``: prints versions, devices, memory and possible problems on this machine, for bug reports.

The report describes a launch from a fresh kernel; ``%run -m nblaunch env`` in a cell describes a launch from that
kernel. The command counts devices without initialising them, and starts nothing. It prints only the values of
nblaunch's own environment variables (``env.TABLE``), because others may hold secrets.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence

from nblaunch import backends, env, formatting, packages
from nblaunch.backends import cpu
from nblaunch.backends.base import Backend
from nblaunch.config import files
from nblaunch.config.settings import ConfigError
from nblaunch.dashboard import kernel_shell
from nblaunch.diagnosis import memory
from nblaunch.host import gpus, proc, tpu
from nblaunch.launcher.plan import LaunchPlan, plan_launch
from nblaunch.spec import LaunchSpec

_PACKAGES = (
    "torch", "torch_xla", "torch_tpu", "libtpu", "ipykernel", "ipython", "ipywidgets", "jupyter_client", "cloudpickle",
    "safetensors", "numpy", "accelerate", "transformers", "lightning", "deepspeed", "ray", "torchdata",
)  # fmt: skip

_SMALL_SHM_BYTES = 512 << 20
_FILES_PER_PROCESS = 64  # more descriptors than a launcher needs per worker

Report = dict[str, dict[str, str]]
"""Section -> name -> value, all as printed."""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Set up the command."""
    parser.description = (
        "Report versions, devices, memory, the start method of a launch from a fresh kernel, and problems on this "
        "machine. The output is meant for bug reports and contains no secrets."
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    report, problems, notes = collect()
    if arguments.json:
        print(json.dumps({**report, "problems": problems, "notes": notes}, indent=2))
    else:
        print(_render(report, problems, notes))
    return 0


def collect() -> tuple[Report, list[str], list[str]]:
    """Return the report, problems that the user should solve, and notes about this machine."""
    problem, plan = _torch_error(), None
    has_torch = not problem
    if has_torch:
        try:
            plan = plan_launch(LaunchSpec(function=int))  # it is only planned
        except (ValueError, RuntimeError) as error:
            problem = f"a launch is not possible: {error}"
    # For each backend, why its devices can't be used; None if they can.
    backend_problems = {
        name: _problem(backend)
        for name, backend in backends.discover().items()
        if name != "cpu" and has_torch
    }
    config, config_problems = _config()
    launched_from = "this kernel" if kernel_shell() is not None else "a fresh kernel"
    report: Report = {
        "versions": _versions(),
        "devices": {"cpu": _cores(), **_devices(backend_problems), **_chips()},
        "memory": _memory(),
        "launch": {"from": launched_from, **(_launch(plan) if plan is not None else {"problem": problem})},
        "settings of nblaunch launch": config,
        "environment variables": _variables(),
    }
    problems = [
        *config_problems,
        *([problem] if problem else []),
        *(plan.warnings if plan else ()),
        *_device_problems(backend_problems),
        *_host_problems(plan),
    ]
    return report, problems, list(_launch_notes(plan)) if plan else []


def _render(report: Report, problems: Sequence[str], notes: Sequence[str]) -> str:
    lines: list[str] = []
    for title, section in report.items():
        lines += [title, *(f"  {name:<20} {value}" for name, value in section.items()), ""]
    lines += ["problems", *([f"  - {text}" for text in problems] or ["  none"])]
    if notes:
        lines += ["", "notes", *(f"  - {text}" for text in notes)]
    return "\n".join(lines)


# --- sections --------------------------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    versions = {name: packages.version(name) for name in _PACKAGES}
    return {
        "nblaunch": sys.modules["nblaunch"].__version__,  # this file must not import the package above it
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        **{name: version for name, version in versions.items() if version},
        "not installed": ", ".join(name for name, version in versions.items() if not version),
    }


def _torch_error() -> str:
    """Return why torch can't be imported; empty if it can."""
    try:
        importlib.import_module("torch")
    except Exception as error:  # a broken installation may raise anything
        return (
            f"torch can't be imported: {type(error).__name__}: {error}. Install it again: https://pytorch.org"
        )
    return ""


def _cores() -> str:
    bounds = [f"the machine has {os.cpu_count()}"]
    if hasattr(os, "sched_getaffinity"):  # macOS does not bind processes to cores
        bounds.append(f"this process may run on {len(os.sched_getaffinity(0))}")
    if quota := cpu.cpu_quota(proc.cgroup_folders("cpu")):
        bounds.append(f"a quota of {quota:g}")
    return f"{formatting.count(cpu.usable_cores(), 'CPU core')} usable ({', '.join(bounds)})"


def _problem(backend: Backend) -> str | None:
    return backend.launch_problem() if backend.affinity() > 0 else backend.unavailable_reason()


def _devices(problems: Mapping[str, str | None]) -> dict[str, str]:
    families = backends.discover()
    return {
        name: f"can't be used: {problem}"
        if problem
        else formatting.count(families[name].device_count(), families[name].device_noun)
        for name, problem in problems.items()
    }


def _chips() -> dict[str, str]:
    """Return GPUs and TPUs under their drivers' names, even if no backend can use them."""
    return {
        **{f"GPU {index}": text for index, text in enumerate(gpus.descriptions())},
        **{f"TPU {kind}": formatting.count(count, "chip") for kind, count in tpu.chips().items()},
    }


def _memory() -> dict[str, str]:
    facts = memory.read_facts()
    shm = f"{formatting.size(facts.shm_used)} used of {formatting.size(facts.shm_size)}"
    return {
        "host": f"{_size(facts.available)} available of {_size(facts.limit)}",
        "/dev/shm": shm if facts.shm_size else "does not exist",
    }


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else formatting.size(num_bytes)


def _launch(plan: LaunchPlan) -> dict[str, str]:
    return {
        "backend": plan.backend.name,
        "processes": str(plan.num_processes),
        "process group": plan.backend.dist_backend,
        "start method": f"{plan.start_method}: {plan.reason}",
        "threads per process": str(plan.num_threads),
    }


def _config() -> tuple[dict[str, str], list[str]]:
    """Return the configuration file of `nblaunch launch` with its settings, and the problem if the file is invalid."""
    path = str(files.default_path())
    try:
        layers = files.find_layers(None)
    except ConfigError as error:
        return {"file": path}, [f"the settings of `nblaunch launch` can't be used: {error}"]
    settings = {name: str(value) for layer in layers for name, value in layer.values.items()}
    file = layers[0].source.removeprefix("file ") if layers else f"none ({path} does not exist)"
    return {"file": file, **settings}, []


def _variables() -> dict[str, str]:
    """Return nblaunch's variables with their values, and the names of other variables that affect processes."""
    environ = env.snapshot()
    affecting = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        *tpu.TOPOLOGY_VARIABLES,
    )
    return {
        **{name: environ[name] for name in env.TABLE if name in environ},
        **{name: "(set)" for name in affecting if name in environ},
    }


# --- problems and notes ----------------------------------------------------------------------------------------------


def _launch_notes(plan: LaunchPlan) -> Iterator[str]:
    if plan.fallback:
        yield plan.fallback
    # Check only fp16, because whether a GPU supports bf16 is unknown without a CUDA context.
    problem = plan.backend.precision_problem("fp16")
    if problem is not None:
        how = "has no effect" if plan.backend.computes_in_full("fp16") else "can't be used"
        yield f"mixed_precision='fp16' {how}: {problem}"


def _device_problems(problems: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a problem for each backend whose devices exist but can't be used."""
    for name, problem in problems.items():
        if problem and backends.discover()[name].is_present():
            yield f"backend={name!r} can't be used: {problem}"


def _host_problems(plan: LaunchPlan | None) -> Iterator[str]:
    facts = memory.read_facts()
    if 0 < facts.shm_size < _SMALL_SHM_BYTES:
        yield (
            f"/dev/shm has only {formatting.size(facts.shm_size)} (the default in containers is 64 MB). Data "
            "loader workers put batches there and are killed by SIGBUS when it is full. Start the container with "
            "--shm-size=8g, or use num_workers=0"
        )
    if line := memory.shm_line(facts):
        yield line
    if facts.oom_kills:
        killed = formatting.count(facts.oom_kills, "process")
        yield f"since this container started, the system has killed {killed} because memory ran out"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = _FILES_PER_PROCESS * (plan.num_processes if plan else 1)
    if 0 <= files < needed:
        yield (
            f"only {files} files may be open at the same time (ulimit -n), but {needed} may be needed; run ulimit "
            "-n 4096"
        )
