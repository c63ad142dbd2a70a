"""A module's weights, as torch, its wrappers and other libraries represent them.

    state_dicts.py      versions of state dicts; whether a module can load one; plain names; quantised weights
    sharded.py          tensors that ranks hold in shards

The launcher, which collects trained weights, and the checkpoints of a training run both use this package.
"""
