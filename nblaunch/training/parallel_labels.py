"""Answers to questions about forms of parallelism that a job of data parallel processes does not have.

Trainers of other libraries ask them of every ``Accelerator`` before they branch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from nblaunch.training.deepspeed_options import DeepSpeedPlugin
from nblaunch.training.joining import Member
from nblaunch.training.session import Session
from nblaunch.training.strategies import Strategy


class ParallelLabels(ABC):
    """One process, one replica of the model. The final class gives it its parts."""

    _session: Session
    _strategy: Strategy

    @property
    @abstractmethod
    def _member(self) -> Member:
        """The place of this process."""

    @property
    def multi_device(self) -> bool:
        """Whether several processes compute on devices other than the CPU."""
        return self._member.topology.world_size > 1 and self._member.device.type != "cpu"

    @property
    def data_parallel_rank(self) -> int:
        """The replica of this process: its rank."""
        return self._member.topology.rank

    data_parallel_shard_rank = tensor_parallel_rank = pipeline_parallel_rank = context_parallel_rank = 0
    """Part of a replica that this process holds: the only one."""

    is_composable_parallelism_enabled = False
    """Parallelism is of one kind."""

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded over ranks."""
        return self._strategy.name == "fsdp2"

    should_save_model = True
    """Every process holds the whole model, or a part of it, and takes part in saving."""

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The plugin that DeepSpeed trains by; None where it does not."""
        plugins = self._session.deepspeed
        return None if plugins is None else plugins.active

    fp8_backend = parallelism_config = torch_device_mesh = None
    """There is none."""
