"""Training with DeepSpeed's engine.

``plugin`` has the user's settings, ``strategy`` is what ``prepare`` uses. ``config`` completes the engine's
configuration, ``library`` imports DeepSpeed, ``optimizer`` wraps what the engine does itself, ``checkpoint`` saves
shards and gathers whole weights.
"""
