"""Training with DeepSpeed's engine.

``strategy`` is what ``prepare`` uses; ``config`` completes the engine's configuration, ``library`` loads it, ``steps``
and ``precision`` are our wrappers around what the engine does itself, ``norm`` clips, ``weights`` and ``checkpoint``
put together what is cut.
"""
