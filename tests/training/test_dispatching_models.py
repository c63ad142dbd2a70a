"""``load_checkpoint_and_dispatch`` keeps a model whole, or passes it to Accelerate for splitting."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from nblaunch import Accelerator, init_empty_weights, load_checkpoint_and_dispatch, utils


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


def test_splitting_device_maps_need_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # the thread would outlive the test
    with init_empty_weights():
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    saved = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    Accelerator(cpu=True).save_model(saved, tmp_path / "saved")
    dispatched = load_checkpoint_and_dispatch(
        model, tmp_path / "saved", {"0": "cpu", "1": "disk"}, offload_folder=str(tmp_path / "offloaded")
    )
    batch = torch.ones(1, 3)
    assert dispatched[1].weight.is_meta
    assert torch.equal(dispatched(batch), saved(batch))


def test_invalid_arguments_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="devicemap"):
        load_checkpoint_and_dispatch(torch.nn.Linear(3, 2), tmp_path, devicemap=None)
    for argument in ("keep_in_fp32_modules", "offload_8bit_bnb"):  # an argument of load_checkpoint_in_model
        with pytest.raises(TypeError, match=argument):
            load_checkpoint_and_dispatch(torch.nn.Linear(3, 2), tmp_path, **{argument: ["norm"]})
    with pytest.raises(ValueError, match="dtype='bf16'"):
        load_checkpoint_and_dispatch(torch.nn.Linear(3, 2), tmp_path, dtype="bf16")


class Rotary(torch.nn.Module):
    """A model with an unsaved buffer, such as the frequencies of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = torch.nn.LayerNorm(2), torch.nn.Linear(2, 2)
        self.register_buffer("frequencies", torch.tensor([1.0, 0.01]), persistent=False)


@pytest.mark.parametrize("is_empty", [True, False])
def test_only_saved_tensors_are_converted(tmp_path: Path, is_empty: bool) -> None:
    Accelerator(cpu=True).save_model(Rotary(), tmp_path)
    with init_empty_weights() if is_empty else contextlib.nullcontext():
        model = Rotary()
    load_checkpoint_and_dispatch(model, tmp_path, {"": "cpu"}, dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.bfloat16}
    assert torch.equal(model.frequencies, Rotary().frequencies)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
@pytest.mark.parametrize(
    ("dtype", "of_norm"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
def test_modules_can_stay_in_float32_beside_float16(
    tmp_path: Path, dtype: torch.dtype, of_norm: torch.dtype, device_map: dict[str, str] | None
) -> None:
    Accelerator(cpu=True).save_model(Rotary(), tmp_path)
    with init_empty_weights():
        model = Rotary()
    utils.load_checkpoint_in_model(model, tmp_path, device_map, dtype=dtype, keep_in_fp32_modules=["norm"])
    assert (model.norm.weight.dtype, model.layer.weight.dtype) == (of_norm, dtype)
    weights = [(one.data_ptr(), one.dtype) for one in model.parameters()]
    utils.load_checkpoint_in_model(model, tmp_path, dtype=dtype, keep_in_fp32_modules=["norm"])
    assert [(one.data_ptr(), one.dtype) for one in model.parameters()] == weights, "what has memory is filled"
