"""Values of all ranks.

operations.py   gather, reduce, broadcast and the like, over nested structures of tensors
metrics.py      gather_for_metrics: each sample of the dataset once
nested.py       walk these structures
containers.py   what is in a container, and the same container with other contents
dtensor.py      sharded tensors
rng.py          random states: seed them, make them equal over ranks, keep them for checkpoints
"""
