"""One process: the model is used as it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nblaunch.training.joining import Member
from nblaunch.training.strategies.base import Strategy


class SingleStrategy(Strategy):
    """Nothing is spread, nothing is wrapped."""

    name = "single"

    def wrap(self, model: torch.nn.Module, member: Member) -> torch.nn.Module:
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()
