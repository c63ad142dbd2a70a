"""Whole models without a wrapper: one process, or data parallelism with gradients averaged at the step.

The latter is for devices whose gradients are averaged inside the graph of a step, where a wrapper that reacts in
backward would cut the graph in pieces. Buffers, as the statistics of batch normalisation, stay each rank's own; those
of rank 0 are saved.
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


class ReplicatedStrategy(Strategy):
    """The model as it is, with the weights of rank 0 on every rank."""

    name = "replicated"

    def __init__(self) -> None:
        self._sums: list[int | None] = []

    def sync_initial_weights(self, model: torch.nn.Module) -> None:
        """Take checksums while the weights are on the host. They are compared when the model has moved.

        Not before: where workers build their models one after the other, the next one waits for this one's to move.
        """
        self._sums = [checksum(t) if t.device.type == "cpu" else None for t in _tensors(model)]

    def setup_module(self, model: torch.nn.Module, process: JoinedProcess) -> torch.nn.Module:
        """Send rank 0's weights where others differ; workers that share the kernel's model have nothing to send."""
        everyones = operations.gather_object([self._sums])
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

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        warn(
            "join_uneven_inputs has no effect on this device: all ranks take part in every step; keep even_batches=True"
        )
        return nullcontext()


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the bytes of a CPU tensor; reading them copies no page."""
    flat = tensor.contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


class SingleStrategy(Strategy):
    """Nothing is spread, nothing is wrapped."""

    name = "single"

    def setup_module(self, model: torch.nn.Module, process: JoinedProcess) -> torch.nn.Module:
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()
