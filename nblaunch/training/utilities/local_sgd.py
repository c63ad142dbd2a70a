"""Averages weights every few steps instead of gradients at every step: :class:`LocalSGD`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import torch

from nblaunch.training.accelerator import Accelerator
from nblaunch.training.collectives import operations

_BUCKET_BYTES = 25 << 20
"""Maximum total size of parameters that are copied and averaged together, as in DistributedDataParallel."""


class LocalSGD:
    """Context manager in which ranks train independently, and average a model's weights every few steps.

        with LocalSGD(accelerator, model, local_sgd_steps=8) as local:
            for batch in loader:
                ...
                optimizer.step(); optimizer.zero_grad()
                local.step()

    At the end of the block, ranks average the weights again, which makes them equal on all ranks. Ranks exchange
    fewer messages, which helps on slow networks, but the result is not the same as with averaged gradients. Each rank
    keeps its own buffers and optimizer state.

    Args:
        accelerator: the Accelerator that prepared ``model``.
        model: the prepared model.
        local_sgd_steps: number of calls to :meth:`step` between two averages; at least 1. With gradient accumulation,
            count batches, not optimizer steps.
        enabled: if False, change nothing, and average gradients as usual.

    Raises:
        ValueError: ``local_sgd_steps`` is less than 1, ranks hold shards of models, or the device averages gradients at
            every step, as XLA devices do.
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps={local_sgd_steps} must be at least 1")
        if accelerator._preparer.strategy.holds_shards:
            raise ValueError(
                f"LocalSGD averages whole models, but with {accelerator.distributed_type.value} every rank holds "
                "only a shard; leave out LocalSGD or the plugin"
            )
        self.enabled = enabled and accelerator.use_distributed
        if self.enabled and accelerator._shared.process.backend.reduces_gradients_at_step:
            raise ValueError(
                f"LocalSGD has no effect on {accelerator.device.type.upper()} devices, where every "
                "optimizer.step() averages gradients; leave it out, or pass enabled=False"
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self._stack = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self.accelerator._shared.watch.leave_out(self.model)
            self._stack.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.close()
        if self.enabled and kind is None:  # after an error, the other ranks may never arrive
            self._average()

    def step(self) -> None:
        """Count a batch, even in the middle of an accumulation window; average after ``local_sgd_steps`` batches."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        self.accelerator.wait_for_everyone()
        with torch.no_grad():
            for bucket in _buckets(self.model.parameters()):
                flat = torch.cat([parameter.detach().reshape(-1) for parameter in bucket])
                means = operations.reduce(flat, "mean").split([parameter.numel() for parameter in bucket])
                for parameter, mean in zip(bucket, means, strict=True):
                    parameter.copy_(mean.view_as(parameter))


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Yield the trained parameters in groups of limited size, each with a single type and device."""
    trained = (parameter for parameter in parameters if parameter.requires_grad)
    for _, group in groupby(trained, key=lambda parameter: (parameter.dtype, parameter.device)):
        bucket: list[torch.nn.Parameter] = []
        for parameter in group:
            if bucket and sum(each.nbytes for each in bucket) + parameter.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket
