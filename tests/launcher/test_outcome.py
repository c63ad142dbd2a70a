"""Reports of an ended job about weights that did not arrive."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.events import ExitStatus, Returned, StateSent
from nblaunch.launcher.attempt import Attempt
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.outcome import EndedAttempt
from nblaunch.launcher.plan import plan_launch
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.weights import TensorShard
from nblaunch.wire.outbox import RankResult


@pytest.mark.parametrize("lost", [0, 1])
def test_unreadable_shards_are_named(tmp_path: Path, lost: int) -> None:
    model = nn.Linear(1, 2, bias=False)
    before = model.weight.detach().clone()
    spec = LaunchSpec(print, (model,), 2, backend="cpu", log_dir=str(tmp_path))
    topology = Topology(world_size=2, local_world_size=2)
    attempt = Attempt(spec, plan_launch(spec), 0, 0, topology, JobLog(spec.log_dir))
    (path,) = attempt.plan.modules
    now = time.time()
    report = AttemptReport(
        returned={rank: Returned(rank, now, sends=(path,)) for rank in (0, 1)},
        sent_states={rank: {path: StateSent(rank, now, path=path, at=0)} for rank in (0, 1)},
        exits={rank: (ExitStatus(0), now) for rank in (0, 1)},
    )
    shard = TensorShard((2, 1), (0, 0), torch.full((1, 1), 7.0))
    results = {
        lost: RankResult(state_errors={path: "OSError: cannot allocate memory"}),
        1 - lost: RankResult(states={path: {"weight": shard}}),
    }
    outcome, notes = EndedAttempt(attempt, report, results).conclude({})
    assert outcome.status == "done"
    assert torch.equal(model.weight, before)
    (warning,) = [note.text for note in notes if note.kind == "warning"]
    assert f"rank {lost}" in warning
    assert "cannot allocate memory" in warning
    assert "other machines" not in warning
