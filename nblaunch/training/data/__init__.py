"""Prepared data loaders.

prepare.py          turns the user's loader into a prepared one
adapter.py          wraps the loader from torch or torchdata that reads the data; its options and the state of its epoch
samplers.py         the samplers nested in a loader; a seeded sampler, and one that skips the first batches
sharding.py         which samples a rank gets, and which remain in an epoch, for any number of ranks
loader.py           reads the samples: ``PreparedLoader``, and ``DataLoaderShard`` for a rank that reads its own shard
dispatcher.py       ``DataLoaderDispatcher``: rank 0 reads for all ranks; a single process reads as from a shard
resuming.py         loaders that continue in the middle of an epoch; the state of loaders in checkpoints
"""
