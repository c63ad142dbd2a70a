"""Training in fp8 with a stub of torchao: converted and trained layers, and immediate rejections."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, backends, context
from nblaunch.backends import gpu
from nblaunch.utils import AORecipeKwargs


@dataclasses.dataclass
class _Config:
    emulate: bool = False
    pad_inner_dim: bool = False
    enable_fsdp_float8_all_gather: bool = False


class _Float8Linear(nn.Linear):
    config: _Config


def _convert(
    model: nn.Module, *, module_filter_fn: Callable[[nn.Module, str], bool], config: _Config
) -> None:
    """Replace layers like torchao: parameters stay, or are replaced by new ones on the same memory."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and module_filter_fn(layer, name):
            new = _Float8Linear(layer.in_features, layer.out_features, device="meta")
            new.config, new.weight, new.bias = config, layer.weight, layer.bias
            if config.enable_fsdp_float8_all_gather:
                new.weight = nn.Parameter(layer.weight.data)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, new)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torchao.float8")
    module.__dict__.update(Float8LinearConfig=_Config, convert_to_float8_training=_convert)
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", module)


def _model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 20), nn.Linear(20, 16), nn.Linear(16, 16)
    )


def _kinds(model: nn.Module) -> list[str]:
    return [type(layer).__name__.lstrip("_") for layer in model.children()]


@pytest.mark.usefixtures("library")
def test_layers_are_converted_and_trained() -> None:
    recipe = AORecipeKwargs(_Config(emulate=True, enable_fsdp_float8_all_gather=True))
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    assert (accelerator.mixed_precision, accelerator.fp8_backend, accelerator.has_fp8_handler) == (
        "fp8",
        "AO",
        True,
    )
    assert accelerator.ao_recipe_handler is recipe
    model = _model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert _kinds(model) == ["Linear", "Float8Linear", "Linear", "Linear", "Linear"], (
        "ends, and odd sizes, stay"
    )
    assert not model[1].config.enable_fsdp_float8_all_gather, "nothing is gathered here"
    output = prepared(torch.randn(4, 16))
    assert output.dtype == torch.float32
    assert (output.detach() == output.detach().bfloat16()).all(), "all else computes in bf16"
    accelerator.backward(output.pow(2).sum())
    optimizer.step()
    assert all((new != old).any() for new, old in zip(model.parameters(), before, strict=True))


@pytest.mark.usefixtures("library")
def test_optimizers_follow_replaced_parameters() -> None:
    accelerator = Accelerator(
        mixed_precision="fp8",
        kwargs_handlers=[
            AORecipeKwargs(_Config(emulate=True), module_filter_func=lambda layer, name: name == "0")
        ],
    )
    model = _model()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    replacements = accelerator._preparer._replacements
    old, between, last = model[0].weight, nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    replacements.add(old, between)
    replacements.add(between, last)
    replacements.hand_to(optimizer.optimizer)
    assert optimizer.param_groups[0]["params"][0] is last
    accelerator.prepare(model)
    assert _kinds(model)[:2] == ["Float8Linear", "Linear"], "as the filter says"


@pytest.mark.usefixtures("library")
def test_fsdp_may_gather_in_8_bits() -> None:
    recipe = AORecipeKwargs(_Config(emulate=True, enable_fsdp_float8_all_gather=True))
    model = _model()
    recipe.convert(model, is_sharded=True)
    assert model[1].config is recipe.config


@pytest.mark.usefixtures("library")
def test_the_recipe_has_several_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AORecipeKwargs().config == _Config(False, True, True)
    launched = {"fp8_recipe": {"pad_inner_dim": False}}
    with monkeypatch.context() as patched:
        patched.setattr(context.current(), "accelerator_defaults", launched)
        assert AORecipeKwargs().config == _Config(False, False, True)
        assert AORecipeKwargs(pad_inner_dim=True).config == _Config(False, True, True)
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
    assert AORecipeKwargs(enable_fsdp_float8_all_gather=False).config == _Config(False, False, False)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "fp8"}, "can't be used on cpu: fp8 needs an NVIDIA GPU"),
        ({"mixed_precision": "fp8", "recipe": {}}, "can't be used on cpu: fp8 needs an NVIDIA GPU"),
        (
            {"mixed_precision": "bf16", "recipe": {"config": _Config(emulate=True)}},
            "mixed_precision='fp8'",
        ),
        ({"mixed_precision": "fp8", "deepspeed_plugin": DeepSpeedPlugin()}, "can't be used with DeepSpeed"),
    ],
)
def test_impossible_settings_are_rejected_at_once(arguments: dict[str, Any], message: str) -> None:
    recipe = arguments.pop("recipe", None)
    handlers = [] if recipe is None else [AORecipeKwargs(**recipe)]
    with pytest.raises(ValueError, match=message):
        Accelerator(kwargs_handlers=handlers, **arguments)


def test_missing_torchao_is_reported() -> None:
    with pytest.raises(ImportError, match="pip install torchao"):
        AORecipeKwargs()
    problem = gpu.CUDA.precision_problem("fp8")
    assert problem is not None
    assert "pip install torchao" in problem


@pytest.mark.parametrize(("capability", "is_rejected"), [((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_gpus_without_fp8_are_rejected(
    capability: tuple[int, int], is_rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "is_installed", lambda name: name == "torchao")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    problem = gpu.CUDA.precision_problem("fp8")
    assert (problem is not None) is is_rejected


def test_devices_without_fp8_say_so() -> None:
    assert "NVIDIA" in str(backends.choose("cpu").precision_problem("fp8"))
    assert FullyShardedDataParallelPlugin().precision_name("fp8", backends.choose("cpu")) == "fp8"
