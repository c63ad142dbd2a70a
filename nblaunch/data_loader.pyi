# Written by `make stubs` from nblaunch/compat.py.
from nblaunch.training.data.adapter import (
    DataLoaderAdapter as DataLoaderAdapter,
    DataLoaderStateMixin as DataLoaderStateMixin,
)
from nblaunch.training.data.dispatcher import (
    DataLoaderDispatcher as DataLoaderDispatcher,
)
from nblaunch.training.data.loader import (
    DataLoaderShard as DataLoaderShard,
    get_sampler as get_sampler,
)
from nblaunch.training.data.prepare import (
    prepare_data_loader as prepare_data_loader,
)
from nblaunch.training.data.resuming import (
    SkipDataLoader as SkipDataLoader,
    skip_first_batches as skip_first_batches,
)
from nblaunch.training.data.samplers import (
    SeedableRandomSampler as SeedableRandomSampler,
    SkipBatchSampler as SkipBatchSampler,
)
from nblaunch.training.data.sharding import (
    BatchSamplerShard as BatchSamplerShard,
    IterableDatasetShard as IterableDatasetShard,
)
