"""Training with DeepSpeed's engine.

settings.py     the user's settings
config.py       completes the engine's configuration: fills in "auto" values and rejects contradictions
library.py      imports DeepSpeed and configures it for this process
strategy.py     the strategy, which ``prepare`` and the training loop call; the engine's optimizer and scheduler for the
                loop; clipping; 16-bit weights; the plugin
checkpoint.py   saves shards and gathers full weights
"""
