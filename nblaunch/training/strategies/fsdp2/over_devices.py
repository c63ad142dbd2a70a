"""Models that the compiler shards over all devices of a single process (SPMD).

No ranks exchange data here: a tensor has its global shape, and an annotation says along which dimension the devices
shard it. From the annotations on weights, gradients and optimizer state, the compiler derives where to gather weights
and reduce gradients. States are read and written in full, as without sharding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from nblaunch import context, formatting
from nblaunch.backends.base import tensors
from nblaunch.errors import warn
from nblaunch.events import Note
from nblaunch.host import memory
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.models import bare_module
from nblaunch.training.optimizer import AcceleratedOptimizer
from nblaunch.training.strategies.base import Strategy
from nblaunch.training.strategies.fsdp2 import units
from nblaunch.training.strategies.fsdp2.settings import ShardingSettings

# Settings that the compiler can't support, with what to do instead.
_UNSUPPORTED = {
    "cpu_offload": "shards stay on the devices, so leave it out",
    "activation_checkpointing": "call torch_xla.utils.checkpoint.checkpoint in the model's forward instead",
    "mixed_precision_policy": "pass mixed_precision='bf16' to the Accelerator instead",
    "param_init_fn": "build the model with its weights, on the CPU",
}


class DeviceShardsStrategy(Strategy):
    """Shards weights, gradients and optimizer state over this process's devices."""

    name = "fsdp2 over devices"

    def __init__(self, process: JoinedProcess, settings: ShardingSettings) -> None:
        for field, instead in _UNSUPPORTED.items():
            if getattr(settings, field):
                raise ValueError(
                    f"{field}={getattr(settings, field)!r:.60} can't be used with strategy='spmd': {instead}"
                )
        if not settings.reshard_after_forward:
            warn(
                "with strategy='spmd' the compiler decides how long weights stay gathered: SHARD_GRAD_OP has no effect"
            )
        self._settings = settings
        self._backend = process.backend
        self._count = process.backend.num_spmd_devices
        self._dimensions: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> int

    # --- preparing -----------------------------------------------------------------------------------------------

    def place(self, model: nn.Module, process: JoinedProcess) -> None:
        """Leave the model on the host: :meth:`setup_module` moves it part by part."""

    def setup_module(self, model: nn.Module, process: JoinedProcess) -> nn.Module:
        inner = bare_module(model)
        ignored = units.ignored_parameters(inner, self._settings.ignored_modules)
        names = {id(weight) for weight in ignored}
        unsharded = {name for name, weight in inner.named_parameters() if id(weight) in names}
        # Move and shard modules one at a time, inner ones first, so that host copies are short-lived.
        for prefix, module in reversed(list(inner.named_modules())):
            module.to(process.device)
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if name not in unsharded:
                    self._shard(parameter)
            module.register_load_state_dict_pre_hook(self._send_parts)
            module.register_forward_hook(self._cut_output)
        memory.trim()
        weights = formatting.size(
            sum(weight.numel() * weight.element_size() for weight in inner.parameters())
        )
        text = f"{type(inner).__name__}: {weights} of weights sharded over {self._count} devices"
        context.current().emit(Note.of_job(text))
        return model

    def _shard(self, parameter: nn.Parameter) -> None:
        dimension = sharded_dimension(parameter.shape, self._count)
        if dimension is None:
            return
        self._dimensions[parameter] = dimension
        self._backend.shard(parameter, dimension)
        if parameter.requires_grad:
            # Shard the gradients in every micro-step, because accumulated gradients stay in memory between steps.
            parameter.register_post_accumulate_grad_hook(self._shard_gradient)

    def _shard_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._backend.shard(parameter.grad, self._dimensions[parameter])

    def _send_parts(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Shard weights over devices before loading them, because ``copy_`` would send all of them to each device."""
        for name, parameter in module.named_parameters(recurse=False):
            loaded, dimension = state.get(prefix + name), self._dimensions.get(parameter)
            if dimension is not None and isinstance(loaded, torch.Tensor) and loaded.shape == parameter.shape:
                sent = loaded.to(parameter.device, parameter.dtype)
                self._backend.shard(sent, dimension)
                state[prefix + name] = sent

    _send_parts.keeps_names_and_shapes = True  # type: ignore[attr-defined]  # as weights.py requires

    def _cut_output(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Shard activations by rows, to make the compiler gather weights rather than activations."""
        for tensor in tensors(output):
            is_new = tensor.grad_fn is not None and not tensor._is_view()
            if is_new and tensor.ndim and tensor.shape[0] % self._count == 0:
                self._backend.shard(tensor, 0)

    def optimizer(self, optimizer: Any) -> AcceleratedOptimizer | None:
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_post_hook(lambda stepped, *_: self._shard_state(stepped))
            optimizer.register_load_state_dict_post_hook(self._shard_state)
        return None

    def _shard_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Shard weights and their optimizer states after a step or a load, in the graph that writes them."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                dimension = self._dimensions.get(parameter)
                if dimension is None:
                    continue
                states = tensors(list(optimizer.state.get(parameter, {}).values()))
                alike = [
                    state
                    for state in states
                    if state.shape == parameter.shape and state.device == parameter.device
                ]
                for tensor in (parameter, *alike):
                    self._backend.shard(tensor, dimension)


def sharded_dimension(shape: torch.Size, count: int) -> int | None:
    """Return the dimension along which devices shard a weight; None for a small weight, which each device holds whole.

    Choose the longest dimension that is divisible by the number of devices, or else the longest dimension.
    The compiler returns unevenly divided tensors unsharded, unless the graph overwrites sharded tensors, as
    an optimizer step does.
    """
    candidates = [index for index, length in enumerate(shape) if length >= count > 1]
    return max(candidates, key=lambda index: (shape[index] % count == 0, shape[index]), default=None)
