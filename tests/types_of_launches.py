"""Types of launches: mypy checks this file in ``test_types.py``; it never runs."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
from typing_extensions import assert_type

import nblaunch
import nblaunch.launchers
from nblaunch import Accelerator, Job, Session, debug_launcher, launch, notebook_launcher


def train(batch_size: int, lr: float = 0.1) -> dict[str, float]:
    return {"loss": batch_size * lr}


def without_a_value() -> None: ...


def unannotated(x, y=1):
    return x


Metrics = dict[str, float]


def launches(flag: bool) -> None:
    assert_type(notebook_launcher(train, (8,)), Metrics)
    assert_type(notebook_launcher(lambda: 3, num_processes=2, mixed_precision="bf16"), int)
    assert_type(notebook_launcher(train, (8,), return_all=True), list[Metrics])
    assert_type(notebook_launcher(unannotated, (8,)), Any)
    assert_type(notebook_launcher(train, (8,), background=flag), Any)
    assert_type(nblaunch.launchers.notebook_launcher(train, (8,)), Metrics)
    assert_type(debug_launcher(train, (8,)), Metrics)
    assert_type(launch(train, (8,), num_processes=4), Metrics)
    assert_type(launch(train, (8,), return_all=True), list[Metrics])
    notebook_launcher(without_a_value)


async def jobs() -> None:
    job = notebook_launcher(train, (8,), background=True)
    assert_type(job, Job[Metrics])
    assert_type(job.result(timeout=1.0), Metrics)
    assert_type(await job, Metrics)
    assert_type(notebook_launcher(train, (8,), background=True, detach=True), Job[Metrics])
    everywhere = notebook_launcher(train, (8,), background=True, return_all=True)
    assert_type(everywhere.result(), list[Metrics])
    assert_type(launch(train, (8,), background=True), Job[Metrics])
    assert_type(nblaunch.attach("train").result(), Any)
    assert_type(nblaunch.last_job(), Job[Any] | None)


def sessions(session: Session) -> None:
    assert_type(session.run(train, (8,)), Metrics)
    assert_type(session.run(train, (8,), return_all=True), list[Metrics])
    assert_type(notebook_launcher(train, (8,), session=session), Metrics)


def tensors(accelerator: Accelerator, loss: torch.Tensor) -> None:
    assert_type(accelerator.reduce(loss, "mean"), torch.Tensor)
    assert_type(accelerator.gather({"loss": loss}), dict[str, torch.Tensor])


def mistakes() -> None:
    """Contain type errors; without them, mypy reports that the comments are not needed."""
    notebook_launcher(train, (8,), mixed_precision="bf61")  # type: ignore[call-overload]
    notebook_launcher(train, (8,), on_hang="kill")  # type: ignore[call-overload]
    notebook_launcher(train, (8,), num_process=2)  # type: ignore[call-overload]
    Session(start_method="thread")  # type: ignore[arg-type]
