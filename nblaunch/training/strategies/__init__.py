"""Ways to spread a model over processes: one file or folder each.

base.py             what a strategy has to do, and in which order it is called
ddp.py              where no plugin is passed, every rank holds the whole model: gradients averaged during backward by
                    torch's DistributedDataParallel, or at the optimizer's step for XLA; a lone process
sharded.py          what strategies with shards of weights have in common; shard_files.py: their files
tensor_parallel.py  layers cut over ranks by torch's ``parallelize_module`` or transformers
fsdp2/              weights sharded with torch's ``fully_shard``
deepspeed/          DeepSpeed's engine: sharded optimizer states, gradients and weights
"""

from __future__ import annotations

from collections.abc import Mapping

from nblaunch.training.strategies.base import Strategy, StrategyPlugin, TrainingSetup
from nblaunch.training.strategies.deepspeed.plugin import DeepSpeedPlugin
from nblaunch.training.strategies.fsdp2.plugin import FullyShardedDataParallelPlugin

__all__ = ["PLUGINS", "Strategy", "StrategyPlugin", "TrainingSetup", "argument_of"]

PLUGINS: Mapping[str, type[StrategyPlugin]] = {
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "deepspeed_plugin": DeepSpeedPlugin,
    "deepspeed_plugins": DeepSpeedPlugin,
}
"""Arguments of the Accelerator that take plugins of one class; ``strategy`` takes those of any."""


def argument_of(name: str) -> str:
    """Return the argument of the Accelerator by which the strategy ``name`` is chosen."""
    return next((argument for argument, kind in PLUGINS.items() if kind.name == name), "strategy")
