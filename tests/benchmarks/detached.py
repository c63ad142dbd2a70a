"""Kernels with a detached job, killed at random moments: no line is lost, and the weights equal any other run's.

python -m tests.benchmarks detached [--rounds 60] [--seed 0]
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.bench import Row, call, count, kernel

_SETUP = "import torch, nblaunch, tests.benchmarks.detached"
_STEPS = 40
_STEP_S = 0.05
_NUM_RANKS = 2
_ATTACHED_WITHIN_S = 2.0


def measure(rounds: int = 60, seed: int = 0) -> Iterator[Row]:
    moments = random.Random(seed)
    attached, whole, equal, slowest_s = 0, 0, 0, 0.0
    with TemporaryDirectory() as folder, kernel(_SETUP, {"NBLAUNCH_LOG_DIR": folder}) as watcher:
        call(watcher, in_kernel_undisturbed)
        for _ in range(rounds):
            with kernel(_SETUP, {"NBLAUNCH_LOG_DIR": folder}, check=False) as launching:
                job_id = call(launching, in_kernel_launch)
                time.sleep(moments.uniform(0.0, 1.5 * _STEPS * _STEP_S))
                launching.kill()
                seconds, has_lines, has_weights = call(watcher, in_kernel_attach, job_id)
            attached += seconds <= _ATTACHED_WITHIN_S
            slowest_s = max(slowest_s, seconds)
            whole += has_lines
            equal += has_weights
    what = f"kernels killed: attached to the job within {_ATTACHED_WITHIN_S:g} s, with the lines so far"
    yield count(what, attached, rounds, f"slowest {slowest_s:.2f} s")
    yield count("... with every line of every rank at the end", whole, rounds)
    yield count("... with the weights of an undisturbed run, to the bit", equal, rounds)


def train(model: Any) -> int:
    import torch

    from nblaunch import Accelerator

    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(_STEPS):
        loss = model(torch.randn(4, 64)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}")
        time.sleep(_STEP_S)
    return _STEPS


def _fresh_model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(64, 64)


_undisturbed: list[Any] = []


def in_kernel_undisturbed() -> None:
    from nblaunch import notebook_launcher

    model = _fresh_model()
    notebook_launcher(train, (model,), num_processes=_NUM_RANKS, backend="cpu", dashboard="none")
    _undisturbed.append(model)


def in_kernel_launch() -> str:
    from nblaunch import notebook_launcher

    job = notebook_launcher(
        train, (_fresh_model(),), num_processes=_NUM_RANKS, backend="cpu", background=True, detach=True
    )
    return str(job.id)


def in_kernel_attach(job_id: str) -> tuple[float, bool, bool]:
    """Return the seconds for attaching, and whether all lines and the right weights arrived in the end."""
    import torch

    import nblaunch

    began = time.perf_counter()
    job = nblaunch.attach(job_id)
    lines = [f"step {step}" for step in range(_STEPS)]
    job.logs(0)
    seconds = time.perf_counter() - began
    job.result(120)
    trained = _fresh_model()
    job.load_weights(trained)
    pairs = zip(trained.parameters(), _undisturbed[0].parameters(), strict=True)
    has_lines = all(job.logs(rank).splitlines() == lines for rank in job.ranks)
    return seconds, has_lines, all(torch.equal(one, other) for one, other in pairs)
