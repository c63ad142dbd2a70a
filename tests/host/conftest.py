"""Simulated machines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nblaunch.host import gpus
from tests.host.fake_nvml import FakeGpu, FakeNvml


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeNvml]]:
    """Simulate a host with NVML and these GPUs, whose ``/dev`` is ``tmp_path``; NVML must be closed after the test."""
    made: list[FakeNvml] = []
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)

    def make(*gpus: FakeGpu, **options: str) -> FakeNvml:
        _forget_host()
        made.append(FakeNvml(gpus, **options))  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "pynvml", made[-1])
        return made[-1]

    yield make
    _forget_host()
    assert [one.num_open for one in made] == [0] * len(made)


def _forget_host() -> None:
    gpus._listed.cache_clear()
    gpus._driver_version.cache_clear()
