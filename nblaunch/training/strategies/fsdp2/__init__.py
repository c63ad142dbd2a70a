"""Models sharded over ranks with torch's ``fully_shard``, or over the devices of a single process by XLA's compiler.

settings.py         the user's settings
strategy.py         the strategy, which ``prepare`` and the training loop call; its plugin
over_devices.py     the strategy for a single process that drives several devices
units.py            chooses the modules to gather as units; their outputs and recomputed activations; access to torch's
                    private attributes
weights.py          fills the shards: from the rank's own weights, from rank 0, or by initialising module by module
"""
