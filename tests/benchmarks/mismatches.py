"""Collectives that ranks call differently: how many nblaunch and torch explain, and what recording costs.

    python -m tests.benchmarks mismatches [--only DDP] [--notebook 0] [--scripts 1] [--peers 1]

A hang is detected ``hang_timeout_s`` after the last sign of progress; the benchmark measures the time from then to the
explanation. ``--scripts 1`` runs the programs also as scripts, by ``nblaunch launch``. ``--peers 1`` runs the programs
also as plain processes, once with plain torch and once with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, and counts programs
whose output contains the parts of an explanation, except ranks and lines. A program that has not ended some seconds
after all its ranks have imported torch counts as unexplained.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.benchmarks.bench import Row, at_most
from tests.failures.mismatches import MISMATCHES, PREAMBLE, Mismatch
from tests.failures.right_programs import RIGHT_PROGRAMS
from tests.kernels import Kernel

HANG_TIMEOUT_S = 4.0
PEER_TIMEOUT_S = 12.0
IMPORT_TIMEOUT_S = 120.0
NUM_AT_ONCE = 3
TORCH_TYPES = {"float32": "float", "float64": "double", "float16": "half", "int32": "int", "int64": "long"}
"""Types as torch names them in its errors."""
MAX_AFTER_HANG_S = 2.0
MAX_UNEXPLAINED = 0.05
MAX_SHARE = 1.0

EXPLANATION = """
error = nblaunch.last_job().exception()
print("\\n".join([str(error), *getattr(error, "__notes__", [])]))
"""

# In the kernel: the time from the last progress to the explanation of a hang, or to the end of a failing job.
CLOCK = """
import time
from nblaunch import notebook
from nblaunch.diagnosis.hang import progress_of
from nblaunch.events import JobEnded, Note

class Clock:
    def __init__(self):
        self.signs, self.moved_s, self.hung_s, self.ended_s = None, time.monotonic(), 0.0, 0.0
    def on_readings(self, readings):
        signs = [progress_of(0.0, reading, 0, 0).signs for reading in readings]
        if signs != self.signs:
            self.signs, self.moved_s = signs, time.monotonic()
    def on_event(self, event):
        if isinstance(event, Note) and event.kind == "hang":
            self.hung_s = self.hung_s or time.monotonic()
        elif isinstance(event, JobEnded):
            self.ended_s = time.monotonic()
    def close(self):
        pass

make_runner = notebook.make_runner
def make_timed_runner(spec, plan, listeners):
    global clock
    clock = Clock()
    return make_runner(spec, plan, [*listeners, clock])
notebook.make_runner = make_timed_runner
"""
TOOK = "print(clock.hung_s and clock.hung_s - clock.moved_s, clock.ended_s - clock.moved_s)"

# The steps of the benchmark step_overhead, with and without the calls that recording adds to each.
COST = """
def cost():
    import gc, statistics
    from nblaunch.worker import collective_hooks
    model, optimizer = begin(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
    batch = torch.ones(16, 32)
    def step():
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    hooks = next(one for one in gc.get_objects() if isinstance(one, collective_hooks._Hooks))
    recorder, group = hooks._recorder, hooks._recorder.group_of(dist.group.WORLD)
    def record():
        recorder.note("forward", 1, group, value=1.0)
        recorder.note("backward", 1)
        hooks._owner_of(optimizer)
        recorder.note("step", 1, group, value=0.1)
    def took(function, number):
        before = time.process_time()
        for _ in range(number):
            function()
        return (time.process_time() - before) / number
    took(step, 100)
    steps = [took(step, 100) for _ in range(7)]
    records = [took(record, 5000) for _ in range(7)]
    dist.barrier()
    return statistics.median(records) * 1e6, statistics.median(steps) * 1e6
recorded, stepped = notebook_launcher(cost, num_processes=2, dashboard="none")
print(recorded, stepped)
"""


def measure(only: str = "", notebook: int = 1, scripts: int = 0, peers: int = 0) -> Iterator[Row]:
    chosen = [mismatch for mismatch in MISMATCHES if mismatch.name.startswith(only)]
    if notebook:
        with _kernel() as kernel:
            yield from _explained(kernel, chosen)
            if not only:
                yield from _right(kernel)
                recorded, stepped = map(float, kernel.run(COST).stdout.split()[-2:])
                share = 100 * recorded / stepped
                yield at_most(
                    f"recording a step of {stepped:.0f} us of processor time", share, MAX_SHARE, " %"
                )
    if scripts:
        yield from _explained_in_scripts(chosen)
    if peers:
        plain = [mismatch for mismatch in chosen if "ccelerator" not in mismatch.name]
        for label, detail in (("torch alone", "OFF"), ("TORCH_DISTRIBUTED_DEBUG=DETAIL", "DETAIL")):
            with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
                good = sum(pool.map(partial(_is_explained_by_torch, detail=detail), plain))
            yield Row(f"explained by {label}, ranks and lines left out", f"{good}/{len(plain)}")


def _kernel() -> Kernel:
    kernel = Kernel.start(env={"NBLAUNCH_LOG_DIR": tempfile.mkdtemp(prefix="nblaunch-mismatches-")})
    kernel.run(PREAMBLE)
    kernel.run(CLOCK)
    return kernel


def _explained(kernel: Kernel, chosen: Sequence[Mismatch]) -> Iterator[Row]:
    num_good, num_blamed = 0, 0
    after_hangs_s, after_progress_s = [0.0], [0.0]
    for mismatch in chosen:
        kernel.run(mismatch.source)
        cell = kernel.submit(
            f"notebook_launcher(train, num_processes={mismatch.num_ranks}, hang_timeout_s={HANG_TIMEOUT_S}, "
            "on_hang='stop', interrupt_grace_s=1)"
        ).wait(90)
        explanation = kernel.run(EXPLANATION, store_history=False).stdout if cell.error is not None else ""
        problems = mismatch.problems(explanation, cell.shown)
        num_good += not problems
        num_blamed += any(problem.startswith("accuses") for problem in problems)
        hung_s, ended_s = map(float, kernel.run(TOOK, store_history=False).stdout.split())
        if hung_s:
            after_hangs_s.append(hung_s - HANG_TIMEOUT_S)
        else:
            after_progress_s.append(ended_s)
        if problems:
            yield Row(mismatch.name, "; ".join(problems))
    limit = len(chosen) - int(MAX_UNEXPLAINED * len(chosen))
    yield Row("mismatches explained", f"{num_good}/{len(chosen)}", f">= {limit}", num_good >= limit)
    yield Row("of these, innocent ranks accused", str(num_blamed), "0", num_blamed == 0)
    what = f"the longest of {len(after_hangs_s) - 1} hangs, from its detection to its explanation"
    yield at_most(what, max(after_hangs_s), MAX_AFTER_HANG_S, " s")
    what = f"the longest of {len(after_progress_s) - 1} others, from the last progress to the end of the job"
    yield Row(what, f"{max(after_progress_s):.1f} s")


def _explained_in_scripts(chosen: Sequence[Mismatch]) -> Iterator[Row]:
    num_good, num_blamed = 0, 0
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for mismatch, problems in zip(chosen, pool.map(_problems_of_script, chosen), strict=True):
            num_good += not problems
            num_blamed += any(problem.startswith("accuses") for problem in problems)
            if problems:
                yield Row(f"script: {mismatch.name}", "; ".join(problems))
    limit = len(chosen) - int(MAX_UNEXPLAINED * len(chosen))
    yield Row(
        "mismatches explained in scripts", f"{num_good}/{len(chosen)}", f">= {limit}", num_good >= limit
    )
    yield Row("of these, innocent ranks accused", str(num_blamed), "0", num_blamed == 0)


def _problems_of_script(mismatch: Mismatch) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(f"{mismatch.source}\n{PREAMBLE}\ntrain()\n")  # lines are numbered within the cell
        options = [
            f"--num_processes={mismatch.num_ranks}", "--cpu", f"--hang_timeout_s={HANG_TIMEOUT_S}",
            "--on_hang=stop", "--interrupt_grace_s=1",
        ]  # fmt: skip
        ended = subprocess.run(
            [sys.executable, "-m", "nblaunch", "launch", *options, str(path)],
            env={**os.environ, "NBLAUNCH_LOG_DIR": folder},
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
    output = ended.stdout + ended.stderr
    # The error follows the table, whose last line names the logs.
    return mismatch.problems(output.rpartition("\nlogs: ")[2].partition("\n")[2], output)


def _right(kernel: Kernel) -> Iterator[Row]:
    num_quiet = 0
    for program in RIGHT_PROGRAMS:
        kernel.run(program.source)
        cell = kernel.submit(f"notebook_launcher(train, num_processes={program.num_ranks})").wait(90)
        num_quiet += cell.error is None and "very rank" not in cell.shown
    total = len(RIGHT_PROGRAMS)
    yield Row(
        "right programs without a message", f"{num_quiet}/{total}", f"{total}/{total}", num_quiet == total
    )


def _is_explained_by_torch(mismatch: Mismatch, detail: str) -> bool:
    """Return whether the output of plain processes has the texts that an explanation must have."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        imports = PREAMBLE.replace(
            "import nblaunch\nfrom nblaunch import notebook_launcher, Accelerator\n", ""
        )
        ready = f'open({folder!r} + "/ready" + os.environ["RANK"], "w").close()'
        path.write_text(f"{imports}\n{ready}\n{mismatch.source}\ntrain()\n")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        output = Path(folder) / "output"
        with output.open("w") as file:
            processes = [
                subprocess.Popen(
                    [sys.executable, str(path)],
                    stdout=file,
                    stderr=file,
                    env=_environment(rank, mismatch, port, detail),
                )
                for rank in range(mismatch.num_ranks)
            ]
            deadline = time.monotonic() + IMPORT_TIMEOUT_S
            while len(list(Path(folder).glob("ready*"))) < len(processes) and time.monotonic() < deadline:
                time.sleep(0.1)
            deadline = time.monotonic() + PEER_TIMEOUT_S
            for process in processes:
                try:
                    process.wait(max(deadline - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        text = output.read_text(errors="replace").lower()
        # torch writes types and shapes in its own way, and the source of the line that raised.
        words = [word.lower().partition("[")[0] for word in mismatch.says if not word.startswith("if ")]
        wanted = [TORCH_TYPES.get(word, word) for word in words]
        shapes = [word.partition("[")[2].rstrip("]") for word in mismatch.says if "[" in word]
        errors = "\n".join(
            line for line in text.splitlines() if "error" in line or "detected mismatch" in line
        )
        return bool(errors) and all(
            word.replace("_", "") in errors.replace("_", "") for word in (*wanted, *shapes)
        )


def _environment(rank: int, mismatch: Mismatch, port: int, detail: str) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(mismatch.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISTRIBUTED_DEBUG": detail,
    }
