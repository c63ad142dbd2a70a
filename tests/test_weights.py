"""Shards of tensors, which the launcher assembles."""

from __future__ import annotations

import torch

from nblaunch.weights import ShardedTensor, TensorShard


def test_shards_fill_their_positions() -> None:
    whole = torch.arange(12.0).view(3, 4)
    flat = whole.reshape(-1)
    sharded = ShardedTensor(
        [TensorShard((3, 4), (start,), flat[start : start + 5], is_flat=True) for start in (10, 0, 5)]
    )
    assert sharded.num_missing == 0
    assert torch.equal(sharded.assembled(), whole)
    for target in (torch.zeros(3, 4), torch.zeros(4, 3).T, torch.zeros(3, 8)[:, ::2]):
        sharded.put_into(target)
        assert torch.equal(target, whole)


def test_an_element_outside_all_shards_is_missing() -> None:
    assert ShardedTensor([TensorShard((2, 2), (0,), torch.ones(3), is_flat=True)]).num_missing == 1
