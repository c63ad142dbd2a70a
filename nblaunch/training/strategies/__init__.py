"""Strategies for training a model on several processes: one file or folder each.

base.py                    the interface of a strategy, and the order in which ``prepare`` calls its methods
replicated.py              the default: every rank has the whole model, and torch's DistributedDataParallel averages
                           gradients during backward (on XLA, the backend does so at each step); also for a single
                           process
late_parameters.py         parameters that DistributedDataParallel does not know about: unfrozen or added after prepare
dtensor_strategy.py        the common base for strategies with DTensor weights; layers sharded by torch's
                           ``parallelize_module`` or transformers
shard_files.py             shard files, through torch.distributed.checkpoint
fsdp2/                     weights sharded with torch's ``fully_shard``
deepspeed/                 DeepSpeed's engine: sharded optimizer states, gradients and weights
"""

from __future__ import annotations

from nblaunch.training.strategies.base import Strategy, StrategyPlugin, TrainingSetup

__all__ = ["Strategy", "StrategyPlugin", "TrainingSetup"]
