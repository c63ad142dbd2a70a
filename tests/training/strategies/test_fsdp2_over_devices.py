"""FSDP over the devices of one process: the sharded dimension, and unsupported settings. tests/xla tests XLA itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nblaunch import Accelerator, FullyShardedDataParallelPlugin, backends, context
from nblaunch.training.strategies.fsdp2.over_devices import sharded_dimension


@pytest.mark.parametrize(
    ("shape", "count", "expected"),
    [
        ((64, 32), 8, 0),
        ((32, 64), 8, 1),
        ((50257, 768), 8, 1),
        ((16, 3, 3, 3), 8, 0),
        ((9,), 8, 0),
        ((7, 7), 8, None),
        ((), 8, None),
        ((64, 64), 1, None),
    ],
)
def test_the_longest_divisible_dimension_is_sharded(
    shape: tuple[int, ...], count: int, expected: int | None
) -> None:
    assert sharded_dimension(torch.Size(shape), count) == expected


@pytest.mark.parametrize(
    "field",
    [
        {"cpu_offload": True},
        {"activation_checkpointing": True},
        {"mixed_precision_policy": "bf16"},
        {"param_init_fn": print},
    ],
)
def test_unsupported_fields_are_rejected(field: dict[str, Any]) -> None:
    class Spanning(type(backends.choose("cpu"))):  # type: ignore[misc]
        num_spmd_devices = 4

    context.install(context.ProcessContext(context.Topology(), Spanning()))
    with pytest.raises(ValueError, match=f"{next(iter(field))}=.* can't be used with strategy='spmd'"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**field))
