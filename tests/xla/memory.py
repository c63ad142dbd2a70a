"""Host memory of a launch over time: the kernel and its workers together, without the simulated device memory.

    report = measure("passed")          # in a fresh kernel; a model of 400 MiB, 8 workers, PJRT CPU

On PJRT CPU, device memory is host memory. Every worker counts the bytes of parameters that have arrived on its device;
their sum is subtracted from each sample of the processes' proportional memory (PSS). As a script, it prints a table of
all variants: ``python -m tests.xla.memory``.

Memory of a launch with the model as an argument, in MB (1e6), on PJRT CPU with torch and torch_xla 2.9.0:

     420   the model, in the kernel's pages, which workers don't change
     425   the kernel without the model: Python, torch and torch_xla, shared with the workers
     185   eight workers' own: runtime, process group, objects whose reference counts they changed; 23 each
    1030   at the end
     150   while models move: two workers at a time, each with host copies of one layer
    1180   at the peak; 1340 with all eight at once, in a quarter less time

If every worker builds the model itself, the peak is 4060 with all at once, in 9 s, and 1460 with one_at_a_time() around
the lines that build and move it, in 20 s.

Only a smaller kernel would reduce the sum further: 40 % of it is libraries, which are loaded before the launch.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
NUM_WORKERS = 8
NUM_LAYERS = 16
WIDTH = 2560
MODEL_BYTES = NUM_LAYERS * (WIDTH * WIDTH + WIDTH) * 4
VARIANTS = ("passed", "passed, all at once", "built", "built, one at a time")
_ASKED, _ANSWERED = 1024, 1025


@dataclass(frozen=True)
class Report:
    """The measurements of a launch.

    Args:
        variant: how the workers get the model.
        peak: peak of host memory in bytes, without device bytes.
        end: host memory once all workers have their model.
        start: host memory of the kernel before the launch, with the model and torch_xla.
        elapsed_s: seconds from the launch to the last worker's model.
        num_samples: number of samples.
    """

    variant: str
    peak: int
    end: int
    start: int
    elapsed_s: float
    num_samples: int


def measure(variant: str, device: str = "CPU", timeout_s: float = 140.0) -> Report:
    """Launch in a fresh process and measure it; ``device``: its PJRT_DEVICE."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.xla.memory", variant],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PJRT_DEVICE": device},
        cwd=Path(__file__).parents[2],
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return Report(**json.loads(answer.stdout.splitlines()[-1]))


class Sampler(threading.Thread):
    """Samples a process and its children until it is stopped."""

    def __init__(self, moved: mmap.mmap) -> None:
        super().__init__(daemon=True)
        self.moved = moved
        self.samples: list[int] = []
        self.placed: list[int] = []  # samples until all workers had their model
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            is_asked = bool(self.moved[_ASKED])
            self.samples.append(self.look())
            if is_asked and not self.placed:
                self.placed = list(self.samples)
                self.moved[_ANSWERED] = 1
            self.is_over.wait(0.02)

    def look(self) -> int:
        """Return the present host bytes."""
        from nblaunch.host import memory

        before = self.device_bytes()
        pids = [os.getpid(), *children(os.getpid())]
        total = sum(size for pid in pids if (size := memory.proportional_bytes(pid)) is not None)
        # Bytes that arrived during the reading may be in the sum or not, so use the middle.
        return total - (before + self.device_bytes()) // 2

    def device_bytes(self) -> int:
        """Return the bytes that have arrived on devices whose memory is host memory."""
        from nblaunch.backends.xla import BACKEND

        arrived = sum(struct.unpack(f"{NUM_WORKERS}q", self.moved[: 8 * NUM_WORKERS]))
        return arrived if BACKEND.is_oversubscribable else 0  # a TPU has its own memory


def children(pid: int) -> list[int]:
    """Return the child processes of ``pid``."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in file.read_text().split()]
        except OSError:
            continue
    return found


def build() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def run_one(variant: str) -> Report:
    """Launch, sample and report, in the fresh process."""
    import torch  # noqa: F401  a user's kernel has it

    from nblaunch import notebook_launcher
    from nblaunch.backends.xla import BACKEND

    moved = mmap.mmap(-1, 4096)
    if "all at once" in variant:
        BACKEND.transfers_in_turn = False
    BACKEND.prepare_launcher()
    args = (build(),) if variant.startswith("passed") else (None,)
    sampler = Sampler(moved)
    start = sampler.look()
    sampler.start()
    elapsed_s = notebook_launcher(
        lambda model: _place(model, moved, "one at a time" in variant),
        args,
        NUM_WORKERS if BACKEND.is_oversubscribable else BACKEND.device_count(),
        sync_weights=False,
        dashboard="text",
    )
    sampler.is_over.set()
    sampler.join()
    placed = sampler.placed
    return Report(variant, max(placed), placed[-1], start, elapsed_s, len(placed))


def _place(model: Any, moved: mmap.mmap, is_alone: bool) -> float:
    """Prepare the model in a worker, counting arriving bytes."""
    import torch

    from nblaunch import Accelerator, one_at_a_time

    begun_s = time.monotonic()
    accelerator = Accelerator()
    rank = accelerator.process_index
    original = torch.nn.Linear._apply

    def count(self: Any, function: Any, recurse: bool = True) -> Any:
        was_there = self.weight.device.type == "xla"
        result = original(self, function, recurse)
        if not was_there:
            so_far = struct.unpack_from("q", moved, 8 * rank)[0]
            size = sum(p.numel() * 4 for p in self.parameters())
            struct.pack_into("q", moved, 8 * rank, so_far + size)
        return result

    torch.nn.Linear._apply = count  # type: ignore[method-assign]
    with one_at_a_time() if is_alone else nullcontext():
        model = build() if model is None else model
        if is_alone:
            model.to(accelerator.device)
    accelerator.prepare(model)
    accelerator.wait_for_everyone()
    elapsed_s = time.monotonic() - begun_s
    if rank == 0:
        # Let the sampler read once more before the workers continue.
        moved[_ASKED] = 1
        while not moved[_ANSWERED]:
            time.sleep(0.005)
    accelerator.wait_for_everyone()
    return elapsed_s


if __name__ == "__main__":
    if len(sys.argv) > 1:
        report = run_one(sys.argv[1])
        print(json.dumps(vars(report)))
    else:
        print(
            f"PJRT CPU, {NUM_WORKERS} workers, model {MODEL_BYTES / 1e6:.0f} MB; host memory in MB (1e6 bytes)"
        )
        for one in VARIANTS:
            taken = measure(one)
            print(
                f"{one:24} start {taken.start / 1e6:5.0f}  peak {taken.peak / 1e6:5.0f}  end {taken.end / 1e6:5.0f}  "
                f"{taken.elapsed_s:5.1f} s  {taken.num_samples} looks",
                flush=True,
            )
