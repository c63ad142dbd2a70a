"""``nblaunch test`` and ``nblaunch env`` with the real torch_xla on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("compile_quickly")


def run(*words: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "nblaunch", *words],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PJRT_DEVICE": "CPU"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_report_has_torch_xla() -> None:
    report = json.loads(run("env", "--json"))
    assert report["launch"]["backend"] == "xla"
    assert report["versions"]["torch_xla"]
    assert report["environment variables"]["PJRT_DEVICE"] == "CPU"
    assert any("fp16" in text for text in report["notes"])


def test_training_matches_a_single_process() -> None:
    shown = run("test", "--num_processes", "2", "--only", "gradients", "checkpoint")
    assert shown.startswith("2 processes on xla (gloo)")
    assert "all passed" in shown
