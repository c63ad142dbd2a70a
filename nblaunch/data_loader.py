"""Data loaders, under the name that scripts written for Hugging Face Accelerate import them from.

This module only hands on objects that live in ``nblaunch.training``; it defines nothing.
"""

from __future__ import annotations

from nblaunch.training.data.dispatcher import DataLoaderDispatcher
from nblaunch.training.data.loading import prepare_data_loader
from nblaunch.training.data.own_share import DataLoaderShard
from nblaunch.training.data.samplers import SeedableRandomSampler, SkipBatchSampler
from nblaunch.training.data.sharding import BatchSamplerShard, IterableDatasetShard
from nblaunch.training.data.skipping import SkipDataLoader, skip_first_batches

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "prepare_data_loader",
    "skip_first_batches",
]
