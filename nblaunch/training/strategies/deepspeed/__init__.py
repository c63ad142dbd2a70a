"""Training with DeepSpeed's engine.

plugin       the user's settings
config       completes the engine's configuration: "auto" values, contradictions
library      imports DeepSpeed and builds its engine
strategy     what ``prepare`` and the training loop call
optimizer    the engine's optimizer and scheduler, as the loop calls them
clipping     the norm of gradients, and its limit
precision    16-bit weights of the engine
checkpoint   saves shards, gathers whole weights
"""
