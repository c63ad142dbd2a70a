"""Tensor parallelism: every rank holds a shard of each layer, and the ranks process the same data together.

The user passes a model that torch's ``parallelize_module`` or transformers' ``tp_plan`` has sharded: its weights are
DTensors over the mesh's ``tp`` dimension. This strategy only makes the weights equal on ranks that hold the same shard.
"""

from __future__ import annotations

from torch import nn

from nblaunch.errors import warn
from nblaunch.training.collectives import operations
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.models import bare_module
from nblaunch.training.parallelism import ParallelismConfig
from nblaunch.training.strategies.base import Strategy, StrategyPlugin, TrainingSetup
from nblaunch.training.strategies.dtensor_strategy import DTensorStrategy, share_weights
from nblaunch.weights.sharded import is_sharded_model


class TensorParallelPlugin(StrategyPlugin):
    """Chooses tensor parallelism: ``Accelerator(parallelism_config=ParallelismConfig(tp_size=...))``."""

    name = "tensor_parallel"

    def build(self, setup: TrainingSetup) -> Strategy:
        assert setup.parallelism is not None  # its tp_size chose this plugin
        return TensorParallelStrategy(setup.process, setup.parallelism)


class TensorParallelStrategy(DTensorStrategy):
    """Keeps the sharding of the models that the user passes."""

    name = TensorParallelPlugin.name
    holds_shards = True

    def __init__(self, process: JoinedProcess, parallelism: ParallelismConfig) -> None:
        super().__init__(process, "tp_size")
        self._parallelism = parallelism

    def setup_module(self, model: nn.Module, process: JoinedProcess) -> nn.Module:
        inner = bare_module(model)
        if not is_sharded_model(inner):
            warn_of_unsharded(inner)
        share_weights(inner, self._parallelism)
        return model


def warn_of_unsharded(model: nn.Module) -> None:
    """Warn on rank 0 that a model is not sharded although ``tp_size`` is set."""
    if operations.rank() == 0:
        warn(
            f"tp_size is more than 1, but the {type(model).__name__} is not sharded, so all ranks of a tensor "
            "parallel group do the same work. Before prepare, call "
            'torch.distributed.tensor.parallel.parallelize_module(model, accelerator.torch_device_mesh["tp"], '
            'plan), or load it with from_pretrained(..., tp_plan="auto")'
        )
