"""Models sharded over ranks with torch's ``fully_shard``.

plugin                      the user's settings
strategy                    what ``prepare`` and the training loop call
units                       which modules are gathered as one
weights                     where the shards of a rank are filled from
views                       what a unit may return
activation_checkpointing    activations that are computed anew in backward
fsdp_internals              what torch has no public way to ask
checkpoint                  shards in files
"""
