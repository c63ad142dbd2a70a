"""``nblaunch env``: a report about this machine for bug reports: versions, devices, memory, and possible problems.

It describes a launch from a fresh kernel; ``%run -m nblaunch env`` in a cell describes a launch from that kernel.
Devices are counted without initialising them, and nothing is started. Values of environment variables are shown only
for variables of nblaunch (``env.TABLE``), since others may hold secrets.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform as system_platform
import resource
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from nblaunch import backends, env, formatting
from nblaunch.backends import cpu
from nblaunch.config import files
from nblaunch.config.resolving import ConfigError
from nblaunch.dashboard import kernel_shell
from nblaunch.diagnosis import memory
from nblaunch.host import gpus, notebook_service, proc, tpu
from nblaunch.launcher.plan import LaunchPlan, plan_launch
from nblaunch.spec import LaunchSpec

_PACKAGES = (
    "torch", "torch_xla", "torch_tpu", "libtpu", "ipykernel", "ipython", "ipywidgets", "jupyter_client", "cloudpickle",
    "safetensors", "numpy", "accelerate", "transformers", "lightning", "deepspeed", "ray", "torchdata",
)  # fmt: skip

_SMALL_SHM_BYTES = 512 << 20
_FILES_PER_PROCESS = 64  # more descriptors than a launcher needs per worker


def set_up(parser: argparse.ArgumentParser) -> None:
    """Set up the command."""
    parser.description = (
        "Report versions, devices, memory, the notebook platform, how a launch from a fresh kernel would "
        "start its workers, and problems of this machine. For bug reports; contains no secrets."
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    report = collect()
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return 0


def collect() -> dict[str, Any]:
    """Return the report: sections by name, each a mapping of JSON values, and ``"findings"``."""
    refusal, plan = "", None
    torch_error = _torch_error()
    if torch_error is None:
        try:
            plan = plan_launch(LaunchSpec(function=_nothing))
        except (ValueError, RuntimeError) as error:
            refusal = str(error)
    platform = notebook_service.detect(env.snapshot())
    config, config_error = _config()
    devices = _devices() if torch_error is None else {}
    return {
        "versions": _versions(),
        "notebook": _notebook(platform),
        "devices": {"cpu": _cores(), **devices},
        "gpus": gpus.descriptions(),
        "tpu_chips": dict(tpu.chips()),
        "memory": _memory(),
        "launch_from": "this kernel" if kernel_shell() is not None else "a fresh kernel",
        "launch": _launch(plan, refusal or torch_error or ""),
        "config": config,
        "variables": _variables(),
        "findings": [
            *([f"the settings of `nblaunch launch` can't be used: {config_error}"] if config_error else []),
            *([torch_error] if torch_error else []),
            *([f"a launch is not possible: {refusal}"] if refusal else []),
            *(_launch_findings(plan) if plan else ()),
            *_device_findings(devices),
            *_host_findings(plan),
        ],
    }


# --- sections --------------------------------------------------------------------------------------------------------


def _versions() -> dict[str, str | None]:
    return {
        "nblaunch": sys.modules["nblaunch"].__version__,  # this file may not import the package above it
        "python": f"{system_platform.python_version()} ({sys.executable})",
        "system": system_platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_error() -> str | None:
    """Return why torch can't be imported; None if it can."""
    try:
        importlib.import_module("torch")
    except Exception as error:  # a broken installation may raise anything
        return (
            f"torch can't be imported: {type(error).__name__}: {error}. Install it again: https://pytorch.org"
        )
    return None


def _notebook(platform: notebook_service.Platform) -> dict[str, Any]:
    return {
        "platform": platform.name,
        "title": platform.title,
        "evidence": platform.evidence or None,
    }


def _cores() -> dict[str, Any]:
    return {
        "count": cpu.usable_cores(),
        "noun": "CPU core",
        "of_machine": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "quota": cpu.cpu_quota(proc.cgroup_folders("cpu")),
        "unusable_because": None,
    }


def _devices() -> dict[str, dict[str, Any]]:
    """Return the devices of each backend except the CPU, or why they can't be used."""
    found = {}
    for name, backend in backends.discover().items():
        if name == "cpu":
            continue
        is_usable = backend.affinity() > 0
        found[name] = {
            "count": backend.device_count() if is_usable else 0,
            "noun": backend.device_noun,
            "unusable_because": backend.launch_refusal() if is_usable else backend.unavailable_reason(),
        }
    return found


def _memory() -> dict[str, int | None]:
    facts = memory.read_facts()
    return {
        "limit_bytes": facts.limit,
        "available_bytes": facts.available,
        "dev_shm_bytes": facts.shm_size,
        "dev_shm_used_bytes": facts.shm_used,
        "oom_kills": facts.oom_kills,
    }


def _launch(plan: LaunchPlan | None, refusal: str) -> dict[str, Any]:
    if plan is None:
        return {"refusal": refusal}
    return {
        "backend": plan.backend.name,
        "num_processes": plan.num_processes,
        "process_group": plan.backend.dist_backend,
        "start_method": plan.start_method,
        "reason": plan.reason,
        "threads_per_process": plan.num_threads,
    }


def _config() -> tuple[dict[str, Any], str]:
    """Return the configuration file of `nblaunch launch` with its settings, and why it is invalid."""
    path = files.default_path()
    try:
        layers = files.find_layers(None)
    except ConfigError as error:
        return {"file": str(path), "exists": True, "settings": {}}, str(error)
    values = {name: value for layer in layers for name, value in layer.values.items()}
    return {"file": str(path), "exists": bool(layers), "settings": values}, ""


def _variables() -> dict[str, str]:
    """Return variables of nblaunch with values, and the names of other variables that affect processes."""
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


# --- findings --------------------------------------------------------------------------------------------------------


def _launch_findings(plan: LaunchPlan) -> Iterator[str]:
    yield from filter(None, (plan.fallback, *plan.warnings))
    # fp16 only: whether a GPU supports bf16 is unknown without a CUDA context.
    refusal = plan.backend.precision_refusal("fp16")
    if refusal is not None:
        yield f"mixed_precision='fp16': {refusal}"


def _device_findings(devices: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a finding for each backend with devices that can't be used."""
    for name, found in devices.items():
        if found["unusable_because"] and backends.discover()[name].is_present():
            yield f"backend={name!r} can't be used: {found['unusable_because']}"


def _host_findings(plan: LaunchPlan | None) -> Iterator[str]:
    facts = memory.read_facts()
    if 0 < facts.shm_size < _SMALL_SHM_BYTES:
        yield (
            f"/dev/shm has only {formatting.size(facts.shm_size)} (default of containers: 64 MB): data loaders with "
            "workers put batches there, and are killed by SIGBUS when it is full. Start the container with "
            "--shm-size=8g, or use num_workers=0"
        )
    if line := memory.shm_line(facts):
        yield line
    if facts.oom_kills:
        killed = formatting.count(facts.oom_kills, "process")
        yield f"the system has killed {killed} because memory ran out, since this container started"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = _FILES_PER_PROCESS * (plan.num_processes if plan else 1)
    if 0 <= files < needed:
        yield f"only {files} files may be open at once (ulimit -n), and {needed} may be needed: ulimit -n 4096"


def _nothing() -> None:
    """Do nothing: the function of the planned launch."""


# --- text ------------------------------------------------------------------------------------------------------------


def render(report: Mapping[str, Any]) -> str:
    """Return the report as text."""
    notebook, launch, facts = report["notebook"], report["launch"], report["memory"]
    lines = ["versions"]
    lines += [_line(name, value) for name, value in report["versions"].items() if value]
    absent = [name for name, value in report["versions"].items() if not value]
    lines += [_line("not installed", ", ".join(absent))] if absent else []
    lines += ["", "notebook", _line("platform", _platform_text(notebook))]
    lines += ["", "devices"]
    lines += [_line(name, _device_text(found)) for name, found in report["devices"].items()]
    lines += [_line(f"GPU {index}", text) for index, text in enumerate(report["gpus"])]
    lines += [
        _line(f"TPU {kind}", formatting.count(count, "chip")) for kind, count in report["tpu_chips"].items()
    ]
    lines += ["", "memory"]
    lines += [_line("host", f"{_size(facts['available_bytes'])} available of {_size(facts['limit_bytes'])}")]
    shm_text = f"{_size(facts['dev_shm_used_bytes'])} used of {_size(facts['dev_shm_bytes'])}"
    lines += [_line("/dev/shm", shm_text if facts["dev_shm_bytes"] else "there is none")]
    lines += ["", f"a launch from {report['launch_from']}"]
    lines += [_line(name.replace("_", " "), value) for name, value in launch.items()]
    config = report["config"]
    lines += ["", "settings of `nblaunch launch`"]
    lines += [_line("file", config["file"] if config["exists"] else f"none ({config['file']} would be read)")]
    lines += [_line(name, value) for name, value in config["settings"].items()]
    if report["variables"]:
        lines += ["", "environment variables"]
        lines += [_line(name, value) for name, value in report["variables"].items()]
    lines += ["", "problems and notes"]
    lines += [f"  - {text}" for text in report["findings"]] or ["  none"]
    return "\n".join(lines)


def _line(name: str, value: Any) -> str:
    return f"  {name:<20} {value}"


def _platform_text(notebook: Mapping[str, Any]) -> str:
    evidence = f" (recognised by {notebook['evidence']})" if notebook["evidence"] else ""
    return f"{notebook['title']}{evidence}"


def _device_text(found: Mapping[str, Any]) -> str:
    if found["unusable_because"]:
        return f"can't be used: {found['unusable_because']}"
    text = formatting.count(found["count"], found["noun"])
    if "of_machine" not in found:
        return text
    bounds = [f"the machine has {found['of_machine']}"]
    if found["affinity"] is not None:  # macOS binds no process to cores
        bounds.append(f"this process may run on {found['affinity']}")
    if found["quota"]:
        bounds.append(f"a quota of {found['quota']:g}")
    return f"{text} usable ({', '.join(bounds)})"


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else formatting.size(num_bytes)
