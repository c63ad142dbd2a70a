"""Sharded models that are on the meta device on every rank: initialising their weights, and uninitialised ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch import Accelerator, FullyShardedDataParallelPlugin
from nblaunch.training.strategies.fsdp2.weights import is_unwritten, unwritten
from tests.training import ranks


def _fill(weight: torch.Tensor) -> None:
    """Write values that depend only on the shape, so that they are the same everywhere."""
    with torch.no_grad():
        weight.copy_(torch.linspace(-1, 1, weight.numel()).reshape(weight.shape))


class Gpt(nn.Module):
    """A model that initialises linear layers in a method for single modules, and leaves its norm as constructed."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)
        self.exit = nn.Linear(5, 1)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            _fill(module.weight)
            nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.exit(self.norm(self.entry(x)))


class PreTrainedModel(nn.Module):
    """A class with the name that identifies models of transformers."""


class Pretrained(PreTrainedModel, Gpt):
    """A model that writes to a layer again when it initialises the layer's parent, like models of transformers."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Pretrained):
            nn.init.constant_(module.exit.bias, 0.5)


class Around(nn.Module):
    """A model of transformers inside a user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Pretrained()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gpt(x)


class Applied(Around):
    """A model that initialises the inner model's layers again, in a method that accepts only layers."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                self._init_weights(module)

    def _init_weights(self, layer: nn.Module) -> None:
        nn.init.constant_(layer.bias, 4.0 if isinstance(layer, nn.Linear) else 0.0)


class Helped(nn.Module):
    """Layers whose method of the same name has another purpose, and a parameter with two names."""

    class Layer(nn.Linear):
        def reset_parameters(self) -> None:
            self._init_weights(self, 0.5)
            nn.init.ones_(self.bias)

        def _init_weights(self, module: nn.Module, std: float) -> None:
            nn.init.constant_(module.weight, std)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(2))
            self.factor = self.scale
            self.reset_parameters()

        def reset_parameters(self) -> None:
            _fill(self.scale)

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.Layer(3, 2)
        self.twice = self.Twice()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.twice.scale + self.twice.factor


class Nested(PreTrainedModel):
    """A model of transformers inside another one, which does not initialise the inner one."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Pretrained()
        self.head = nn.Linear(1, 1)
        self._init_weights(self.head)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)
            nn.init.constant_(module.bias, 4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gpt(x))


class Scaled(nn.Module):
    """A layer with a parameter and buffers that only its constructor initialises, as is common in users' code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)
        self.register_buffer("positions", torch.arange(2), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            _fill(module.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale * self.mask + self.positions


class Tied(nn.Module):
    """A head that shares the previous layer's weight and can't initialise it; norms with shared statistics."""

    class Head(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(3, 3)
        self.head = self.Head(self.entry.weight)
        self.norms = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        self.norms[1].running_var = self.norms[0].running_var

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms(self.entry(x)) @ self.head.weight


def _built(build: Callable[[], nn.Module], device: str) -> nn.Module:
    with torch.device(device):
        return build()


def _train(
    build: Callable[[], nn.Module], device: str, make: Callable[[nn.Module], Any] | None = None
) -> dict[str, torch.Tensor]:
    """Take a step, the same on all ranks, and return the weights after it."""
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(param_init_fn=make))
    model: Any = accelerator.prepare(_built(build, device))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.linspace(0, 1, 12).reshape(4, 3)).square().mean())
    optimizer.step()
    return dict(accelerator.get_state_dict(model))


@pytest.mark.parametrize("build", [Gpt, Around, Applied, Nested, Helped])
def test_values_from_construction_are_kept(build: Callable[[], nn.Module]) -> None:
    expected = ranks.run(_train, 2, build, "cpu")[0]
    found = ranks.run(_train, 2, build, "meta")[0]
    torch.testing.assert_close(found, expected)


def _make_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        _fill(module.weight)


@pytest.mark.parametrize("make", [None, _make_linear], ids=["model", "param_init_fn"])
def test_uninitialised_tensors_are_named_before_training(make: Callable[[nn.Module], Any] | None) -> None:
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(_train, 2, Scaled, "meta", make)
    text = str(caught.value)
    assert "ValueError: the Scaled is on the meta device" in text
    assert "param_init_fn" in text
    for name in ("scale", "mask", "positions"):
        assert f"{name} (Scaled)" in text
    assert "linear.weight" not in text
    assert ("linear.bias" in text) == (make is not None)  # the layer initialises its own tensor


def _allocate(module: nn.Module) -> None:
    """Allocate memory to load into; its contents may be NaN, and are NaN here."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)


def _allocated() -> dict[str, torch.Tensor]:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(param_init_fn=_allocate))
    return dict(accelerator.get_state_dict(accelerator.prepare(_built(Gpt, "meta"))))


def test_memory_from_param_init_fn_is_used() -> None:
    found = ranks.run(_allocated, 2)[0]
    assert found.keys() == Gpt().state_dict().keys()
    assert all(tensor.isnan().all() for tensor in found.values())


def test_tied_weights_are_initialised_once() -> None:
    found = ranks.run(_train, 2, Tied, "meta")[0]
    assert all(tensor.isfinite().all() for tensor in found.values())
    for first, second in (("entry.weight", "head.weight"), ("norms.0.running_var", "norms.1.running_var")):
        assert torch.equal(found[first], found[second])


def _weights_beside_others() -> dict[str, torch.Tensor]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    for tensor in (model[0].weight, model[1].running_mean):
        nn.init.constant_(tensor, 5.0)
    model[0].bias = nn.Parameter(torch.empty(3, device="meta"))
    model[1].weight = nn.Parameter(torch.empty(3, device="meta"))
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    return dict(accelerator.get_state_dict(accelerator.prepare(model)))


def test_existing_values_of_a_module_are_kept() -> None:
    found = ranks.run(_weights_beside_others, 2)[0]
    assert torch.equal(found["0.weight"], torch.full((3, 3), 5.0))
    assert torch.equal(found["1.running_mean"], torch.full((3,), 5.0))
    assert torch.equal(found["1.weight"], torch.ones(3))
    assert found["0.bias"].isfinite().all()


def _gpt2() -> nn.Module:
    """Return a model whose attention has an unsaved mask of booleans, and whose norms are torch's."""
    import transformers

    return transformers.GPT2Model(
        transformers.GPT2Config(
            n_embd=8, n_layer=2, n_head=2, vocab_size=10, bos_token_id=1, eos_token_id=1, n_positions=6
        )
    )


def _tensors_of_gpt2(device: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(_built(_gpt2, device))
    return dict(accelerator.get_state_dict(model)), dict(model.named_buffers())


def test_transformers_initialise_their_weights() -> None:
    expected, buffers = ranks.run(_tensors_of_gpt2, 2, "cpu")[0]
    (weights, _), *_ = found = ranks.run(_tensors_of_gpt2, 2, "meta")
    assert weights.keys() == expected.keys()
    assert all(weight.isfinite().all() for weight in weights.values())
    assert torch.equal(weights["h.1.ln_1.weight"], expected["h.1.ln_1.weight"])
    assert weights["wte.weight"].std() == pytest.approx(0.02, rel=0.4)
    assert weights["h.1.attn.c_proj.weight"].std() == pytest.approx(0.01, rel=0.4)  # smaller in deeper models
    for _, own in found:
        torch.testing.assert_close(own, buffers)


_DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_unwritten_elements_are_detected(dtype: torch.dtype) -> None:
    tensor = unwritten(torch.empty(2, 3, dtype=dtype, device="meta"))
    assert is_unwritten(tensor)
    tensor[0] = torch.zeros((), dtype=dtype)
    assert is_unwritten(tensor) == (dtype != torch.uint8)  # its elements may have any value
    tensor[1] = torch.ones(()).to(dtype)
    assert not is_unwritten(tensor)
    assert not is_unwritten(unwritten(torch.empty(0, 3, dtype=dtype, device="meta")))
