"""Reports training loops whose ``DistributedSampler`` stays in one epoch, so every epoch has the same order.

The check runs at the end of each loop over a loader of torch, whichever library trains.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from nblaunch.context import ProcessContext
from nblaunch.user_code import innermost_user_frame

CHECK = "epoch_not_set"
"""Name of this check in ``NBLAUNCH_CHECKS``."""

_NUM_EPOCHS = 3


class SamplerEpochs:
    """Counts consecutive complete loops over a sampler in one epoch, until the user wraps another model.

    A search for hyperparameters may train each model on the same order.

    Args:
        here: the context of this process.
    """

    def __init__(self, here: ProcessContext) -> None:
        self._here = here
        self._seen: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], int]] = weakref.WeakKeyDictionary()

    def end_epoch(self, iterator: Any) -> None:
        """Count a training loop that has read all batches from an iterator of torch's loader."""
        sampler = _sampler_of(iterator)
        if sampler is None:
            return
        gradients = self._here.slot.local_gradients
        model = None if gradients is None else gradients.last_wrapped
        order = sampler.epoch, sampler.seed, model
        last, number = self._seen.get(sampler, (order, 0))
        number = number + 1 if last == order else 1
        self._seen[sampler] = order, number
        if number == _NUM_EPOCHS:
            self._here.observe(
                CHECK,
                f"the samples had the same order in {_NUM_EPOCHS} epochs in a row, because DistributedSampler stays "
                f"in epoch {sampler.epoch}",
                "Call sampler.set_epoch(epoch) before each epoch, or pass the DataLoader to accelerator.prepare()",
                innermost_user_frame(),
            )


def _sampler_of(iterator: Any) -> Any:
    """Return the loader's shuffling ``DistributedSampler``; None if it has another, or one with an order of its own."""
    module: Any = sys.modules.get("torch.utils.data.distributed")
    batch_sampler = getattr(iterator, "_index_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None)
    if module is None or not isinstance(sampler, module.DistributedSampler) or not sampler.shuffle:
        return None
    is_torchs = type(sampler).__iter__ is module.DistributedSampler.__iter__
    is_in_order = type(batch_sampler).__module__ == "torch.utils.data.sampler"
    return sampler if is_torchs and is_in_order else None
