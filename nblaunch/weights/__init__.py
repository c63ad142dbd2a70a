"""Weights of a module in the forms that torch, its wrappers and libraries give them.

    plain_names.py      names without what wrappers inside a module add
    state_dicts.py      versions beside the entries; whether a module can load a state dict
    sharded.py          tensors that ranks hold in shards
    quantised.py        frozen weights in a library's own form
    loading.py          what workers sent, into the kernel's module

Both sides use them: the launcher, which collects what workers trained, and the checkpoints of a training.
"""
