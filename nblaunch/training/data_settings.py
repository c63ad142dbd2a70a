"""What ``prepare`` goes by, as properties of the ``Accelerator``: setting one counts for what is prepared later."""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Sequence

from nblaunch.training import settings
from nblaunch.training.options import DataLoaderConfiguration
from nblaunch.training.prepare import Preparer


class DataSettings(ABC):
    """Settings of loaders, placement and schedulers. The final class gives it its parts."""

    _preparer: Preparer

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How prepared loaders share their data among ranks; may be set."""
        return self._preparer.data

    @dataloader_config.setter
    def dataloader_config(self, config: DataLoaderConfiguration) -> None:
        self._preparer.data = config

    @property
    def rng_types(self) -> Sequence[str]:
        """Generators that loaders make equal over ranks at the start of every epoch; may be set."""
        return self._preparer.rng_types

    @rng_types.setter
    def rng_types(self, rng_types: Sequence[str] | None) -> None:
        self._preparer.rng_types = settings.rng_types(rng_types)

    @property
    def device_placement(self) -> bool:
        """Whether models and batches go to the device of this process; may be set."""
        return self._preparer.device_placement

    @device_placement.setter
    def device_placement(self, device_placement: bool) -> None:
        self._preparer.device_placement = device_placement

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers step where their optimizer does, once per process; may be set."""
        return self._preparer.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, is_wanted: bool) -> None:
        self._preparer.step_scheduler_with_optimizer = is_wanted

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all ranks together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all; None: it does for iterable datasets."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the tail of an epoch is completed so that all ranks get equally many batches; may be set."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config = dataclasses.replace(self.dataloader_config, even_batches=even_batches)

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether random orders depend on seed and epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders can say where in an epoch they are."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self.dataloader_config.non_blocking
