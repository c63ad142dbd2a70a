"""A few rounds of the checkpoint lottery; ``python -m tests.benchmarks.checkpoints`` plays hundreds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.benchmarks import checkpoints


@pytest.mark.parametrize("play", [checkpoints.kill_round, checkpoints.disk_round, checkpoints.flip_round])
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost(tmp_path: Path, play: checkpoints.Round, seed: int) -> None:
    assert play(random.Random(seed), tmp_path) == ""


def test_late_ranks_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_LONG_S", (0.0, 0.4))
    assert checkpoints.late_round(random.Random(3), tmp_path) == ""
