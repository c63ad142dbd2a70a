"""Saved states and models.

save_state.py        ``save_state``, also in a thread
load_state.py        ``load_state``: reads and checks a checkpoint, then loads it
snapshot.py          the objects to save, their states, and copies of the states to write while training continues
registered.py        states of registered objects: gathers shards, and saves each rank's state if the states differ
save_round.py        the protocol by which ranks meet to save together
files.py             file names in a checkpoint folder, and the manifest; files of single states; atomic writes of
                     folders
model_files.py       weight files: safetensors or torch's format, whole or in shards
load_weights.py      checks whether the weights in weight files fit a module, and loads them
fsdp_states.py       saves FSDP models and optimizers one by one, as trainers do; merges shards
"""
