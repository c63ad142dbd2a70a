"""The state of optimizers comes back into the notebook's optimizers, on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nblaunch import Accelerator, FullyShardedDataParallelPlugin, notebook_launcher
from tests.thorough import thorough

pytestmark = pytest.mark.usefixtures("first_store")


def _built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _train(model: Any, held: dict[str, Any], num_steps: int, is_sharded: bool = False) -> list[float]:
    plugin = FullyShardedDataParallelPlugin() if is_sharded else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, held["optimizer"])
    losses = []
    for _ in range(num_steps):
        loss = model(torch.arange(8.0).reshape(2, 4) + accelerator.process_index).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    return losses


def _rates(
    model: Any, optimizer: Any, schedulers: Any, num_steps: int, is_sharded: bool = False
) -> list[float]:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin() if is_sharded else None)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedulers["main"])
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return rates


def _launch(model: nn.Module, optimizer: Any, num_steps: int, **settings: Any) -> Any:
    settings = {"sync_optimizers": True, **settings}
    args = (model, {"optimizer": optimizer}, num_steps)
    return notebook_launcher(_train, args, num_processes=2, backend="cpu", **settings)


@pytest.mark.parametrize("start_method", ["fork", thorough("forkserver")])
def test_a_second_launch_continues_the_first(start_method: str) -> None:
    model, optimizer = _built()
    parts = [_launch(model, optimizer, steps, start_method=start_method) for steps in (3, 2)]
    states = optimizer.state_dict()
    assert {float(one["step"]) for one in states["state"].values()} == {5.0}
    assert states["param_groups"][0]["lr"] == 0.025
    other, own = _built()
    whole = [_launch(other, own, 3)]
    assert parts[0] == pytest.approx(whole[0])
    # Without the state, the next steps differ.
    fresh = torch.optim.AdamW(other.parameters(), lr=0.05)
    assert parts[1] != pytest.approx(_launch(other, fresh, 2), rel=1e-3)


# torch warns about each unpickled scheduler, because its optimizer lacks the mark of a scheduler.
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")
@pytest.mark.parametrize("start_method", ["fork", thorough("forkserver")])
def test_schedulers_continue_with_their_optimizers(start_method: str) -> None:
    model, optimizer = _built()
    held = {"main": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)}
    rates = []
    for _ in range(2):
        args = (model, optimizer, held, 3)
        rates += notebook_launcher(
            _rates, args, num_processes=1, backend="cpu", start_method=start_method, sync_optimizers=True
        )
    own = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(own, T_max=4)
    expected = []
    for _ in range(6):
        expected.append(own.param_groups[0]["lr"])
        own.step()
        scheduler.step()
    assert rates == pytest.approx(expected)
    assert held["main"].last_epoch == 6
    assert held["main"].optimizer is optimizer


def test_schedulers_stay_with_unchanged_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = _built()
    held = {"main": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)}
    args = (model, optimizer, held, 1, True)
    notebook_launcher(_rates, args, num_processes=2, backend="cpu", sync_optimizers=True)
    assert held["main"].last_epoch == 0
    assert (
        "the state of the scheduler args[2]['main'] (CosineAnnealingLR) was not copied back"
        in capsys.readouterr().err
    )


def test_states_return_only_on_request_and_a_note_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = _built()
    _launch(model, optimizer, 1, sync_optimizers=False)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    shown = capsys.readouterr().err
    assert "args[1]['optimizer'] (AdamW)" in shown
    assert "sync_optimizers=True" in shown


def _step(model: Any, optimizer: Any) -> None:
    model, optimizer = Accelerator().prepare(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_an_optimizer_whose_state_is_the_same_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = _built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    notebook_launcher(_step, (model, optimizer), num_processes=2, backend="cpu")
    shown = capsys.readouterr().err
    assert "trained weights" in shown
    assert "SGD" not in shown


def test_sharded_states_do_not_come_back_and_a_note_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = _built()
    notebook_launcher(
        _train,
        (model, {"optimizer": optimizer}, 1, True),
        num_processes=2,
        backend="cpu",
        sync_optimizers=True,
    )
    assert not optimizer.state
    out = capsys.readouterr().err
    assert "the state of the optimizer args[1]['optimizer'] (AdamW) was not copied back" in out
    assert "save_state" in out


def test_unreturnable_states_are_rejected_before_start() -> None:
    model, _ = _built()
    with pytest.raises(ValueError, match="there is no optimizer in args"):
        notebook_launcher(_train, (model, {}, 1), num_processes=2, backend="cpu", sync_optimizers=True)
    with pytest.raises(TypeError, match="sync_optimizers"):
        notebook_launcher(_train, (model, {}, 1), sync_optimizers="yes")  # type: ignore[arg-type]
