"""``nblaunch test`` and ``nblaunch env`` on real accelerators. Skipped without any."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nblaunch import formatting
from nblaunch.backends import discover


@pytest.mark.parametrize(
    "backend", [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("xla", marks=pytest.mark.tpu)]
)
@pytest.mark.timeout(600)
def test_every_device_passes_the_self_check(backend: str) -> None:
    found = discover()[backend]
    if found.affinity() < 10:  # an XLA backend on CPU cores does not count as an accelerator
        pytest.skip(f"no device for backend={backend!r} here")
    report = json.loads(
        subprocess.check_output([sys.executable, "-m", "nblaunch", "env", "--json"], text=True, timeout=120)
    )
    assert report["devices"][backend] == formatting.count(found.device_count(), found.device_noun)
    assert report["launch"]["backend"] == backend
    ended = subprocess.run(
        [sys.executable, "-m", "nblaunch", "test", "--backend", backend],
        capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all passed" in ended.stdout
