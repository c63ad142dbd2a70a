"""Saved states and models.

save_state.py        ``save_state``, also in a thread
load_state.py        ``load_state``: reads and checks a checkpoint, then loads it
snapshot.py          what is saved; its states, which make one checkpoint; copies, written while training goes on
registered.py        states of registered objects: shards gathered, each rank's own where ranks differ
save_round.py        how ranks meet to save together
files.py             names of the files in a checkpoint's folder, and the manifest; states of single objects in files
model_files.py       files of weights: safetensors or torch's format, whole or in shards
load_weights.py      whether weights from such files fit a module, and into it
fsdp_states.py       models and optimizers of FSDP saved one by one, as trainers do; shards put together
safe_save.py         atomic writes of files and folders
"""
