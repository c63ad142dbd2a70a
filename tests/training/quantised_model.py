"""A model with an adapter on frozen 4-bit weights in the format of bitsandbytes, which tests do not install."""

from __future__ import annotations

from typing import Any

import torch


class Params4bit(torch.nn.Parameter):
    """A weight with two 4-bit numbers per byte; its attribute ``quant_state`` has the scale of each row."""

    quant_state: torch.Tensor | None

    def __new__(cls, data: torch.Tensor, quant_state: torch.Tensor | None = None) -> Params4bit:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state = quant_state
        return self

    @property
    def absmax(self) -> torch.Tensor | None:
        """Attribute that torch.distributed.checkpoint looks up by its name in the state dict."""
        return self.quant_state

    def __deepcopy__(self, memo: Any) -> Params4bit:
        return type(self)(self.data.clone(), self.quant_state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.data, self.quant_state)


class Linear4bit(torch.nn.Module):
    """A linear layer with a 4-bit weight. Its state dict includes the scales, which it can't load."""

    weight: Params4bit

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_calls = 0
        whole = torch.randn(size, size)
        scale = whole.abs().amax(1, keepdim=True) / 7
        codes = (whole / scale).round().to(torch.int8) + 8
        self.weight = Params4bit((codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8), scale)
        self.bias = torch.nn.Parameter(torch.zeros(size))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        codes = torch.stack([self.weight.data // 16, self.weight.data % 16], -1).flatten(1)
        whole = (codes.float() - 8) * self.weight.quant_state
        # bitsandbytes also computes in the dtype of its input.
        return torch.nn.functional.linear(batch, whole.to(batch.dtype), self.bias.to(batch.dtype))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.weight.quant_state
        # bitsandbytes stores its settings as text, which a forward may change.
        destination[f"{prefix}weight.quant_state"] = torch.zeros(1 + self.num_calls)


class Packed(torch.Tensor):
    """A tensor that consists of two others, like torchao's: it has no memory of its own, and supports few
    operations.
    """

    __module__ = "torchao.quantization"

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Packed:
        self: Packed = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        self.codes, self.scale = codes, scale
        return self

    codes: torch.Tensor
    scale: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(str(func))


class LinearPacked(torch.nn.Module):
    """A linear layer whose weight is a :class:`Packed`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        codes = torch.randint(-8, 8, (size, size), dtype=torch.int8)
        self.weight = torch.nn.Parameter(Packed(codes, torch.ones(size, 1)), requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return torch.nn.functional.linear(batch, weight.codes.float() * weight.scale)


class Adapted(torch.nn.Module):
    """A quantised base with a low-rank adapter; only the adapter is trained."""

    def __init__(self, size: int = 8, kind: type[torch.nn.Module] = Linear4bit) -> None:
        super().__init__()
        self.base_layer = kind(size).requires_grad_(False)
        self.lora_A = torch.nn.Linear(size, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, size, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base_layer(batch) + self.lora_B(self.lora_A(batch))
        return adapted


def train_one_step(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Prepare ``model`` with an optimizer for its trained parameters, and step once; return the prepared objects."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1))
    accelerator.backward(model(torch.ones(2, 8)).square().sum())
    optimizer.step()
    return model
