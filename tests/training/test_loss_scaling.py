"""fp16 with several optimizers, clipping and accumulation equals training without scaling, because the scale is a
power of two.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import nblaunch
from nblaunch import Accelerator, context
from nblaunch.training.options import AutocastKwargs, GradScalerKwargs
from tests.training import ranks

Loop = Callable[..., None]


def _train_on_the_cpu(package: Any) -> tuple[list[Any], torch.Tensor, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = package.Accelerator(cpu=True, mixed_precision="fp16")
    model = _layer(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in _batches():
        outputs = model(x)
        accelerator.backward(outputs.square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    facts = [accelerator.mixed_precision, accelerator.scaler, accelerator.native_amp, outputs.dtype]
    weight = accelerator.unwrap_model(model).weight.detach()
    return facts, weight, [str(one.message) for one in caught if "fp16" in str(one.message)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fp16_on_a_cpu_is_full_precision_as_with_accelerate(num_ranks: int) -> None:
    found = ranks.run(_train_on_the_cpu, num_ranks, nblaunch)
    expected = ranks.run(_train_on_the_cpu, num_ranks, accelerate)
    for (facts, weight, _), (reference_facts, reference_weight, _) in zip(found, expected, strict=True):
        assert facts == reference_facts == ["fp16", None, False, torch.float32]
        torch.testing.assert_close(weight, reference_weight)
    messages = [one for _, _, one in found]
    assert "full precision" in messages[0][0]
    assert [len(one) for one in messages] == [1, 0][:num_ranks], "one line for the job"


@pytest.fixture(autouse=True)
def scaler_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(context.current().backend), "precision_problem", lambda self, precision: None)


def _accelerator(precision: str, **scaling: Any) -> Accelerator:
    """Return an Accelerator with the scaling of fp16 but not its rounding, so that results equal full precision's."""
    handlers = [AutocastKwargs(enabled=False), GradScalerKwargs(**scaling)]
    return Accelerator(mixed_precision=precision, kwargs_handlers=handlers)


def _layer(seed: int) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(3, 3)


def _batches() -> torch.Tensor:
    return torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(3))


def _adversaries(accelerator: Any, norms: list[float], clear_first: bool) -> list[nn.Linear]:
    """Train a discriminator, then a generator through it: each is clipped and steps separately."""
    first, second = _layer(0), _layer(1)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (first, second)]
    prepared = accelerator.prepare(first, second, *optimizers)
    for batch in _batches():
        for module, optimizer in ((prepared[0], prepared[2]), (prepared[1], prepared[3])):
            if clear_first:
                optimizer.zero_grad()
            loss = (prepared[0](prepared[1](batch)) - batch).pow(2).mean()
            accelerator.backward(loss if module is prepared[0] else -loss)
            norms.append(float(accelerator.clip_grad_norm_(module.parameters(), 0.5)))
            optimizer.step()
            if not clear_first:
                prepared[2].zero_grad()
                prepared[3].zero_grad()
    return [first, second]


def _two_of_one_model(accelerator: Any, norms: list[float], clip_all: bool) -> list[nn.Linear]:
    """Train matrices with one optimizer and the rest with another, like Muon and AdamW: one backward, two steps."""
    module = _layer(0)
    optimizers = [torch.optim.SGD([parameter], lr=0.5) for parameter in (module.weight, module.bias)]
    model, *optimizers = accelerator.prepare(module, *optimizers)
    for batch in _batches():
        accelerator.backward((model(batch) - batch).pow(2).mean())
        if clip_all:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [module]


def _losses_before_steps(accelerator: Any, norms: list[float], clear_first: bool) -> list[nn.Linear]:
    """Run backward and clipping for two models, and only then their steps."""
    modules = [_layer(0), _layer(1)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in modules]
    models, optimizers = accelerator.prepare(*modules), accelerator.prepare(*optimizers)
    for batch in _batches():
        for model in models:
            accelerator.backward((model(batch) - batch).pow(2).mean())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=clear_first)
    return modules


@pytest.mark.parametrize("loop", [_adversaries, _two_of_one_model, _losses_before_steps])
@pytest.mark.parametrize("variant", [True, False])
def test_several_optimizers_step_as_without_scaling(loop: Loop, variant: bool) -> None:
    expected_norms: list[float] = []
    expected = loop(_accelerator("no"), expected_norms, variant)
    norms: list[float] = []
    # The scale grows after every step, so it would differ between the optimizers of a round unless it is kept.
    accelerator = _accelerator("fp16", init_scale=1024.0, growth_interval=1)
    modules = loop(accelerator, norms, variant)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    for module, plain in zip(modules, expected, strict=True):
        torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() > 1024


def test_the_scale_is_updated_once_all_have_stepped() -> None:
    accelerator = _accelerator("fp16", init_scale=8.0, growth_interval=1)
    _two_of_one_model(accelerator, [], True)
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 8.0 * 2 ** len(_batches())


def test_manually_skipped_steps_do_not_mix_gradients() -> None:
    accelerator = _accelerator("fp16", init_scale=8.0)
    module = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    norms = []
    for factor in (1e6, 2.0, 3.0):
        accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
        if norms[-1] < 1e3:
            optimizer.step()
        optimizer.zero_grad()
    assert norms == [1e6, 2, 3]


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_at_a_micro_step_is_rejected(name: str) -> None:
    accelerator = _accelerator("fp16")
    accelerator.gradient_accumulation_steps = 2
    module = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        getattr(accelerator, name)(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with (
        accelerator.accumulate(model),
        pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called .*sync_gradients"),
    ):
        accelerator.backward(model(torch.ones(1, 1)).sum())


def test_backward_after_clipping_without_a_step_is_rejected() -> None:
    accelerator = _accelerator("fp16")
    module = nn.Linear(1, 1)
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in module.parameters()]
    model, first, second = accelerator.prepare(module, *optimizers)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    first.step()
    with pytest.raises(RuntimeError, match="has not stepped since"):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    second.zero_grad()
    accelerator.backward(model(torch.ones(1, 1)).sum())


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_overflows_is_skipped_and_so_is_its_schedule(fused: bool) -> None:
    """Fused optimizers skip it on the device. The expected result is plain AdamW over the batches that do not
    overflow.
    """
    factors = (1.0, float("inf"), 2.0, float("inf"), 3.0)
    accelerator = _accelerator("fp16", init_scale=1024.0)
    expected, module = _layer(0), _layer(0)
    plain, plain_schedule = _adamw_with_schedule(expected, fused=False)
    model, optimizer, schedule = accelerator.prepare(module, *_adamw_with_schedule(module, fused))
    for factor in factors:
        accelerator.backward(model(_batches()[0]).square().sum() * factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if factor < float("inf"):
            (expected(_batches()[0]).square().sum() * factor).backward()
            plain.step()
            plain_schedule.step()
            plain.zero_grad()
        assert optimizer.step_was_skipped is (factor == float("inf"))
        assert accelerator.optimizer_step_was_skipped is (factor == float("inf"))
        assert schedule.get_last_lr() == plain_schedule.get_last_lr()
        torch.testing.assert_close(module.state_dict(), expected.state_dict())


@pytest.mark.parametrize("fused", [False, True])
def test_an_average_of_weights_leaves_out_steps_that_overflow(fused: bool) -> None:
    """Expected: the average over the steps that were taken, in double precision."""
    factors = (1.0, float("inf"), 2.0, 3.0, float("inf"), 0.5)
    accelerator = _accelerator("fp16", init_scale=1024.0)
    accelerator.gradient_accumulation_steps = 2
    module, expected = _layer(0), _layer(0).double()
    plain, _ = _adamw_with_schedule(expected, fused=False)
    model, optimizer = accelerator.prepare(module, _adamw_with_schedule(module, fused)[0])
    average, mean = (swa_utils.AveragedModel(one, use_buffers=True) for one in (module, expected))
    for factor in factors:
        for number in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(_batches()[number]).square().sum() * factor)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                average.update_parameters(module)
        if factor < float("inf"):
            sum(expected(one.double()).square().sum() * factor / 2 for one in _batches()[:2]).backward()
            plain.step()
            plain.zero_grad()
            mean.update_parameters(expected)
    assert average.n_averaged == mean.n_averaged == 4
    found, wanted = average.module.double().state_dict(), mean.module.state_dict()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _adamw_with_schedule(module: nn.Module, fused: bool) -> tuple[torch.optim.AdamW, Any]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def test_a_model_in_fp16_is_copied_and_pickled_without_its_optimizer() -> None:
    module = _layer(0)
    model, optimizer = _accelerator("fp16").prepare(module, torch.optim.SGD(module.parameters(), lr=0.5))
    pickled = pickle.dumps(model)
    assert b"SGD" not in pickled
    for other in (copy.deepcopy(model), pickle.loads(pickled)):
        assert torch.equal(other(_batches()[0]), model(_batches()[0]))
    assert not optimizer.step_was_skipped


def _overflow() -> None:
    accelerator = _accelerator("fp16")
    model = _layer(1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(16):
        accelerator.backward(model(torch.ones(1, 3)).sum() * float("inf"))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("unwatched")
def test_a_collapsing_scale_is_reported() -> None:
    with pytest.warns(UserWarning, match="loss_scale_collapsed") as caught:
        _overflow()
    assert len(caught) == 1


def _clipped_with_torch(unscale: Callable[[Accelerator, Any], object], overflows: bool = False) -> None:
    accelerator = _accelerator("fp16")
    module = _layer(1)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), 0.1))
    for batch in _batches():
        accelerator.backward(model(batch).square().mean() * (float("inf") if overflows else 1.0))
        unscale(accelerator, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # only measures
        optimizer.zero_grad()


@pytest.mark.usefixtures("unwatched")
def test_clipping_of_scaled_gradients_by_torch_is_reported() -> None:
    with pytest.warns(UserWarning, match="clipping_scaled_gradients") as caught:
        _clipped_with_torch(lambda accelerator, optimizer: None)
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize(
    "unscale",
    [
        lambda accelerator, optimizer: accelerator.unscale_gradients(),
        lambda accelerator, optimizer: accelerator.scaler.unscale_(optimizer.optimizer),
        lambda accelerator, optimizer: accelerator.clip_grad_norm_(optimizer.param_groups[0]["params"], 9.0),
    ],
    ids=["by the Accelerator", "by the scaler", "by clipping"],
)
def test_unscaled_gradients_may_be_clipped_by_torch(
    unscale: Callable[[Accelerator, Any], object], overflows: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _clipped_with_torch(unscale, overflows)
