"""Data loaders, under the name that scripts written for Hugging Face Accelerate import them from.

This module only hands on objects that live in ``nblaunch.training``; it defines nothing.
"""

from __future__ import annotations

from nblaunch.training.dispatcher import DataLoaderDispatcher
from nblaunch.training.loader import DataLoaderShard
from nblaunch.training.loading import SkipDataLoader, prepare_data_loader, skip_first_batches
from nblaunch.training.sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)

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
