"""What is used where no plugin is passed: every rank trains the whole model, as its device needs it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nblaunch.training.joining import JoinedProcess
from nblaunch.training.options import DistributedDataParallelKwargs
from nblaunch.training.strategies.base import Strategy, StrategyPlugin, TrainingSetup
from nblaunch.training.strategies.ddp import DdpStrategy
from nblaunch.training.strategies.reduce_at_step import ReduceAtStepStrategy


class DefaultPlugin(StrategyPlugin):
    """The choice among a lone process, DistributedDataParallel, and gradients averaged at the optimizer's step.

    Args:
        options: arguments of DistributedDataParallel.
    """

    def __init__(self, options: DistributedDataParallelKwargs | None = None) -> None:
        self.options = options

    def build(self, setup: TrainingSetup) -> Strategy:
        if setup.process.topology.world_size == 1:
            return SingleStrategy()
        if setup.process.backend.reduces_gradients_at_step:
            return ReduceAtStepStrategy()
        return DdpStrategy(self.options)


class SingleStrategy(Strategy):
    """Leaves the model of a lone process as it is."""

    name = "single"

    def setup_module(self, model: torch.nn.Module, process: JoinedProcess) -> torch.nn.Module:
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()
