"""A module's weights, in the forms of torch, its wrappers and other libraries.

    plain_names.py      names of weights without the prefixes of wrappers
    state_dicts.py      versions of state dicts; whether a module can load one
    sharded.py          tensors that ranks hold in shards
    quantised.py        frozen weights in the format of a library
    loading.py          loads the workers' weights into the kernel's module

The launcher, which collects trained weights, and the checkpoints of a training run both use this package.
"""
