"""How often and how soon the debugger stops at the user's frame after a failure, counted over seeded failures.

    python -m tests.benchmarks debugging [--rounds 100]

Four ranks train; one of them fails at a random step, in a random way, while the others wait for it in an all-reduce.
Every rank is then asked for a variable, and pdb is opened in the next cell as a user does, by typing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.benchmarks.bench import Row, at_most, count, kernel
from tests.kernels import Kernel

_SIZE = 4
_FRAME_WITHIN_S = 1.0
_SETUP = """
import torch, nblaunch
from nblaunch import Accelerator, notebook_launcher

class Broken(torch.utils.data.Dataset):
    def __init__(self, bad): self.bad = bad
    def __len__(self): return 64
    def __getitem__(self, index):
        marker = index
        if index == self.bad: raise KeyError(index)  # FAILS
        return torch.ones(4)

def train(kind, bad_rank, bad_step):
    accelerator = Accelerator()
    rank = accelerator.process_index
    data = Broken(bad_step if kind == "dataset" and rank == bad_rank else -1)
    batches = iter(torch.utils.data.DataLoader(data, batch_size=1))
    for step in range(32):
        marker = step
        is_bad = rank == bad_rank and step == bad_step
        batch = next(batches)
        if is_bad and kind == "raise": raise ValueError("no")  # FAILS
        if is_bad and kind == "assert": assert batch.sum() < 0, "positive"  # FAILS
        if is_bad and kind == "shape": batch @ torch.ones(5, 2)  # FAILS
        if is_bad and kind == "function": (lambda marker: marker["x"])(step)  # FAILS
        accelerator.reduce(batch.sum())
"""
_KINDS = ("raise", "assert", "shape", "function", "dataset")


@dataclass(frozen=True)
class Round:
    """One failure.

    Args:
        stands: pdb stopped at the failed line of the user, and knew its variable.
        asked: all ranks returned the value of a variable.
        seconds: time from the call of ``debug()`` to its prompt.
    """

    stands: bool
    asked: bool
    seconds: float


def measure(rounds: int = 100) -> Iterator[Row]:
    draw = random.Random(0)
    with kernel(_SETUP) as started:
        done = [_round(started, draw) for _ in range(rounds)]
        started.run("nblaunch.last_job().release()")
        started.wait_for_no_processes()
    yield count(
        "failures at whose line pdb stops, with the variables", sum(one.stands for one in done), rounds
    )
    yield count("... after which every rank gives a variable", sum(one.asked for one in done), rounds)
    yield at_most(
        "... from debug() to its prompt, the slowest", max(one.seconds for one in done), _FRAME_WITHIN_S, " s"
    )


def _round(started: Kernel, draw: random.Random) -> Round:
    kind, bad_rank, bad_step = draw.choice(_KINDS), draw.randrange(_SIZE), draw.randrange(1, 30)
    args = f"({kind!r}, {bad_rank}, {bad_step})"
    launch = f"notebook_launcher(train, {args}, {_SIZE}, threads_per_process=1, post_mortem=True)"
    cell = started.submit(launch).wait()
    assert cell.error is not None, cell.describe()
    answers = started.run("dict(nblaunch.last_job().inspect('marker'))").value
    began_s = time.monotonic()
    debugging = started.submit("nblaunch.debug()", is_typed_into=True)
    debugging.wait_for_input()
    seconds = time.monotonic() - began_s
    for line in ("p 'marker', marker", "q"):
        debugging.type(line)
    shown = debugging.wait().stdout
    stands = "# FAILS" in shown and f"('marker', {bad_step})" in shown
    return Round(stands, answers == dict.fromkeys(range(_SIZE), bad_step), seconds)
