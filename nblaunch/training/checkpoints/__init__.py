"""Saved states and models.

save_state.py        ``save_state``, also in a thread
load_state.py        ``load_state``: reads and checks a checkpoint, then loads it
snapshot.py          which objects are saved; their states, which make one checkpoint; copies, written during training
registered.py        states of registered objects: shards gathered, each rank's own where ranks differ
save_round.py        how ranks meet to save together
files.py             names of the files in a checkpoint's folder, and the manifest; states of single objects in files
model_files.py       files of weights: safetensors or torch's format, whole or in shards
load_weights.py      checks whether weights from such files fit a module, and loads them into it
fsdp_states.py       models and optimizers of FSDP saved one by one, as trainers do; merges shards
safe_save.py         atomic writes of files and folders
"""
