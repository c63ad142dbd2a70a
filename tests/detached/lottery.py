"""Kills, interrupts, full disks, removed and damaged files at random moments of jobs, with the required outcomes.

    python -m tests.detached.lottery [--draws 50] [--kinds rank guardian ...] [--seed 0]

A job that survives returns its value, or raises an error that names the killed process. No process is left. The program
prints every draw that ends otherwise, with all details. It needs the right to mount a small disk.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

import nblaunch
from nblaunch import Accelerator, Job, Session, notebook_launcher

TOKEN = "NBLAUNCH_LOTTERY"
"""Environment variable that marks the processes of one lottery, so that it kills no others."""

LEFT_S = 15.0
"""Seconds that processes may take to end on an overloaded machine."""

RESULT_S = 90.0
STEPS = 60
STEP_S = 0.01
SPAN_S = 1.5
"""Seconds after the launch in which a fault happens; a job takes about as long."""

VALUE = {"steps": STEPS, "data": b"x" * 300_000}


def work() -> dict[str, Any]:
    """Print for a while, and return a value."""
    for step in range(STEPS):
        print(f"step {step}")
        time.sleep(STEP_S)
    return VALUE


def train(model: Any) -> str:
    """Train such that all weights equal the number of steps after each step."""
    import torch

    accelerator = Accelerator()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(STEPS):
        loss = -sum(parameter.sum() for parameter in model.parameters())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S)
    return "trained"


def untrained() -> Any:
    """Return a model whose weights are 0."""
    import torch

    model = torch.nn.Linear(256, 256)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def launch(**settings: Any) -> Job[Any]:
    return notebook_launcher(
        work, num_processes=2, backend="cpu", background=True, detach=True, dashboard="none", **settings
    )


def launch_node(node_rank: int, port: int) -> None:
    """Launch one rank as one of two nodes, and print the outcome."""
    try:
        notebook_launcher(
            work, num_processes=1, backend="cpu", dashboard="none",
            num_nodes=2, node_rank=node_rank, master_addr="127.0.0.1", use_port=port, rdzv_timeout_s=20,
        )  # fmt: skip
    except BaseException as error:
        print(f"END {type(error).__name__}: {error}".replace("\n", " "), flush=True)
    else:
        print("END value", flush=True)


def result_of(job: Job[Any]) -> tuple[str, Any]:
    """Return the kind of outcome, and the value or the error."""
    try:
        return "value", job.result(RESULT_S)
    except BaseException as error:
        return type(error).__name__, error


def processes(*parts: str) -> list[psutil.Process]:
    """Return the processes of this lottery, except this one, whose command lines contain all ``parts``."""
    matches = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if (
                process.pid != os.getpid()
                and process.environ().get(TOKEN) == os.environ[TOKEN]
                and all(part in line for part in parts)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                matches.append(process)
    return matches


def first_of(candidates: list[psutil.Process]) -> list[psutil.Process]:
    """Return processes whose parent is not among them: forked workers have the command line of their parent."""
    pids = {process.pid for process in candidates}
    parents = []
    for process in candidates:
        with suppress(psutil.Error):
            if process.ppid() not in pids:
                parents.append(process)
    return parents


class Lottery:
    """The draws; each method named after a kind returns what is wrong, or an empty string.

    Args:
        folder: folder for the jobs, on a small disk.
        seed: seed of the draws.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)

    def wait(self, span_s: float = SPAN_S) -> None:
        """Wait for a random time."""
        time.sleep(self._random.uniform(0.0, span_s))

    def kill(self, find: Callable[[], list[psutil.Process]]) -> bool:
        """Kill one of the present processes; return whether there was one."""
        candidates = find()
        if not candidates:
            return False
        with suppress(psutil.NoSuchProcess):
            self._random.choice(candidates).kill()
        return True

    # --- kinds ---------------------------------------------------------------------------------------------------

    def kernel(self) -> str:
        """Kill the launching process, while it launches or later."""
        before = {job.id for job in nblaunch.jobs()}
        program = "from tests.detached import lottery; job = lottery.launch(); job.wait()"
        launching = subprocess.Popen([sys.executable, "-c", program])
        self.wait(2 * SPAN_S)
        launching.kill()
        launching.wait()
        limit_s = time.monotonic() + LEFT_S
        while processes("job_process") and time.monotonic() < limit_s:
            time.sleep(0.02)
        new = [job.id for job in nblaunch.jobs() if job.id not in before]
        return "".join(self._unless_value(nblaunch.attach(name, dashboard="none")) for name in new)

    def job_process(self) -> str:
        job = launch()
        self.wait()
        self.kill(lambda: first_of(processes("job_process")))
        kind, end = result_of(job)
        if kind == "value" and end == VALUE:
            return ""
        listed = [summary.status for summary in nblaunch.jobs() if summary.id == job.id]
        is_good = kind == "JobLost" and "was killed" in str(end) and listed == ["lost"]
        return "" if is_good else f"{kind}: {end}, listed as {listed}"

    def rank(self) -> str:
        job = launch()
        self.wait()
        self.kill(lambda: [psutil.Process(pid) for pid in job.pids.values() if psutil.pid_exists(pid)])
        kind, end = result_of(job)
        is_good = kind == "WorkerDied" and "SIGKILL" in str(end) and "rank " in str(end)
        return "" if is_good or end == VALUE else f"{kind}: {end}"

    def guardian(self) -> str:
        job = launch()
        self.wait()
        self.kill(lambda: processes("nblaunch-guardian"))
        return self._unless_value(job)

    def forkserver(self) -> str:
        job = launch(start_method="forkserver")
        self.wait()
        self.kill(lambda: first_of(processes("start_methods.forkserver")))
        kind, end = result_of(job)
        is_good = kind in ("WorkerDied", "LaunchError") and "SIGKILL" in str(end)
        return "" if is_good or end == VALUE else f"{kind}: {end}"

    def agent(self) -> str:
        """Kill the agent of one of two nodes, while they meet or later."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = (
            "import sys; from tests.detached.lottery import launch_node; launch_node(*map(int, sys.argv[1:]))"
        )
        nodes = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(node), str(port)], stdout=subprocess.PIPE, text=True
            )
            for node in range(2)
        ]
        while not processes("nblaunch.nodes.agent") and not any(node.poll() for node in nodes):
            time.sleep(0.01)
        self.wait(2 * SPAN_S)
        self.kill(lambda: first_of(processes("nblaunch.nodes.agent")))
        outputs = [node.communicate(timeout=RESULT_S)[0] for node in nodes]
        ends = [text.rpartition("END ")[2].strip() for text in outputs]
        reasons = (
            "NodeLost: ",
            "LaunchError: this node's agent has died",
            "LaunchError: not all nodes joined",
            # The killed agent had not opened the store yet.
            "LaunchError: node 1 can't reach the rendezvous",
        )
        is_good = all(end == "value" or end.startswith(reasons) for end in ends)
        return "" if is_good else f"{ends}"

    def interrupt(self) -> str:
        """Interrupt once or twice."""
        job = launch()
        self.wait()
        job.interrupt()
        if self._random.random() < 0.3:
            self.wait(0.3)
            job.interrupt()
        kind, end = result_of(job)
        return "" if kind == "KeyboardInterrupt" or end == VALUE else f"{kind}: {end}"

    def weights(self) -> str:
        """Interrupt training in a detached job: the weights must belong to a complete step."""
        import torch

        model = torch.nn.Linear(8, 4)
        job: Job[Any] = notebook_launcher(
            train, (model,), 2, backend="cpu", background=True, detach=True, dashboard="none"
        )  # fmt: skip
        self.wait(4 * SPAN_S)
        job.interrupt()
        kind, end = result_of(job)
        if kind not in ("KeyboardInterrupt", "value"):
            return f"{kind}: {end}"
        if not job.weights():  # it came before the function, or a note says why
            return "" if kind == "KeyboardInterrupt" else "no weights"
        job.load_weights(model)
        return self._unless_whole(model, kind == "value")

    def session(self) -> str:
        """Interrupt ``session.run`` while it trains, or while it sends its value and weights."""
        model = untrained()
        with Session(2, backend="cpu") as session:
            kind, end = self._interrupted(lambda: session.run(train, (model,), dashboard="none"))
            return self._unless_kept(model, kind, end, session.result)

    def launch(self) -> str:
        """Interrupt ``notebook_launcher`` at any time until it has returned."""
        model = untrained()
        kind, end = self._interrupted(
            lambda: notebook_launcher(
                train, (model,), 2, backend="cpu", start_method="fork", dashboard="none"
            )
        )
        job = nblaunch.last_job()
        return self._unless_kept(model, kind, end, lambda: job.result() if job is not None else None)

    def damage(self) -> str:
        """Damage a file of an ended job: that job must report it, and another must be unaffected."""
        hurt, other = launch(), launch()
        if result_of(hurt) != ("value", VALUE):
            return "no value"
        self.wait()
        path = self._random.choice([path for path in hurt.log_dir.rglob("*") if path.is_file()])
        data = path.read_bytes()
        at = self._random.randint(0, len(data))
        kind = self._random.choice(["cut", "changed", "longer"])
        path.write_bytes(
            {"cut": data[:at], "changed": data[:at] + b"?" + data[at + 1 :], "longer": data + b"?"}[kind]
        )
        try:
            listed = [summary.id for summary in nblaunch.jobs()]
            if not {hurt.id, other.id} <= set(listed):
                return f"{path.name} is {kind}: listed are {listed}"
            end = result_of(nblaunch.attach(hurt.id, dashboard="none"))
        except LookupError as error:
            end = "rejected", error
        is_good = end == ("value", VALUE) or end[0] in ("rejected", "JobLost", "ResultError")
        return ("" if is_good else f"{path.name} is {kind}: {end}") + self._unless_value(other)

    def disk(self) -> str:
        """Fill the disk for a while."""
        job = launch()
        self.wait()
        filler = self._folder / "filler"
        with filler.open("wb") as file, suppress(OSError):
            while True:
                os.write(file.fileno(), bytes(1 << 14))
        self.wait()
        filler.unlink()
        return self._unless_value(job)

    def removal(self) -> str:
        """Remove the job's folder like a cleaner; it must exist again at the job's end."""
        job = launch()
        self.wait(STEPS * STEP_S)
        aside = self._folder / "removed"
        had_ended = False
        with suppress(FileNotFoundError):
            job.log_dir.rename(aside)
            had_ended = (aside / "end.json").exists()  # no process has the value any longer
            shutil.rmtree(aside)
        wrong = self._unless_value(job)
        return "" if had_ended and "was removed" in wrong else wrong

    def _interrupted(self, call: Callable[[], Any]) -> tuple[str, Any]:
        """Interrupt this process at a random moment of ``call``; return the kind of outcome, and value or error."""
        timer = threading.Timer(self._random.uniform(0.0, SPAN_S), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            try:
                return "value", call()
            finally:
                timer.cancel()
                timer.join()
        except BaseException as error:
            return type(error).__name__, error

    def _unless_kept(self, model: Any, kind: str, end: Any, result: Callable[[], Any]) -> str:
        if kind not in ("KeyboardInterrupt", "value"):
            return f"{kind}: {end}"
        has_value = kind == "value"
        with suppress(RuntimeError, KeyboardInterrupt):  # one rank had not returned
            has_value = result() == "trained"
        return self._unless_whole(model, has_value)

    def _unless_whole(self, model: Any, is_complete: bool) -> str:
        """Return what is wrong with the weights: they must belong to one step, to the last one if all ranks
        returned.
        """
        values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
        is_whole = len(values) == 1 and (
            values == {float(STEPS)} if is_complete else values <= set(range(STEPS + 1))
        )
        return "" if is_whole else f"weights {values}, although complete={is_complete}"

    def _unless_value(self, job: Job[Any]) -> str:
        kind, end = result_of(job)
        return "" if kind == "value" and end == VALUE else f"{kind}: {str(end)[:2000]}"

    # --- after each ----------------------------------------------------------------------------------------------

    def what_is_left(self) -> str:
        """Return the processes that are left after some seconds; end them."""
        _, left = psutil.wait_procs(processes(), LEFT_S)
        for process in left:
            process.kill()
        return ", ".join(f"left: {process}" for process in left)


KINDS = (
    "kernel",
    "job_process",
    "rank",
    "guardian",
    "forkserver",
    "agent",
    "interrupt",
    "weights",
    "session",
    "launch",
    "damage",
    "disk",
    "removal",
)


@contextmanager
def small_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lottery-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def main() -> None:
    """Draw as often as the arguments say; print each bad draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=50, help="of each kind")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing more is drawn")
    options = parser.parse_args()
    with small_disk() as folder:
        os.environ |= {
            TOKEN: secrets.token_hex(8), "NBLAUNCH_LOG_DIR": str(folder), "NBLAUNCH_KEEP_JOBS": "6",
        }  # fmt: skip
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # print the counts
        lottery = Lottery(folder, options.seed)
        good, drawn = dict.fromkeys(options.kinds, 0), dict.fromkeys(options.kinds, 0)
        until_s = time.monotonic() + options.limit
        try:
            for number, kind in itertools.product(range(options.draws), options.kinds):
                if time.monotonic() > until_s:
                    break
                wrong = getattr(lottery, kind)()
                wrong = "; ".join(filter(None, (wrong, lottery.what_is_left())))
                drawn[kind] += 1
                good[kind] += not wrong
                if wrong:
                    print(f"{kind} {number}: {wrong}", flush=True)
        finally:
            print(", ".join(f"{kind} {good[kind]} of {drawn[kind]}" for kind in options.kinds), flush=True)
    sys.exit(good != drawn)


if __name__ == "__main__":
    main()
