"""Values of all ranks: the part of the ``Accelerator`` that gathers, reduces and broadcasts.

:class:`GatherControl` adds to ``collectives.py`` what needs to know the loader that is being read, and a flag that any
rank may raise for all.
"""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch

from nblaunch.training import advice
from nblaunch.training.collectives import nested, operations
from nblaunch.training.session import Session


class GatherControl(ABC):
    """Values of all ranks. The final class gives it its session, and ``flag_tensor`` = None."""

    _session: Session
    flag_tensor: torch.Tensor | None

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors over ranks, see :func:`nblaunch.training.collectives.operations.gather`."""
        return operations.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what ranks computed for their batches, each sample of the dataset exactly once.

        Samples that completed the last batch of an epoch are dropped. All ranks must call it for every batch, with
        whole batches: the first dimension is that of samples.

        Args:
            input_data: tensor or nested structure of tensors; anything else must be an iterable per rank and is
                gathered with pickle, as a list.
            use_gather_object: gather with pickle in any case.
        """
        is_object = use_gather_object or not all(
            isinstance(leaf, torch.Tensor) for leaf in nested.leaves(input_data)
        )
        gathered = operations.gather_object(input_data) if is_object else operations.gather(input_data)
        gradients = self._session.gradients
        if not gradients.end_of_dataloader or not _may_be_completed(gradients.active_loader):
            return gathered
        remainder = gradients.remainder
        if remainder < 0 and not _drops_last(gradients.active_loader):
            advice.warn(
                "the loader's length is not known, so samples that completed its last batch are still among the "
                "gathered ones. With num_workers=0 they can be told apart."
            )
        if remainder <= 0:
            return gathered
        if is_object:
            return gathered[:remainder]
        return nested.map_leaves(lambda leaf: leaf[:remainder], gathered)

    def gather_object(self, items: Any) -> Any:
        """All ranks' elements as one list, see :func:`nblaunch.training.collectives.operations.gather_object`."""
        return operations.gather_object(items)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors over ranks, see :func:`nblaunch.training.collectives.operations.reduce`."""
        return operations.reduce(tensor, reduction, scale)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Overwrite tensors with those of one rank, see :func:`nblaunch.training.collectives.operations.broadcast`."""
        return operations.broadcast(tensor, from_process)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad to the largest size of any rank, see ``pad_across_processes`` of ``operations.py``."""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise a flag that the next :meth:`check_trigger` reports to all ranks, as for stopping early."""
        self.flag_tensor = torch.ones(1, device=self._session.member.device)

    def check_trigger(self) -> bool:
        """Whether any rank raised the flag since the last check. All ranks must call it, and get the same answer."""
        mine = self.flag_tensor
        if mine is None:
            mine = torch.zeros(1, device=self._session.member.device)
        is_raised = bool(operations.reduce(mine, "sum") >= 1)
        if is_raised:
            self.flag_tensor = None
        return is_raised


def _may_be_completed(loader: Any) -> bool:
    """Whether samples may have been added to the loader's last batch; in a lone process, where shapes are static."""
    return operations.world_size() > 1 or loader.shard is not None


def _drops_last(loader: Any) -> bool:
    return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))
