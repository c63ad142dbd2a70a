"""The interface for plug-in strategies: a toy strategy in this file trains, gathers, saves and loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator
from nblaunch.backends.base import Backend
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.options import GradientAccumulationPlugin
from nblaunch.training.strategies import Strategy, StrategyPlugin, TrainingSetup
from tests.kernels import Kernel

STEPS = 2
EPOCHS = 2


class ToyStrategy(Strategy):
    """Averages each gradient as soon as backward has computed it; each rank saves every second tensor."""

    name = "toy"
    holds_shards = True

    def __init__(self, process: JoinedProcess) -> None:
        self._process = process
        self._is_synced = True

    def setup_module(self, model: nn.Module, process: JoinedProcess) -> nn.Module:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
            parameter.register_post_accumulate_grad_hook(self._average)
        return model

    def _average(self, parameter: torch.Tensor) -> None:
        if self._is_synced:
            dist.all_reduce(parameter.grad)
            assert parameter.grad is not None
            parameter.grad /= self._process.topology.world_size

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self._is_synced = False
        yield
        self._is_synced = True

    def save_shards(self, folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> bool:
        rank, world_size = self._process.topology.rank, self._process.topology.world_size
        parts = [list(model.state_dict().items())[rank::world_size] for model in models]
        torch.save((parts, [one.state_dict() for one in optimizers]), folder / f"toy_{rank}.pt")
        return True

    def load_shards(self, folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> bool:
        for path in sorted(folder.glob("toy_*.pt")):
            parts, states = torch.load(path, weights_only=True)
            for model, part in zip(models, parts, strict=True):
                model.load_state_dict(dict(part), strict=False)
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        return True


class ToyPlugin(StrategyPlugin):
    """Resolves precision and accumulation, and builds the strategy."""

    name = "toy"

    def precision_name(self, asked: str | None, backend: Backend) -> str | None:
        return asked or "bf16"

    def accumulation_settings(self, asked: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        return GradientAccumulationPlugin(num_steps=STEPS)

    def build(self, setup: TrainingSetup) -> Strategy:
        assert setup.precision.name == "bf16"
        assert setup.accumulation.num_steps == STEPS
        return ToyStrategy(setup.process)


def _prepare(accelerator: Accelerator) -> Any:
    torch.manual_seed(accelerator.process_index)  # ranks begin with different weights
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=3)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05), loader)


def _epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> list[float]:
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses += accelerator.gather(loss.detach()).tolist()
    return losses


def train(is_toy: bool, folder: str) -> dict[str, Any]:
    """Train for some epochs, and save a checkpoint in ``folder`` after the first."""
    accelerator = (
        Accelerator(strategy=ToyPlugin())
        if is_toy
        else Accelerator(mixed_precision="bf16", gradient_accumulation_steps=STEPS)
    )
    prepared = _prepare(accelerator)
    losses = [_epoch(accelerator, *prepared)]
    accelerator.save_state(folder)
    losses += [_epoch(accelerator, *prepared) for _ in range(EPOCHS - 1)]
    return {
        "losses": losses,
        "weights": {name: value.tolist() for name, value in accelerator.get_state_dict(prepared[0]).items()},
        "label": accelerator.distributed_type.value,
        "precision": accelerator.mixed_precision,
        "steps": accelerator.gradient_accumulation_steps,
    }


def resume(folder: str) -> list[list[float]]:
    """Continue from the checkpoint."""
    accelerator = Accelerator(strategy=ToyPlugin())
    prepared = _prepare(accelerator)
    accelerator.load_state(folder)
    return [_epoch(accelerator, *prepared) for _ in range(EPOCHS - 1)]


CELL = """
from nblaunch import notebook_launcher
from tests.contracts import test_strategy as toy

def launch(function, *args):
    return notebook_launcher(function, args, 2, backend="cpu", dashboard="none", return_all=True)
"""


def test_a_custom_strategy_trains_saves_and_loads(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(CELL)
    ours, other = kernel.run(f"launch(toy.train, True, {str(tmp_path / 'toy')!r})").value
    usual, _ = kernel.run(f"launch(toy.train, False, {str(tmp_path / 'ddp')!r})").value
    assert {path.name for path in (tmp_path / "toy").glob("toy_*")} == {"toy_0.pt", "toy_1.pt"}
    assert ours == other
    assert (ours["precision"], ours["steps"], ours["label"]) == ("bf16", STEPS, "MULTI_CPU")
    assert sum(ours["losses"][-1]) < sum(ours["losses"][0])
    # DistributedDataParallel averages the same gradients.
    assert ours == usual
    assert kernel.run(f"launch(toy.resume, {str(tmp_path / 'toy')!r})").value == [ours["losses"][1:]] * 2


class WholePlugin(StrategyPlugin):
    """Builds a strategy with only the required methods."""

    name = "whole"

    def build(self, setup: TrainingSetup) -> Strategy:
        @dataclass  # with an ``__eq__``, so that it is not hashable
        class Whole(Strategy):
            name = "whole"
            unjoined = "in this toy"

            def setup_module(self, model: nn.Module, process: JoinedProcess) -> nn.Module:
                return model

        return Whole()


def test_missing_strategy_features_do_nothing_or_raise() -> None:
    accelerator = Accelerator(strategy=WholePlugin())
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.tolist() == [[1.0]]
    with (
        pytest.warns(
            UserWarning, match="join_uneven_inputs has no effect in this toy, because all ranks"
        ) as caught,
        accelerator.join_uneven_inputs([model]),
    ):
        pass
    assert [one.filename for one in caught] == [__file__]


def test_non_plugins_are_rejected_with_advice() -> None:
    with pytest.raises(ValueError, match=r"strategy=<class .*ToyPlugin'> is unknown.*strategy=plugin"):
        Accelerator(strategy=ToyPlugin)  # type: ignore[arg-type]
