"""Files of shards: they are read without running code of their writer."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from nblaunch.errors import CheckpointError
from nblaunch.training.strategies import shard_files


class _MakesFolder:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def _state(rate: Any) -> dict[str, Any]:
    return {"optimizer": {"rate": rate, "momentum": torch.ones(3)}}


def _read(folder: Path) -> dict[str, Any]:
    state = {"optimizer": {"rate": None, "momentum": torch.zeros(3)}}
    shard_files.read(state, folder, is_alone=True)
    return state["optimizer"]


@pytest.mark.parametrize("rate", [0.5, numpy.float64(0.5), (0.9, 0.5), None, [1, "two", True]])
def test_what_is_no_tensor_comes_back(rate: Any, tmp_path: Path) -> None:
    shard_files.write(_state(rate), tmp_path / "shards", is_alone=True)
    read = _read(tmp_path / "shards")
    assert read["rate"] == rate
    assert type(read["rate"]) is type(rate)
    assert torch.equal(read["momentum"], torch.ones(3))


def test_an_object_that_runs_code_is_refused(tmp_path: Path) -> None:
    shard_files.write(_state(_MakesFolder(tmp_path / "made")), tmp_path / "shards", is_alone=True)
    with pytest.raises(CheckpointError, match="shards does not fit"):
        _read(tmp_path / "shards")
    assert not (tmp_path / "made").exists()


def test_metadata_that_run_code_are_refused(tmp_path: Path) -> None:
    shard_files.write(_state(0.5), tmp_path / "shards", is_alone=True)
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(_MakesFolder(tmp_path / "made")))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir"):
        _read(tmp_path / "shards")
    assert not (tmp_path / "made").exists()
