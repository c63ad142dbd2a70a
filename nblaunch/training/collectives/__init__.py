"""Collectives that operate on values from all ranks.

operations.py   gather, reduce, broadcast and similar, over nested structures of tensors
metrics.py      gather_for_metrics: gathers each sample of the dataset once
nested.py       walks nested structures, and rebuilds their containers with new contents
dtensor.py      sharded tensors
rng.py          random states: seeds and synchronises them, and saves them for checkpoints
"""
