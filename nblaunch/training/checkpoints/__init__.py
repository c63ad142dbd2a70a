"""Saved states and models.

checkpointer.py      what the ``Accelerator`` calls
saving.py            ``save_state``, also in a thread
restoring.py         ``load_state``
contents.py          what a rank reads of a checkpoint, before it loads it
fitting.py           whether saved weights and optimizers fit
snapshot.py          what one checkpoint is made of
save_round.py        how ranks meet to save it
files.py             what lies in its folder, and the manifest
model_files.py       files of weights: safetensors or torch's format, whole or in shards
loading.py           such a file into a module
sharded_files.py     sharded models and optimizers in files of their own; shards put together
safe_save.py         why a folder is never half written
dispatching.py       weights straight from disk to devices
"""
