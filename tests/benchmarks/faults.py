"""A hundred launches in one kernel, some with random faults: each ends as it should and leaves nothing behind.

    python -m tests.benchmarks faults [--launches 100] [--seed 0]

Each faulty launch is followed by a good launch that trains a model. The faults: a rank raises, is killed with SIGKILL,
exits with a code, returns a value that can't be pickled, or hangs until its job is stopped; or the cell is interrupted
while workers compute.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.bench import Row, at_most, call, count, kernel
from tests.benchmarks.repeat import MAX_RSS_MB, in_kernel_state

NUM_LAUNCHES = 100
_PER_CALL = 10  # launches between two answers of the kernel, so that a hang is found soon
_HANG_TIMEOUT_S = 1.0


def measure(launches: int = NUM_LAUNCHES, seed: int = 0) -> Iterator[Row]:
    outcomes: list[list[str]] = []
    with kernel() as started:
        call(started, in_kernel_launches, list(FAULTS), seed)  # warm up: every fault once
        before = call(started, in_kernel_state)
        draw = random.Random(seed)
        faults = [draw.choice(list(FAULTS)) for _ in range(launches)]
        for first in range(0, launches, _PER_CALL):
            outcomes += call(started, in_kernel_launches, faults[first : first + _PER_CALL], seed + first)
        after = call(started, in_kernel_state)
        started.wait_for_no_processes(5.0)
    for fault, wrong, _ in outcomes:
        if wrong:
            print(f"a bad one: {fault}: {wrong}", file=sys.stderr)
    for name in FAULTS:
        of_name = [wrong for fault, wrong, _ in outcomes if fault == name]
        if of_name:
            yield count(f"{name}: ends as it should", of_name.count(""), len(of_name))
    yield count("the launch after it is good", sum(not after_wrong for *_, after_wrong in outcomes), launches)
    for name in ("descriptors", "threads", "processes"):
        yield at_most(f"growth of {name}", after[name] - before[name], 0, digits=0)
    yield at_most("growth of memory", after["rss_mb"] - before["rss_mb"], MAX_RSS_MB, " MB", 1)


# --- in the kernel ---------------------------------------------------------------------------------------------------


def in_kernel_launches(faults: list[str], seed: int) -> list[list[str]]:
    """Launch with each fault, then without one; return the fault, and the problems of both launches."""
    random.seed(seed)
    found = []
    for fault in faults:
        wrong = FAULTS[fault]()
        found.append([fault, wrong, _good_launch()])
    gc.collect()
    return found


def _good_launch() -> str:
    import torch

    from nblaunch import notebook_launcher

    model = torch.nn.Linear(4, 1)
    before = model.weight.detach().clone()
    value = notebook_launcher(_train, (model,), num_processes=2, dashboard="none")
    if value != [0, 1]:
        return f"returned {value!r}"
    return "" if not torch.equal(before, model.weight) else "the weights are those from before"


def _train(model: Any) -> list[int]:
    import torch

    from nblaunch import Accelerator

    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return [int(rank) for rank in accelerator.gather(torch.tensor([accelerator.process_index]))]


def _expect(kind: str, function: Callable[[], Any], **options: Any) -> str:
    """Launch; return how the outcome differs from a failure of class ``kind``."""
    from nblaunch import notebook_launcher

    try:
        value = notebook_launcher(function, num_processes=2, dashboard="none", **options)
    except BaseException as error:
        return "" if type(error).__name__ == kind else f"{type(error).__name__}: {error}"
    return f"returned {value!r}"


def _join() -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank()


def _wait_for_rank_1() -> None:
    import torch.distributed as dist

    dist.barrier()


def _raise() -> None:
    if _join() == 1:
        time.sleep(random.uniform(0, 0.1))
        raise LookupError("on purpose")
    _wait_for_rank_1()


def _kill() -> None:
    if _join() == 1:
        time.sleep(random.uniform(0, 0.1))
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for_rank_1()


def _exit() -> None:
    if _join() == 1:
        sys.exit(3)
    _wait_for_rank_1()


def _return_unpicklable() -> Any:
    _join()
    return threading.Lock()


def _compute() -> None:
    import torch

    _join()
    while True:
        torch.ones(64, 64) @ torch.ones(64, 64)


def _hang() -> None:
    if _join() == 1:
        time.sleep(600)
    _wait_for_rank_1()


def _interrupted() -> str:
    timer = threading.Timer(random.uniform(0.05, 0.8), os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        return _expect("KeyboardInterrupt", _compute)
    finally:
        timer.join()


FAULTS: dict[str, Callable[[], str]] = {
    "a rank raises": lambda: _expect("LookupError", _raise),
    "a rank is killed": lambda: _expect("WorkerDied", _kill),
    "a rank exits with a code": lambda: _expect("WorkerDied", _exit),
    "the value can't be pickled": lambda: _expect("ResultError", _return_unpicklable),
    "the cell is interrupted": _interrupted,
    "a rank hangs": lambda: _expect("JobHung", _hang, hang_timeout_s=_HANG_TIMEOUT_S, on_hang="stop"),
}
