"""Models sharded over ranks with torch's ``fully_shard``; or over the devices of one process, by XLA's compiler.

settings.py         what users set
strategy.py         what ``prepare`` and the training loop call; the plugin, which builds it
over_devices.py     the same for one process that drives several devices
units.py            which modules are gathered as one, what they may return, recomputed activations; access to what
                    torch does not make public about them
weights.py          the sources that fill a rank's shards
initialisation.py   how weights that no rank has are made, module by module
"""
