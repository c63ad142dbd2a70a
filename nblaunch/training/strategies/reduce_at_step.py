"""Data parallelism without a wrapper: gradients are averaged where the optimizer steps, not during backward.

For devices that average gradients inside the graph of a step (XLA), where a wrapper that reacts in backward would break
the graph up. Buffers, as the statistics of batch normalisation, stay each rank's own; those of rank 0 are saved.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nblaunch.errors import warn
from nblaunch.training.collectives import operations
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.strategies.base import Strategy


class ReduceAtStepStrategy(Strategy):
    """Leaves the model as it is, with rank 0's weights on every rank; the backend averages gradients at the step."""

    name = "reduce_at_step"

    def __init__(self) -> None:
        self._checksums: list[int | None] = []

    def before_move(self, model: torch.nn.Module) -> None:
        """Take checksums while the weights are on the host; :meth:`setup_module` compares them over ranks.

        Comparing has to wait for the move: where workers build their models one after the other, the next one waits
        for this one's to move.
        """
        self._checksums = [checksum(t) if t.device.type == "cpu" else None for t in _tensors(model)]

    def setup_module(self, model: torch.nn.Module, process: JoinedProcess) -> torch.nn.Module:
        """Send rank 0's weights where others differ; workers that share the kernel's model have nothing to send."""
        everyones = operations.gather_object([self._checksums])
        if len({len(one) for one in everyones}) > 1:
            counts = ", ".join(f"rank {rank}: {len(one)}" for rank, one in enumerate(everyones))
            raise ValueError(
                f"the {type(model).__name__} has different numbers of tensors on the ranks ({counts})"
            )
        for tensor, *values in zip(_tensors(model), *everyones, strict=True):
            if len(set(values)) > 1:
                operations.broadcast(tensor)
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()  # nothing is reduced before the step in any case

    def join_uneven_inputs(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        warn(
            "join_uneven_inputs has no effect on this device: all ranks take part in every step; keep even_batches=True"
        )
        return nullcontext()


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the bytes of a CPU tensor; reading them copies no page."""
    if hasattr(tensor, "__tensor_flatten__"):  # made of several, as torchao's quantised weights are
        names, _ = tensor.__tensor_flatten__()
        return hash(tuple(checksum(getattr(tensor, name)) for name in names))
    flat = tensor.contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
