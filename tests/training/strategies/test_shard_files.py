"""Reading files of shards does not run their writer's code."""

from __future__ import annotations

import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.checkpoint import metadata

from nblaunch.errors import CheckpointError
from nblaunch.training.strategies import shard_files
from nblaunch.training.trusted_types import trusted_types, trusting


class _MakesFolder:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def _state(rate: Any) -> dict[str, Any]:
    return {"optimizer": {"rate": rate, "momentum": torch.ones(3)}}


def _read(folder: Path, owner: object = None) -> dict[str, Any]:
    state: dict[str, Any] = {"optimizer": {"rate": None, "momentum": torch.zeros(3)}}
    shard_files.read(state, folder, is_alone=True, owner=owner)
    return state["optimizer"]


@pytest.mark.parametrize("rate", [0.5, numpy.float64(0.5), (0.9, 0.5), None, [1, "two", True]])
def test_other_objects_come_back(rate: Any, tmp_path: Path) -> None:
    shard_files.write(_state(rate), tmp_path / "shards", is_alone=True)
    read = _read(tmp_path / "shards")
    assert read["rate"] == rate
    assert type(read["rate"]) is type(rate)
    assert torch.equal(read["momentum"], torch.ones(3))


def test_an_object_that_runs_code_is_rejected(tmp_path: Path) -> None:
    shard_files.write(_state(_MakesFolder(tmp_path / "made")), tmp_path / "shards", is_alone=True)
    with pytest.raises(CheckpointError, match=r"optimizer\.rate has an untrusted class.*add_safe_globals"):
        _read(tmp_path / "shards")
    assert not (tmp_path / "made").exists()


def test_metadata_that_run_code_are_rejected(tmp_path: Path) -> None:
    shard_files.write(_state(0.5), tmp_path / "shards", is_alone=True)
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(_MakesFolder(tmp_path / "made")))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir"):
        _read(tmp_path / "shards")
    assert not (tmp_path / "made").exists()


@dataclass
class Schedule:
    rate: float


class Scheduled(torch.optim.SGD):
    """A user's optimizer whose groups contain objects."""


def test_classes_of_the_optimizers_module_are_trusted(tmp_path: Path) -> None:
    shard_files.write(_state(Schedule(0.5)), tmp_path / "shards", is_alone=True)
    owner = Scheduled([torch.zeros(1)])
    assert _read(tmp_path / "shards", owner)["rate"] == Schedule(0.5)
    with pytest.raises(CheckpointError, match="untrusted"):
        _read(tmp_path / "shards")


class _Called:
    """An object that is pickled as a call of ``function``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def test_enum_members_from_python_3_11_2_are_read(tmp_path: Path) -> None:
    shard_files.write(_state(0.5), tmp_path / "shards", is_alone=True)
    encoding = metadata._MEM_FORMAT_ENCODING
    written = {"member": _Called(getattr, encoding, "TORCH_CONTIGUOUS_FORMAT")}
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(written))
    assert shard_files.read_metadata(tmp_path / "shards") == {"member": encoding.TORCH_CONTIGUOUS_FORMAT}
    for kind, name in ((encoding, "__init__"), (metadata.Metadata, "__init__"), ("text", "format")):
        (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(_Called(getattr, kind, name)))
        with pytest.raises(pickle.UnpicklingError, match="asks for an attribute"):
            shard_files.read_metadata(tmp_path / "shards")


def test_metadata_cannot_change_a_class(tmp_path: Path) -> None:
    shard_files.write(_state(0.5), tmp_path / "shards", is_alone=True)
    changes = (
        pickle.dumps(metadata.MetadataIndex)[:-1] + pickle.dumps((None, {"__module__": "evil"}))[2:-1] + b"b."
    )
    (tmp_path / "shards" / ".metadata").write_bytes(changes)
    with pytest.raises(pickle.UnpicklingError, match="changes MetadataIndex"):
        shard_files.read_metadata(tmp_path / "shards")
    assert metadata.MetadataIndex.__module__ == metadata.__name__


@pytest.mark.parametrize("module_name", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_numbers_of_either_numpy_are_read(module_name: str, tmp_path: Path) -> None:
    """The names of NumPy's types differ between NumPy 1 and 2."""
    path = tmp_path / "state.bin"
    torch.save(numpy.float64(0.5), path)
    own_name = numpy.float64(0.5).__reduce__()[0].__module__
    other = tmp_path / "other.bin"
    with zipfile.ZipFile(path) as read, zipfile.ZipFile(other, "w") as written:
        for name in read.namelist():
            written.writestr(name, read.read(name).replace(own_name.encode(), module_name.encode()))
    with trusting(trusted_types()):
        assert torch.load(other, weights_only=True) == 0.5
