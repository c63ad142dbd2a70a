"""``load_checkpoint_and_dispatch``: a model stays whole, and goes where it was told to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nblaunch import Accelerator, init_empty_weights, load_checkpoint_and_dispatch


@pytest.fixture
def saved(tmp_path: Path) -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    Accelerator(cpu=True).save_model(model, tmp_path)
    return model


def test_an_empty_model_is_filled_and_comes_back(saved: torch.nn.Linear, tmp_path: Path) -> None:
    with init_empty_weights():
        empty = torch.nn.Linear(3, 2)
    loaded = load_checkpoint_and_dispatch(
        empty, tmp_path, device_map={"": "cpu"}, no_split_module_classes=["Block"]
    )
    assert loaded is empty
    assert torch.equal(loaded.weight, saved.weight)


def test_weights_are_converted(saved: torch.nn.Linear, tmp_path: Path) -> None:
    loaded = load_checkpoint_and_dispatch(torch.nn.Linear(3, 2), tmp_path, dtype="bfloat16")
    assert torch.equal(loaded.weight, saved.weight.bfloat16())


@pytest.mark.parametrize("device_map", ["auto", {"layer": 0, "head": 1}, {"": "disk"}])
def test_a_map_that_cuts_is_refused_before_anything_is_read(device_map: object, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"device_map=.*fsdp_plugin=.*device_map is None or"):
        load_checkpoint_and_dispatch(torch.nn.Linear(3, 2), tmp_path, device_map)  # type: ignore[arg-type]


def test_other_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="devicemap"):
        load_checkpoint_and_dispatch(torch.nn.Linear(3, 2), tmp_path, devicemap=None)
    with pytest.raises(ValueError, match="dtype='bf16'"):
        load_checkpoint_and_dispatch(torch.nn.Linear(3, 2), tmp_path, dtype="bf16")
