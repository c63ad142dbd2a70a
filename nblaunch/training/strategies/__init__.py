"""Strategies for training a model on several processes: one file or folder each.

base.py                    what a strategy has to do, and in which order it is called
replicated.py              the default, in which every rank has the whole model: gradients averaged during backward
                           by torch's DistributedDataParallel, or for XLA at the step; a lone process
late_parameters.py         parameters that DistributedDataParallel does not know: unfrozen or added after prepare
dtensor_strategy.py        what strategies with DTensor weights have in common
shard_files.py             files of these shards, through torch.distributed.checkpoint
tensor_parallel.py         layers sharded by torch's ``parallelize_module`` or transformers
fsdp2/                     weights sharded with torch's ``fully_shard``
deepspeed/                 DeepSpeed's engine: sharded optimizer states, gradients and weights
"""

from __future__ import annotations

from nblaunch.training.strategies.base import Strategy, StrategyPlugin, TrainingSetup

__all__ = ["Strategy", "StrategyPlugin", "TrainingSetup"]
