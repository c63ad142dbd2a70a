"""What strategies have in common whose ranks hold shards of weights, as DTensors of any mesh.

The norm of all shards, full states from them and back, and their files through torch.distributed.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nblaunch.training.collectives import dtensor
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.strategies import distributed_checkpoint
from nblaunch.training.strategies.base import ShardWriter, Strategy


class DTensorStrategy(Strategy):
    """Clip, save and load models whose parameters are DTensors; the rest is that of the strategy.

    Args:
        process: ranks and device of this process.
        setting: what asks for shards, for the error.

    Raises:
        RuntimeError: torch is too old.
    """

    def __init__(self, process: JoinedProcess, setting: str) -> None:
        if not hasattr(torch.nn.utils, "get_total_norm"):
            # Torch 2.6 brought it, along with fully_shard and checkpoints that one rank writes.
            raise RuntimeError(
                f"{setting} needs torch 2.6 or newer, and this is {torch.__version__}: pip install -U torch"
            )
        self._process = process
        self._saving_group: Any = None

    @property
    def saves_shards(self) -> bool:
        """Whether checkpoints have each rank's shards; otherwise the main process writes full states."""
        return True

    # --- gradients -----------------------------------------------------------------------------------------------

    def clip_grad_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = dtensor.total_norm(gradients, norm_type, self._process.device)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            held = dtensor.local(gradient)
            held.mul_(factor.to(held.device))
        return total

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                dtensor.local(parameter.grad).clamp_(-clip_value, clip_value)

    # --- states --------------------------------------------------------------------------------------------------

    @property
    def _keeps_full(self) -> bool:
        return self._process.topology.local_rank == 0

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        full = dtensor.gather_weights(module, self._keeps_full)
        return full if self._keeps_full else {}

    def optimizer_state_dict(self, optimizer: Any) -> dict[str, Any]:
        full = dtensor.gather(optimizer.state_dict(), self._keeps_full)
        return full if self._keeps_full else {}

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        of_each = {
            index: {key: _shard_like(value, held[index]) for key, value in values.items()}
            for index, values in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": of_each})

    def save_shards(self, folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> bool:
        if self.saves_shards:
            distributed_checkpoint.save(folder, models, optimizers, is_alone=not self.holds_shards)
        return self.saves_shards

    def shard_writer(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any], copy: Callable[[Any], Any]
    ) -> ShardWriter | None:
        if not self.saves_shards:
            return None
        if self.holds_shards and self._saving_group is None:
            self._saving_group = distributed_checkpoint.new_group()
        return distributed_checkpoint.CopiedShards(models, optimizers, copy, self._saving_group)

    def shard_files(self, folder: Path, rank: int) -> Sequence[Path]:
        return distributed_checkpoint.of_rank(folder, rank)

    def load_shards(self, folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> bool:
        if not distributed_checkpoint.are_in(folder):
            return False
        distributed_checkpoint.load(folder, models, optimizers, is_alone=not self.holds_shards)
        return True


def _shard_like(value: Any, parameter: torch.Tensor) -> Any:
    return dtensor.shard_like(value, parameter) if isinstance(value, torch.Tensor) else value
