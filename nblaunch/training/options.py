"""The option classes an ``Accelerator`` takes, with the names and fields that users of the reference know.

They are frozen data: they validate themselves, and never read the environment or touch a device. A field that is not
listed here is not supported yet, and Python refuses it by name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

PRECISIONS = ("no", "fp16", "bf16")
RNG_TYPES = ("generator", "torch", "cuda")


@dataclass(frozen=True)
class KwargsHandler:
    """Base of the classes that may be given in ``Accelerator(kwargs_handlers=[...])``."""

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


@dataclass(frozen=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments for :class:`torch.nn.parallel.DistributedDataParallel`, described there.

    Args:
        bucket_cap_mb: size of a gradient bucket in MiB; one bucket is reduced while the next is computed.
        find_unused_parameters: True where some parameters take no part in some forward passes.
        static_graph: promise that every step uses the same parameters in the same order.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


@dataclass(frozen=True)
class GradScalerKwargs(KwargsHandler):
    """Arguments for :class:`torch.amp.GradScaler`, used with ``mixed_precision="fp16"``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass(frozen=True)
class AutocastKwargs(KwargsHandler):
    """Arguments for :class:`torch.autocast`. ``cache_enabled`` None: torch's own default."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass(frozen=True)
class InitProcessGroupKwargs(KwargsHandler):
    """How to join the process group. ``timeout``: how long a collective may wait; None: torch's default."""

    timeout: timedelta | None = None


@dataclass(frozen=True)
class GradientAccumulationPlugin:
    """Gradient accumulation in full.

    Args:
        num_steps: micro-steps per optimizer step, at least 1.
        adjust_scheduler: keep torch's warning about the order of scheduler and optimizer quiet in between.
        sync_with_dataloader: step at the last batch of a loader, even if the window is not full.
        sync_each_batch: average gradients over ranks at every micro-step: more traffic, less memory in sharded models.

    Raises:
        ValueError: ``num_steps`` is less than 1.
        TypeError: ``num_steps`` is not a whole number.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.num_steps, int) or isinstance(self.num_steps, bool):
            raise TypeError(f"gradient accumulation num_steps={self.num_steps!r} is not a whole number")
        if self.num_steps < 1:
            raise ValueError(f"gradient accumulation num_steps={self.num_steps} is less than 1")


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """How prepared loaders share their data among ranks.

    Args:
        split_batches: False: each rank gets whole batches, the global batch is ``batch_size`` x ranks. True: a batch is
            cut into one part per rank, and ``batch_size`` is the global one.
        dispatch_batches: True would let rank 0 read for all; not supported yet. None and False: each reads its own.
        even_batches: complete the tail with samples from the start of the epoch, so that all ranks get equally many
            batches of equal size. ``gather_for_metrics`` drops what was added.
        use_seedable_sampler: shuffle by seed and epoch alone, independently of the global random state.
        data_seed: the seed for that; None: drawn once from torch's global generator on rank 0.
        non_blocking: copy batches to the device asynchronously; of use with ``pin_memory=True``.
        use_stateful_dataloader: not supported yet.

    Raises:
        NotImplementedError: an option that is not supported yet was asked for.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.dispatch_batches:
            raise NotImplementedError(
                "DataLoaderConfiguration(dispatch_batches=True) is not supported yet: rank 0 does not read for the "
                "other ranks. Use dispatch_batches=False (or None): every rank reads its own share."
            )
        if self.use_stateful_dataloader:
            raise NotImplementedError(
                "DataLoaderConfiguration(use_stateful_dataloader=True) is not supported yet: the position inside an "
                "epoch can't be saved."
            )
        if self.data_seed is not None and not self.use_seedable_sampler:
            raise ValueError(
                f"data_seed={self.data_seed} needs use_seedable_sampler=True; without it the order comes from the "
                "sampler's generator"
            )


def check_choice(name: str, value: Any, valid: tuple[str, ...]) -> None:
    """Raise ValueError where ``value`` is not one of ``valid``, naming both."""
    if value not in valid:
        raise ValueError(f"{name}={value!r} is unknown; valid are {', '.join(map(repr, valid))}")
