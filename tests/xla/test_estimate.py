"""``nblaunch estimate-memory`` against what training on XLA devices takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nblaunch.cli.memory_needs import JobSettings, ModelSize, training_need
from tests.cli.measured_training import NUM_PARAMETERS

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_it_agrees_with_what_training_takes() -> None:
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("measured_training.py"))],
        capture_output=True, text=True, timeout=220, cwd=ROOT,
        env={**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    size = ModelSize(NUM_PARAMETERS, NUM_PARAMETERS)
    for precision, ranks in json.loads(ended.stdout).items():
        need = training_need("xla", size, JobSettings(2, 2, precision, 2, "tpu"))
        # The runtime keeps a few buffers more; autocast would take twice what bf16 on the device does.
        assert ranks == [pytest.approx(need.device / NUM_PARAMETERS, rel=0.25)] * 2, precision
