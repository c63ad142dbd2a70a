"""Machines that are not there."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nblaunch.backends import cuda_host, nvidia_smi
from tests.backends.fake_nvml import FakeGpu, FakeNvml


class FakeSmi:
    """A program ``nvidia-smi``, the only one on PATH. Builtins of the shell only: PATH holds nothing else."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "nvidia-smi"

    def does(self, body: str) -> None:
        self.path.write_text(f"#!/bin/sh\n{body}\n")
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    def answers(self, **by_option: str) -> None:
        """What it prints, by the name of its first option: ``L``, ``query_gpu``, ``query_compute_apps``."""
        cases = "".join(
            f"  -{'-' if len(name) > 1 else ''}{name.replace('_', '-')}*) echo '{text}';;\n"
            for name, text in by_option.items()
        )
        self.does(f'case "$1" in\n{cases}esac')


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSmi]:
    """A host with nvidia-smi (which a test has to write) and without NVML."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nvidia_smi, "_WSL_PROGRAM", str(tmp_path / "none"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(has_driver=False))
    _forget_host()
    yield FakeSmi(tmp_path)
    _forget_host()


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeNvml]]:
    """Makes a host with NVML and these GPUs, and without nvidia-smi; after the test NVML must be closed."""
    made: list[FakeNvml] = []
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nvidia_smi, "_WSL_PROGRAM", str(tmp_path / "none"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(*gpus: FakeGpu, **options: str) -> FakeNvml:
        _forget_host()
        made.append(FakeNvml(gpus, **options))  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "pynvml", made[-1])
        return made[-1]

    yield make
    _forget_host()
    assert [one.num_open for one in made] == [0] * len(made)


def _forget_host() -> None:
    cuda_host._query_gpus.cache_clear()
    cuda_host._driver_version.cache_clear()
