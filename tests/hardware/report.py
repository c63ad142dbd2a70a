"""Runs all checks for a machine with NVIDIA GPUs, and writes the figures to one file.

    make test-gpu                               # or: python -m tests.hardware.report [--list] [names of parts]

It writes ``artifacts/gpu.json`` and ``artifacts/gpu.md`` after each part, so results survive if a later part is cut
off. The exit status is 1 if a test failed, a target was missed, or a part did not finish.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nblaunch.host import gpus

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """A file of tests or a benchmark.

    Args:
        name: name on the command line.
        proves: what it shows.
        tests: arguments for pytest; empty for a benchmark.
        benchmark: module of ``tests.benchmarks``; empty for tests.
        limit_s: seconds after which it is ended.
    """

    name: str
    proves: str
    tests: tuple[str, ...] = ()
    benchmark: str = ""
    limit_s: int = 600


PARTS = (
    Part("kernels", "fork and forkserver, DDP's losses, fp16 and bf16, a full GPU, memory given back after success, "
         "error, interrupt and kill, a rank that spins in cudaStreamSynchronize, the table's readings",
         ("tests/hardware/test_cuda_kernel.py",)),
    Part("launches", "launches after forward, backward and import bitsandbytes, accelerate's beside them",
         benchmark="gpu_launches"),
    Part("speed", "steps/s against hand-written loops, launch to first step against accelerate, a bare fork, torchrun",
         benchmark="gpu"),
    Part("fsdp2", "FSDP2 with one rank and two", ("tests/hardware/test_cuda_fsdp2.py",)),
    Part("hazards", "counting without a context, every hazard of a fork, training of one rank and two",
         ("tests/hardware/test_cuda.py",)),
    Part("commands", "nblaunch launch, config, env and test",
         ("tests/hardware/test_cuda_scripts.py", "tests/hardware/test_selfcheck.py", "-m", "cuda")),
    Part("deepspeed", "DeepSpeed with one rank, and two where there are two GPUs",
         ("tests/hardware/test_cuda_deepspeed.py",)),
    Part("training", "compiled models, checkpoints, fp8, collectives, profiles",
         ("tests/hardware/test_cuda_training.py",)),
    Part("interactive", "sessions, the debugger, a detached job", ("tests/hardware/test_cuda_interactive.py",)),
)  # fmt: skip


def run_tests(arguments: Sequence[str], folder: Path, limit_s: int) -> dict[str, Any]:
    """Run pytest; return the number of passed tests, and the other tests with their reasons."""
    report = folder / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}", "-q"]
    is_complete = _run(command, limit_s) is not None and report.exists()
    cases = ElementTree.parse(report).getroot().iter("testcase") if is_complete else ()
    found: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": {}, "complete": is_complete}
    for case in cases:
        reason = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if reason is None:
            found["passed"] += 1
        else:
            kind = "skipped" if reason.tag == "skipped" else "failed"
            found[kind][case.attrib["name"]] = reason.attrib.get("message", "")[:200]
    found["good"] = is_complete and not found["failed"]
    return found


def run_benchmark(name: str, folder: Path, limit_s: int) -> dict[str, Any]:
    """Run a benchmark in a separate process; return its rows."""
    path = folder / "rows.jsonl"
    path.unlink(missing_ok=True)
    status = _run([sys.executable, "-m", "tests.hardware.report", "--rows", str(path), name], limit_s)
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return {
        "rows": found,
        "complete": status == 0,
        "good": status == 0 and all(row["holds"] for row in found),
    }


def _run(command: Sequence[str], limit_s: int) -> int | None:
    """Return the exit status; None if the limit was reached."""
    try:
        return subprocess.run(command, cwd=ROOT, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


def _write_rows(path: Path, name: str) -> None:
    with path.open("a") as file:
        for row in importlib.import_module(f"tests.benchmarks.{name}").measure():
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()


def as_markdown(report: dict[str, Any]) -> str:
    """Return the report as a page."""
    head = f"# GPUs, {report['date']}\n\n{', '.join(report['gpus']) or 'no GPU'}; torch {report['torch']}\n"
    lines = [head]
    for name, part in report["parts"].items():
        verdict = "ok" if part["good"] else "NOT GOOD" if part["complete"] else "CUT OFF"
        lines.append(f"\n## {name}: {verdict}\n\n{part['proves']}; {part['seconds']:.0f} s\n")
        if "rows" in part:
            lines.append("| what | measured | target |\n|---|---|---|")
            lines += [f"| {row['what']} | {row['value']} | {row['target']} |" for row in part["rows"]]
        else:
            lines.append(f"{part['passed']} passed")
            for kind in ("failed", "skipped"):
                lines += [f"* {kind}: {test}: {reason}" for test, reason in part[kind].items()]
    return "\n".join(lines) + "\n"


def run(parts: Sequence[Part], folder: Path) -> bool:
    """Run the parts and add them to the report in ``folder``; return whether all succeeded.

    Other parts of the report stay if they are from the same day, GPUs and torch.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "gpu.json"
    machine = {"date": time.strftime("%Y-%m-%d"), "gpus": gpus.descriptions(), "torch": torch.__version__}
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if {name: report.get(name) for name in machine} != machine:
        report = {**machine, "parts": {}}
    for part in parts:
        begun = time.monotonic()
        found = (
            run_tests(part.tests, folder, part.limit_s)
            if part.tests
            else run_benchmark(part.benchmark, folder, part.limit_s)
        )
        report["parts"][part.name] = {
            "proves": part.proves,
            "seconds": time.monotonic() - begun,
            **found,
        }
        path.write_text(json.dumps(report, indent=1))
        (folder / "gpu.md").write_text(as_markdown(report))
    return all(report["parts"][part.name]["good"] for part in parts)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="All tests and benchmarks for GPUs, with one report.")
    parser.add_argument("names", nargs="*", help="parts to run; all by default")
    parser.add_argument("--list", action="store_true", help="list the parts and what they prove")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.rows is not None:
        _write_rows(options.rows, options.names[0])
        return 0
    unknown = set(options.names) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PARTS)}")
    chosen = [part for part in PARTS if not options.names or part.name in options.names]
    if options.list:
        print("\n".join(f"{part.name:10} {part.proves}" for part in chosen))
        return 0
    return int(not run(chosen, ROOT / "artifacts"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
