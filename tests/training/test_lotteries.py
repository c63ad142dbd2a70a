"""A few rounds of the lotteries, which draw training loops and accidents while checkpoints are written at random.

``python -m tests.benchmarks training`` and ``python -m tests.benchmarks.checkpoints`` play hundreds.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import checkpoints, training


@pytest.mark.parametrize("play", [checkpoints.kill_round, checkpoints.disk_round, checkpoints.flip_round])
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost(tmp_path: Path, play: checkpoints.Round, seed: int) -> None:
    assert play(random.Random(seed), tmp_path) == ""


def test_late_ranks_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_LONG_S", (0.0, 0.4))
    assert checkpoints.late_round(random.Random(3), tmp_path) == ""


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
