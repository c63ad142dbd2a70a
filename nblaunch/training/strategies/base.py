"""How a model is spread over processes: :class:`Strategy`.

A strategy knows nothing of devices beyond the one it is given, nothing of precision and nothing of data. A new one is
one file in this folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nblaunch.training.process import Member


class Strategy(ABC):
    """One way to spread a model."""

    name: str

    def agree(self, model: torch.nn.Module) -> None:
        """Make the weights those of rank 0 on every rank, before ``model`` goes to its device; no need if wrap does."""

    @abstractmethod
    def wrap(self, model: torch.nn.Module, member: Member) -> torch.nn.Module:
        """``model``, which lies on its device, ready for training on this rank; the very same object if that is all."""

    @abstractmethod
    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """While it lasts, ``backward`` through ``model`` leaves gradients unreduced."""

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """While it lasts, ranks that are through with their data answer for the others' steps."""
        return nullcontext()

    def gradient_order(self, model: torch.nn.Module) -> list[int]:
        """In which order gradients are reduced, as positions of parameters; empty where there is no such order, yet.

        Sums of floating-point numbers depend on it, from three ranks on.
        """
        return []

    def set_gradient_order(self, model: torch.nn.Module, order: Sequence[int]) -> None:
        """Reduce gradients in the order that :meth:`gradient_order` told in another process, from now on."""


def unwrap(model: Any) -> Any:
    """The module inside any number of data-parallel wrappers, whoever put them there."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return model
