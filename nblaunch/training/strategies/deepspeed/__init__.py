"""Training with DeepSpeed's engine.

plugin.py       the user's settings
config.py       completes the engine's configuration: "auto" values, contradictions
hf_config.py    the configuration as transformers and TRL look at it
library.py      imports DeepSpeed and builds its engine
strategy.py     what ``prepare`` and the training loop call
optimizer.py    the engine's optimizer and scheduler, as the loop calls them
clipping.py     the norm of gradients, and its limit
precision.py    16-bit weights of the engine
checkpoint.py   saves shards, gathers whole weights
"""
