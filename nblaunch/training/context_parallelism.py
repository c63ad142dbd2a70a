"""Context parallelism: sequences sharded over ranks, whose attention exchanges keys and values, by torch's means."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from nblaunch.training.parallelism import ParallelismConfig


def check_context_parallel(config: ParallelismConfig, device: torch.device) -> None:
    """Raise ValueError where torch's attention can't exchange keys and values on this kind of device."""
    if config.cp_enabled and device.type != "cuda":
        raise ValueError(
            f"cp_size={config.cp_size} can't be used on {device.type}: torch cuts sequences over ranks in its flash, "
            "efficient and cuDNN attention, which are for NVIDIA GPUs. Leave cp_size out here"
        )


def context_parallel(
    config: ParallelismConfig | None,
    buffers: list[torch.Tensor] | None,
    dims: list[int] | None,
    no_restore: set[torch.Tensor] | None,
) -> AbstractContextManager[None]:
    """Return torch's context manager for one step; one without any effect where sequences are not sharded."""
    if config is None or not config.cp_enabled:
        return nullcontext()
    from torch.distributed.tensor import experimental

    assert config.cp_handler is not None  # made by the configuration
    _set_exchange(str(config.cp_handler.cp_comm_strategy))
    sharded: AbstractContextManager[None] = experimental.context_parallel(
        config.device_mesh["cp"], buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=no_restore
    )
    return sharded


def _set_exchange(name: str) -> None:
    """Say by which collective ranks exchange keys and values."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method  # has no public name

    set_rotate_method(name)
