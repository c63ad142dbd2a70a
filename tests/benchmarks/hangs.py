"""Whether hangs are found, and work is left alone, whatever threads of the ranks do meanwhile.

    python -m tests.benchmarks.hangs [--rounds 50]

Three ranks stand still in one of several ways, or work. With ``on_hang="stop"`` a hang ends in ``JobHung``, work
without steps goes on and is reported as a suspicion, and work with steps is not mentioned.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tests.benchmarks.bench import Row, call, count, kernel, show

TIMEOUT_S = 2.0
_BATCH = 9
_HUNG, _SUSPECTED, _WELL = "hung", "suspected", "well"


def measure(rounds: int = 50) -> Iterator[Row]:
    bad: list[str] = []
    setup = "import torch, torch.distributed, nblaunch.training.accelerator"
    with kernel(setup, check=False) as started:
        for first in range(0, rounds, _BATCH):
            bad += call(started, in_kernel_rounds, first, min(_BATCH, rounds - first))
    yield count("hangs found and work left alone: rounds", rounds - len(bad), rounds, ", ".join(bad))


def in_kernel_rounds(first: int, rounds: int) -> list[str]:
    random.seed(first)
    names = [list(_CASES)[i % len(_CASES)] for i in range(first, first + rounds)]
    found = [(name, _found_in(name)) for name in names]
    return [f"{name}: {what}" for name, what in found if what != _CASES[name][1]]


def _found_in(name: str) -> str:
    from nblaunch import JobHung, notebook_launcher

    job = notebook_launcher(
        _work, (name, random.uniform(0.0, 0.4)), 3, background=True, dashboard="none", interrupt_grace_s=1,
        hang_timeout_s=TIMEOUT_S, on_hang="stop",
    )  # fmt: skip
    reports = _Reports()
    job._listeners.append(reports)
    reports.is_over.wait(10 * TIMEOUT_S)
    if reports.texts and "no progress" not in reports.texts[0]:
        job.cancel()  # a suspicion stops nothing
    error = job.exception(20)
    if isinstance(error, JobHung):
        return _HUNG
    return _SUSPECTED if reports.texts else _WELL


class _Reports:
    """A listener that keeps what is reported about hangs."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.is_over = threading.Event()

    def on_event(self, event: object) -> None:
        if getattr(event, "kind", "") == "hang":
            self.texts.append(getattr(event, "text", ""))
            self.is_over.set()

    def on_readings(self, samples: object) -> None:
        """Not wanted."""

    def close(self) -> None:
        self.is_over.set()


# --- in the workers --------------------------------------------------------------------------------------------------


def _work(name: str, delay_s: float) -> None:
    import torch.distributed as dist

    dist.init_process_group()
    time.sleep(delay_s * dist.get_rank())
    _CASES[name][0](dist.get_rank())


def _different_collectives(rank: int) -> None:
    import torch
    import torch.distributed as dist

    dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(2))


def _with_thread(spin: Callable[[], None]) -> Callable[[int], None]:
    def case(rank: int) -> None:
        def spin_for_ever() -> None:
            while True:
                spin()

        threading.Thread(target=spin_for_ever, daemon=True).start()
        _different_collectives(rank)

    return case


def _monitor() -> None:
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        pass
    time.sleep(0.24)  # 4 %


def _talk() -> None:
    print("still here")
    time.sleep(0.3)


def _step() -> None:
    import torch

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1).step()


def _c_loop(rank: int) -> None:
    collections.deque(itertools.repeat(None), maxlen=0)


def _c_loop_after_a_step(rank: int) -> None:
    _step()
    _c_loop(rank)


def _one_in_a_c_loop(rank: int) -> None:
    if rank == 1:
        _c_loop(rank)
    _different_collectives(rank)


def _talk_for_ever(rank: int) -> None:
    while True:
        _talk()


def _slow_steps(rank: int) -> None:
    for _ in range(4):
        time.sleep(TIMEOUT_S / 2)
        _step()


def _one_evaluates(rank: int) -> None:
    import torch.distributed as dist
    import tqdm

    if rank == 0:
        for _ in tqdm.tqdm(range(4), mininterval=0):
            time.sleep(TIMEOUT_S / 2)
    dist.barrier()


_CASES: dict[str, tuple[Callable[[int], None], str]] = {
    "threads that call sleep(0)": (_with_thread(lambda: time.sleep(0)), _HUNG),
    "monitor threads": (_with_thread(_monitor), _HUNG),
    "threads that print": (_with_thread(_talk), _HUNG),
    "one in a C loop": (_one_in_a_c_loop, _HUNG),
    "all in a C loop after a step": (_c_loop_after_a_step, _HUNG),
    "all in a C loop": (_c_loop, _SUSPECTED),
    "all print": (_talk_for_ever, _SUSPECTED),
    "slow steps": (_slow_steps, _WELL),
    "one evaluates": (_one_evaluates, _WELL),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    sys.exit(0 if show("Hangs", measure(**vars(parser.parse_args()))) else 1)
