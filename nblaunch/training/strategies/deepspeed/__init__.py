"""Training with DeepSpeed's engine.

settings.py     what users set
config.py       completes the engine's configuration: "auto" values, contradictions; transformers' view of it
library.py      imports DeepSpeed and builds its engine
strategy.py     what ``prepare`` and the training loop call; the plugin, which builds it
engine.py       the engine's optimizer and scheduler, as the loop calls them; clipping; 16-bit weights
checkpoint.py   saves shards, gathers full weights
"""
