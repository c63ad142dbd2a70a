"""How loaders share data, as properties of the ``Accelerator``."""

from __future__ import annotations

import dataclasses
from abc import ABC

from nblaunch.training.options import DataLoaderConfiguration
from nblaunch.training.prepare import Preparer


class DataSettings(ABC):
    """The fields of ``dataloader_config``. The final class gives it its parts."""

    dataloader_config: DataLoaderConfiguration
    _preparer: Preparer

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
        # For loaders that are prepared from now on.
        self.dataloader_config = dataclasses.replace(self.dataloader_config, even_batches=even_batches)
        self._preparer.data = self.dataloader_config

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
