"""Prepared data loaders.

prepare.py          make a prepared loader out of the user's
adapter.py          a loader around the one that reads, torch's or torchdata's; its options, the state of its epoch
samplers.py         the samplers nested in a loader; two of our own: seeded, and without its first batches
sharding.py         which samples a rank gets, and which are left of an epoch, for any number of ranks
loader.py           read them: ``PreparedLoader``, and ``DataLoaderShard`` for a rank that reads its own shard
dispatcher.py       ``DataLoaderDispatcher``, where rank 0 reads for all
resuming.py         loaders whose next epoch begins behind its first batches; states of loaders in checkpoints
"""
