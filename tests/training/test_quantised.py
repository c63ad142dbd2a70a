"""Models with a device map, and models with quantised weights: not moved, trained through adapters, and saved."""

from __future__ import annotations

import mmap
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nblaunch import Accelerator, CheckpointError, context, notebook_launcher
from nblaunch.training.models import stays_in_place
from nblaunch.training.shared_state import get_shared_state
from nblaunch.weights import quantised_entries
from tests.training import ranks
from tests.training.quantised_model import Adapted, LinearPacked, train_one_step


class Fixed(torch.nn.Linear):
    """A model that raises when it is moved."""

    def __init__(self, **places: Any) -> None:
        super().__init__(2, 2)
        self.hf_device_map = places

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("moved")


def test_models_split_by_a_device_map_are_not_moved() -> None:
    model = Fixed(embed="cpu", head="cpu")
    assert Accelerator(cpu=True).prepare(torch.nn.Sequential(model))[0] is model
    with pytest.raises(AssertionError, match="moved"):
        Accelerator(cpu=True).prepare(Fixed(**{"": "cpu"}))  # a whole model is moved like any other


def test_split_device_maps_are_found_anywhere() -> None:
    accelerator = Accelerator(cpu=True)
    whole = Fixed(**{"": "cpu"})
    assert not accelerator.verify_device_map(torch.nn.Linear(1, 1))
    assert not accelerator.verify_device_map(whole)
    whole.add_module("inner", Fixed(embed="cpu", head="disk"))
    assert accelerator.verify_device_map(whole)


def test_quantised_models_stay_on_their_device() -> None:
    model = Fixed(**{"": "cpu"})
    model.is_loaded_in_8bit = True  # type: ignore[assignment]
    Accelerator(cpu=True).prepare(model)


def _prepare_where_steps_average(device_placement: bool, is_quantised: bool) -> str:
    context.current().backend.reduces_gradients_at_step = True  # like XLA devices
    model = Fixed(**{"": "cpu"})
    model.is_loaded_in_8bit = is_quantised  # type: ignore[assignment]
    try:
        Accelerator(device_placement=device_placement).prepare(model)
    except AssertionError as error:
        return str(error)
    return "stayed"


def test_reducing_at_step_leaves_placed_models_in_place() -> None:
    for device_placement, is_quantised, expected in (
        (True, False, "moved"),
        (False, False, "stayed"),
        (True, True, "stayed"),
    ):
        found = ranks.run(_prepare_where_steps_average, 2, device_placement, is_quantised)
        assert found == [expected] * 2


@pytest.mark.parametrize(("places", "device"), [(["cpu", "disk"], "cpu"), (["cpu", "cuda:0"], "cuda:0")])
def test_partly_offloaded_quantised_models_are_rejected(places: list[str], device: str) -> None:
    model = Fixed(**dict(zip(["embed", "head"], places, strict=True)))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    process = replace(get_shared_state(cpu=True).process, device=torch.device(device))
    with pytest.raises(ValueError, match=rf"with CPU or disk offload: hf_device_map has {', '.join(places)}"):
        stays_in_place(model, process)


def test_split_models_cannot_be_trained_by_several_ranks() -> None:
    def program() -> str:
        with pytest.raises(ValueError, match="loaded with `device_map='auto'` in any distributed mode"):
            Accelerator(cpu=True).prepare(Fixed(embed="cpu", head="disk"))
        return "rejected"

    assert ranks.run(program, 2) == ["rejected"] * 2


def test_entries_of_quantised_weights_are_found() -> None:
    model = torch.nn.ModuleDict({"adapted": Adapted(), "plain": torch.nn.Linear(2, 2).requires_grad_(False)})
    assert quantised_entries(model, model.state_dict()) == {
        "adapted.base_layer.weight": True,
        "adapted.base_layer.weight.absmax": False,
        "adapted.base_layer.weight.quant_state": False,
    }


def test_adapters_on_a_quantised_base_are_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = train_one_step(accelerator, Adapted())
    trained = model.lora_B.weight.detach().clone()
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        model.lora_B.weight.zero_()
    accelerator.load_state(str(tmp_path))
    assert torch.equal(model.lora_B.weight, trained)


def test_a_checkpoint_of_another_base_is_rejected(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Adapted())
    accelerator.save_state(str(tmp_path))
    other = Accelerator(cpu=True)
    other.prepare(Adapted())
    with pytest.raises(CheckpointError, match=r"different quantised weights .* base_layer\.weight"):
        other.load_state(str(tmp_path))


def test_entries_missing_beside_quantised_weights_are_still_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Sequential(Adapted()))
    accelerator.save_state(str(tmp_path))
    torch.manual_seed(0)
    other = Accelerator(cpu=True)
    other.prepare(torch.nn.Sequential(Adapted(), torch.nn.Linear(2, 2)))
    with pytest.raises(CheckpointError, match=r"1\.weight"):
        other.load_state(str(tmp_path))


def _train_on_packed(folder: str) -> bool:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model: Any = train_one_step(accelerator, Adapted(kind=LinearPacked))
    adapter = accelerator.unwrap_model(model).lora_B.weight
    trained = adapter.detach().clone()
    accelerator.save_state(folder)
    with torch.no_grad():
        adapter.zero_()
    accelerator.load_state(folder)
    return torch.equal(adapter, trained)


def test_adapters_on_weights_that_are_made_of_several_tensors(tmp_path: Path) -> None:
    assert ranks.run(_train_on_packed, 2, str(tmp_path)) == [True, True]


def test_unsavable_quantised_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'base_layer\.weight' is a Packed"):
        Accelerator(cpu=True).save_model(Adapted(kind=LinearPacked), tmp_path)


def _prepare_shared(path: str) -> float:
    size = os.stat(path).st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as pages:
        model = torch.nn.Module()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            model.base = torch.nn.Parameter(torch.frombuffer(pages, dtype=torch.uint8), requires_grad=False)
        rank = Accelerator(cpu=True).process_index
        model.other = torch.nn.Parameter(torch.full((3,), float(rank)), requires_grad=False)
        model.trained = torch.nn.Parameter(torch.full((3,), float(rank)))
        Accelerator(cpu=True).prepare(model)
        found = float((model.other.sum() + model.trained.sum()).detach())
        del model
    return found


def test_ranks_do_not_write_to_a_shared_frozen_base(tmp_path: Path) -> None:
    """The pages are read-only, so a signal would end a rank that wrote to them."""
    (tmp_path / "base").write_bytes(bytes(range(256)) * 64)
    assert ranks.run(_prepare_shared, 2, str(tmp_path / "base")) == [0.0, 0.0]


def _train(model: torch.nn.Module) -> str:
    return type(train_one_step(Accelerator(cpu=True), model)).__name__


def test_adapters_come_back_to_the_kernel_and_the_base_stays_there() -> None:
    model = Adapted()
    torch.nn.init.zeros_(model.lora_B.weight)
    assert notebook_launcher(_train, (model,), 2, dashboard="none") == "DistributedDataParallel"
    assert model.lora_B.weight.abs().sum() > 0
