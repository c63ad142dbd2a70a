"""Prepared data loaders.

prepare.py          makes a prepared loader out of the user's
adapter.py          a loader around the one that reads, torch's or torchdata's; its options, the state of its epoch
samplers.py         the samplers nested in a loader; two of our own: seeded, and without its first batches
sharding.py         which samples a rank gets, and which remain in an epoch, for any number of ranks
loader.py           reads them: ``PreparedLoader``, and ``DataLoaderShard`` for a rank that reads its own shard
dispatcher.py       ``DataLoaderDispatcher``, where rank 0 reads for all; in a lone process it reads as a shard
resuming.py         loaders whose next epoch begins after its first batches; states of loaders in checkpoints
"""
