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

    @abstractmethod
    def wrap(self, model: torch.nn.Module, member: Member) -> torch.nn.Module:
        """``model``, which lies on its device, ready for training on this rank; the very same object if that is all."""

    @abstractmethod
    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """While it lasts, ``backward`` through ``model`` leaves gradients unreduced."""

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """While it lasts, ranks that are through with their data answer for the others' steps."""
        return nullcontext()


def unwrap(model: Any) -> Any:
    """The module inside any number of data-parallel wrappers, whoever put them there."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return model
