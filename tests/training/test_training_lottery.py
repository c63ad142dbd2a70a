"""A few random training loops compared with one process; ``python -m tests.benchmarks training`` runs more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.benchmarks import training

# Two ranks, one with an additional batch, for two epochs.
_UNEVEN = training.Draw(
    seed=1,
    world_size=2,
    strategy="ddp",
    precision="no",
    accumulation={"num_steps": 1},
    sharing="uneven",
    source="ordered",
    num_rows=18,
    batch_size=2,
    drop_last=False,
    is_stateful=False,
    optimizer="sgd",
    schedule="none",
    steps_with_optimizer=True,
    clipping="none",
    models="one",
    resume=-1.0,
    resumed_world_size=2,
)


@pytest.mark.parametrize("seed", [5, 10, 12, 23])
def test_a_random_loop_trains_as_one_process_does(seed: int) -> None:
    assert training.play(training.draw(seed)) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "momentum"},
        {"schedule": "step"},
        {"accumulation": {"num_steps": 2, "sync_with_dataloader": False}},
        {"accumulation": {"num_steps": 2, "divide_by_actual": True}},
        {"accumulation": {"num_steps": 2, "sync_each_batch": True}, "num_rows": 21},
        {"models": "apart", "optimizer": "adam", "world_size": 3, "resumed_world_size": 3, "num_rows": 20},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_ranks_that_end_early_stay_in_step(changes: dict[str, Any]) -> None:
    assert training.play(replace(_UNEVEN, **changes)) == ""
