"""Models sharded over ranks with torch's ``fully_shard``; or over the devices of one process, by XLA's compiler.

settings.py         what users set
strategy.py         what ``prepare`` and the training loop call; the plugin, which builds it
over_devices.py     the same for one process that drives several devices
units.py            which modules are gathered as one, what they may return, activations computed anew; what torch has
                    no public way to ask of them
weights.py          where the shards of a rank are filled from
initialisation.py   how weights that no rank has are made, module by module
"""
