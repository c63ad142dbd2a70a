"""The Accelerator in one process: settings, rejections, prepare, a training step."""

from __future__ import annotations

import copy
import inspect
import math
import os
import pickle
import sys
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator, context
from nblaunch.training.accumulation import AccumulationState
from nblaunch.training.data.samplers import SeedableRandomSampler
from nblaunch.training.models import Replacements
from nblaunch.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from nblaunch.training.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from nblaunch.training.parallelism import TorchTensorParallelPlugin
from nblaunch.training.precision import Fp16Precision
from nblaunch.training.state import AcceleratorState, DistributedType, GradientState, PartialState
from nblaunch.training.strategies import Strategy, StrategyPlugin, TrainingSetup


def _parts(rows: int = 8, batch_size: int = 2) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, Any]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(rows, 3)), batch_size=batch_size)
    return model, optimizer, loader, StepLR(optimizer, 1, gamma=0.5)


# --- settings --------------------------------------------------------------------------------------------------------


def test_unsupported_arguments_are_rejected_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"Accelerator\(megatron_lm_plugin='x'\) is not supported"):
        Accelerator(megatron_lm_plugin="x")
    with pytest.raises(NotImplementedError, match=r"Accelerator\(torch_tp_plugin=.*parallelism_config"):
        Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    Accelerator(megatron_lm_plugin=None, torch_tp_plugin=None)


def test_unknown_arguments_and_members() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'mixed_precison'"):
        Accelerator(mixed_precison="bf16")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = Accelerator().nothing


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mixed_precision": "fp32"}, ValueError,
         "mixed_precision='fp32' is unknown; valid values are 'no', 'fp16', 'bf16'"),
        ({"gradient_accumulation_steps": 0}, ValueError, "num_steps=0 must be at least 1"),
        ({"gradient_accumulation_steps": 1.5}, TypeError, "num_steps=1.5 must be a whole number"),
        ({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(3)}, ValueError,
         "gradient_accumulation_steps=2 and gradient_accumulation_plugin were both given"),
        ({"split_batches": True, "dataloader_config": DataLoaderConfiguration()}, ValueError, "set it in one place"),
        ({"rng_types": ["tpu"]}, ValueError,
         "rng_type='tpu' is unknown; valid values are 'generator', 'torch', 'cuda', 'xpu', 'xla'"),
        ({"kwargs_handlers": ["x"]}, ValueError, "not one of DistributedDataParallelKwargs, GradScalerKwargs"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, ValueError, "more than one AutocastKwargs"),
    ],
)  # fmt: skip
def test_invalid_settings_are_rejected(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Accelerator(**arguments)


def test_options_that_are_not_supported_are_rejected() -> None:
    with pytest.raises(ValueError, match="data_seed=-3 is negative"):
        DataLoaderConfiguration(data_seed=-3)


def test_changed_settings_apply_to_later_objects() -> None:
    accelerator = Accelerator()
    accelerator.dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    accelerator.rng_types = ["torch"]
    accelerator.device_placement = False
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4)), shuffle=True))
    assert accelerator.use_seedable_sampler
    assert isinstance(loader.sampler, SeedableRandomSampler)
    assert (loader.device, loader.rng_types) == (None, ("torch",))
    with pytest.raises(ValueError, match="rng_type"):
        accelerator.rng_types = ["dice"]
    accelerator.step_scheduler_with_optimizer = False
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = accelerator.prepare(StepLR(optimizer, 1, gamma=0.5))
    accelerator.sync_gradients = False
    optimizer.step()
    scheduler.step()  # separate from its optimizer, but whenever gradients sync
    assert scheduler.get_last_lr() == [0.5]


def test_fp8_labels_say_that_it_is_off() -> None:
    accelerator = Accelerator()
    recipes = ("fp8_recipe_handler", "ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler")
    assert [getattr(accelerator, name) for name in recipes] == [None] * 4
    in_use = ("fp8_enabled", "has_fp8_handler", "delayed_fp8_autocast", "has_lomo_optimizer")
    assert not any(getattr(accelerator, name) for name in in_use)


def test_handlers_pass_values_that_differ_from_defaults() -> None:
    assert DistributedDataParallelKwargs().to_kwargs() == {}
    assert DistributedDataParallelKwargs(bucket_cap_mb=1).to_kwargs() == {"bucket_cap_mb": 1}
    hooked = DistributedDataParallelKwargs(static_graph=True, comm_hook=DDPCommunicationHookType.FP16)
    assert hooked.to_kwargs() == {"static_graph": True}  # the form that DistributedDataParallel accepts


def test_mixed_precision_has_the_documented_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(**arguments: Any) -> str:
        PartialState._reset_state()
        return Accelerator(**arguments).mixed_precision

    assert built() == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert built() == "bf16"
    context.current().accelerator_defaults = {"mixed_precision": "no"}
    assert built() == "no"
    assert built(mixed_precision="bf16") == "bf16"


def test_accelerators_of_one_process_share_their_place() -> None:
    first = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    second = Accelerator(gradient_accumulation_steps=3)
    assert second.mixed_precision == "bf16"
    assert second.native_amp
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 3)
    assert copy.deepcopy(first) is first


def test_a_later_accelerator_may_compute_in_another_precision() -> None:
    first = Accelerator(mixed_precision="bf16")
    early = first.prepare(nn.Linear(2, 2))
    second = Accelerator(mixed_precision="no")
    late = second.prepare(nn.Linear(2, 2))
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    assert AcceleratorState().mixed_precision == Accelerator().mixed_precision == "no"
    inputs = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    for model, is_rounded in ((early, True), (late, False)):
        exact = nn.functional.linear(inputs, model.weight, model.bias)
        assert torch.equal(model(inputs), exact) is not is_rounded


def test_wrong_arguments_are_rejected_before_the_process_joins() -> None:
    with pytest.raises(ValueError, match="dynamo_backend='eager' and dynamo_plugin"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())
    assert context.current().training is None


class _Unbuildable(StrategyPlugin):
    name = "unbuildable"

    def build(self, setup: TrainingSetup) -> Strategy:
        raise ValueError(f"no strategy for {setup.precision.name}")


def test_failed_accelerators_set_no_precision() -> None:
    with pytest.raises(ValueError, match="no strategy for bf16"):
        Accelerator(mixed_precision="bf16", strategy=_Unbuildable())
    assert Accelerator().mixed_precision == "no"


def test_state_views() -> None:
    with pytest.raises(ValueError, match="needs an Accelerator"):
        AcceleratorState()
    partial = PartialState()
    assert (partial.num_processes, partial.process_index, partial.backend) == (1, 0, None)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    assert accelerator.distributed_type is DistributedType.NO
    assert accelerator.distributed_type == "NO"
    assert accelerator.state.mixed_precision == AcceleratorState().mixed_precision == "no"
    assert not accelerator.native_amp
    with pytest.raises(ValueError, match="mixed_precision='bf16', but the Accelerator"):
        AcceleratorState(mixed_precision="bf16")
    state = GradientState()
    assert "'num_steps': " in repr(state)
    assert state.plugin_kwargs["num_steps"] == state.num_steps == 4
    assert (state.sync_gradients, state.adjust_scheduler, state.sync_with_dataloader) == (True, True, True)
    assert (state.remainder, state.in_dataloader, state.dataloader_references) == (-1, False, [None])
    assert "Num processes: 1" in repr(accelerator)


def test_a_rank_without_a_rendezvous_is_an_error() -> None:
    context.install(context.ProcessContext(context.Topology(rank=1, local_rank=1, world_size=2, local_world_size=2),
                                          context.current().backend))  # fmt: skip
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 .*MASTER_PORT"):
        Accelerator()


# --- prepare ---------------------------------------------------------------------------------------------------------


def test_prepare_returns_its_arguments_in_order() -> None:
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = _parts()
    other = object()
    prepared = accelerator.prepare(scheduler, other, loader, None, optimizer, model)
    assert isinstance(prepared[0], AcceleratedScheduler)
    assert prepared[1] is other
    assert prepared[3] is None
    assert isinstance(prepared[4], AcceleratedOptimizer)
    assert prepared[4].optimizer is optimizer
    assert prepared[5] is model
    assert prepared[0].optimizers == [prepared[4]]
    again = accelerator.prepare(*prepared)
    assert all(one is other for one, other in zip(prepared, again, strict=True))
    assert accelerator._models == [model]
    assert accelerator._optimizers == [prepared[4]]
    assert accelerator._schedulers == [prepared[0]]
    assert accelerator._dataloaders == [prepared[2]]
    assert accelerator.prepare(model) is model


def test_a_loader_of_torch_xla_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class MpDeviceLoader:
        """A loader like torch_xla's, which wraps a DataLoader but is not one."""

    loaders = types.SimpleNamespace(MpDeviceLoader=MpDeviceLoader)
    monkeypatch.setitem(sys.modules, "torch_xla.distributed.parallel_loader", loaders)
    model, _, loader = _parts()[:3]
    with pytest.raises(ValueError, match="Pass the DataLoader"):
        Accelerator().prepare(model, MpDeviceLoader())
    Accelerator().prepare(model, loader)


def test_device_placement_is_per_object() -> None:
    accelerator = Accelerator()
    with pytest.raises(ValueError, match=r"device_placement has 1 .* 2 objects"):
        accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1), device_placement=[True])
    loader = accelerator.prepare(_parts()[2], device_placement=[False])
    assert loader.device is None


def test_unbound_schedulers_follow_all_optimizers() -> None:
    accelerator = Accelerator()
    _, _, _, scheduler = _parts()
    prepared = accelerator.prepare(_parts()[1], _parts()[1], scheduler)
    assert prepared[2].optimizers == list(prepared[:2])
    of_ones_own = types.SimpleNamespace(step=lambda: None)
    assert accelerator.prepare_scheduler(of_ones_own).optimizers == list(prepared[:2])


def test_free_memory_forgets_prepared_objects() -> None:
    accelerator = Accelerator()
    accelerator.prepare(*_parts())
    accelerator.step = 3
    assert accelerator.free_memory(1, 2) == [None, None]
    assert accelerator._models == accelerator._optimizers == accelerator._dataloaders == []
    assert accelerator.step == 0
    assert accelerator.clear() == []


# --- precision -------------------------------------------------------------------------------------------------------


class _Spy(nn.Module):
    """A model that records the dtype of its computations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.layer(x)
        self.seen = y.dtype
        return {"y": y, "rest": (1, None)}


def test_only_the_forward_runs_in_bf16() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    module = _Spy()
    model = accelerator.prepare(module)
    output = model(torch.ones(1, 3))
    assert module.seen is torch.bfloat16
    assert output["y"].dtype is torch.float32
    assert output["rest"] == (1, None)
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    assert accelerator.unwrap_model(model) is module
    assert hasattr(module, "_original_forward")
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is module
    assert "forward" not in vars(module)
    assert "_original_forward" not in vars(module)
    module(torch.ones(1, 3))
    assert module.seen is torch.float32


def test_bf16_forwards_keep_their_signature() -> None:
    module = _Spy()
    expected = inspect.signature(module.forward)
    model = Accelerator(mixed_precision="bf16").prepare(module)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert inspect.signature(one.forward) == expected
        assert one(torch.ones(1, 3))["y"].dtype is torch.float32


def test_a_copy_of_a_bf16_model_computes_with_its_own_weights() -> None:
    model = Accelerator(mixed_precision="bf16").prepare(nn.Linear(1, 1))
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for parameter in average.parameters():
            parameter.fill_(1.0)
    assert model(torch.ones(1, 1)).item() == 0
    assert average(torch.ones(1, 1)).item() == 2


def test_repeated_prepare_wraps_a_model_once() -> None:
    module = _Spy()
    Accelerator(mixed_precision="bf16").prepare(module)
    PartialState._reset_state()
    Accelerator(mixed_precision="bf16").prepare(module)
    assert module._original_forward.__func__ is _Spy.forward
    PartialState._reset_state()
    Accelerator(mixed_precision="no").prepare(module)
    module(torch.ones(1, 3))
    assert module.seen is torch.float32


def test_forwards_set_on_the_object_are_restored() -> None:
    module = nn.Linear(1, 1)
    own = vars(module)["forward"] = lambda x: x
    accelerator = Accelerator(mixed_precision="bf16")
    accelerator.unwrap_model(accelerator.prepare(module), keep_fp32_wrapper=False)
    assert module.forward is own


def test_unwrap_keeps_a_compiled_model_compiled() -> None:
    accelerator = Accelerator()
    module = nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert accelerator.unwrap_model(compiled) is compiled
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is module


def _fp16() -> tuple[Fp16Precision, nn.Parameter, torch.optim.Optimizer]:
    scaling = GradScalerKwargs(init_scale=8.0, growth_interval=100)
    precision = Fp16Precision(context.current().backend, {GradScalerKwargs: scaling})
    weight = nn.Parameter(torch.ones(2))
    return precision, weight, torch.optim.SGD([weight], lr=1.0)


def test_fp16_scales_and_unscales_once() -> None:
    precision, weight, optimizer = _fp16()
    precision.backward((weight * 3).sum(), {})
    assert weight.grad is not None
    assert weight.grad.tolist() == [24, 24]
    precision.unscale(optimizer)
    precision.unscale(optimizer)
    assert weight.grad.tolist() == [3, 3]
    assert precision.step(optimizer) is False
    assert weight.tolist() == [-2, -2]


class _Around(torch.optim.Optimizer):
    """An optimizer that wraps another one without calling its base constructor, like timm's ``Lookahead``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state: Any = {}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("wrap", [lambda inner: inner, _Around])
def test_an_overflow_skips_optimizer_and_scheduler(wrap: Any) -> None:
    precision, weight, inner = _fp16()
    inner = wrap(inner)
    optimizer = AcceleratedOptimizer(inner, AccumulationState(), precision, context.current().backend)
    scheduler = AcceleratedScheduler(StepLR(inner, 1, gamma=0.5), [optimizer], AccumulationState())
    step_of_scheduler = inner.step
    precision.backward((weight * math.inf).sum(), {})
    optimizer.step()
    scheduler.step()
    assert optimizer.step_was_skipped
    assert weight.tolist() == [1, 1]
    assert scheduler.get_last_lr() == [1.0]
    optimizer.zero_grad()
    precision.backward(weight.sum(), {})
    optimizer.step()
    scheduler.step()
    assert not optimizer.step_was_skipped
    assert scheduler.get_last_lr() == [0.5]
    assert inner.step is step_of_scheduler


# --- accumulation, optimizer, scheduler ------------------------------------------------------------------------------


def _steps(accelerator: Accelerator, batches: int, epochs: int = 1) -> list[bool]:
    model, optimizer, loader, scheduler = accelerator.prepare(*_parts(rows=2 * batches))
    synced = []
    for _ in range(epochs):
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                before = model.weight.clone()
                accelerator.backward(model(inputs).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                synced.append(accelerator.sync_gradients)
                assert synced[-1] == (not torch.equal(before, model.weight))
                assert synced[-1] == (model.weight.grad is None)
    assert scheduler.get_last_lr()[0] == pytest.approx(0.1 * 0.5 ** sum(synced))
    return synced


def test_a_window_ends_after_its_steps_and_with_the_loader() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    assert _steps(accelerator, 5, epochs=2) == [False, False, True, False, True] * 2


def test_windows_can_span_epochs() -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    assert _steps(Accelerator(gradient_accumulation_plugin=plugin), 4, epochs=2) == [
        False, False, True, False, False, True, False, False
    ]  # fmt: skip


def test_the_number_of_steps_can_change() -> None:
    accelerator = Accelerator()
    accelerator.gradient_accumulation_steps = 2
    assert GradientState().num_steps == 2
    with pytest.raises(ValueError, match="num_steps=0"):
        accelerator.gradient_accumulation_steps = 0
    accelerator.sync_gradients = False
    assert not GradientState().sync_gradients


def test_the_loss_is_divided_by_the_window() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    weight = nn.Parameter(torch.ones(1))
    accelerator.backward((weight * 8).sum())
    assert weight.grad is not None
    assert weight.grad.item() == 2
    loss = (weight * 8).sum()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    assert weight.grad.item() == 6


def test_the_loss_is_shown_at_most_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    now, shown = [100.0], []
    monkeypatch.setattr("nblaunch.progress.board_reports.monotonic", lambda: now[0])
    slot = context.current().slot
    monkeypatch.setattr(slot, "set_loss", shown.append)
    weight = nn.Parameter(torch.ones(1))
    for step in range(11):
        now[0] = 100.0 + step * 0.125
        accelerator.backward((weight * step).sum())
    assert shown == [0.0, 4.0, 8.0]
    accelerator.backward((weight * torch.ones(2)), gradient=torch.ones(2))


def test_gradients_are_clipped() -> None:
    accelerator = Accelerator()
    weight = nn.Parameter(torch.ones(2))
    (weight * torch.tensor([3.0, 4.0])).sum().backward()
    assert accelerator.clip_grad_norm_((p for p in [weight]), 1.0).item() == pytest.approx(5)
    assert weight.grad is not None
    assert weight.grad.norm().item() == pytest.approx(1, abs=1e-5)
    accelerator.clip_grad_value_([weight], 0.1)
    assert weight.grad.max().item() == pytest.approx(0.1)


def test_a_prepared_optimizer_is_an_optimizer() -> None:
    accelerator = Accelerator()
    model, inner, _, _ = _parts()
    optimizer = accelerator.prepare(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.defaults is inner.defaults
    assert optimizer.state is inner.state
    assert optimizer.state_dict() == inner.state_dict()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    optimizer.load_state_dict(optimizer.state_dict())
    calls = []
    handle = optimizer.register_step_post_hook(lambda *args: calls.append(1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    handle.remove()
    assert calls == [1]
    assert optimizer.step(lambda: None) is None
    optimizer.train()
    optimizer.eval()
    scheduler = accelerator.prepare(StepLR(optimizer, 1))
    assert scheduler.optimizers == [optimizer]
    assert not accelerator.optimizer_step_was_skipped


class _Clearing(torch.optim.SGD):
    """An optimizer whose ``zero_grad`` has no argument, like Apex's fused optimizers."""

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


@pytest.mark.parametrize("kind", [torch.optim.SGD, _Clearing])
def test_gradients_become_none_by_default(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = Accelerator().prepare(kind([weight], lr=1.0))
    for chosen in ((), (True,), (False,)) if kind is torch.optim.SGD else ((),):
        weight.sum().backward()
        optimizer.zero_grad(*chosen)
        assert (weight.grad is None) == (chosen != (False,))


def test_wrappers_have_accelerates_attributes() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3, device_placement=False, split_batches=True)
    _, inner, _, schedule = _parts()
    optimizer, scheduler = accelerator.prepare(inner, schedule)
    assert optimizer.gradient_state.num_steps == scheduler.gradient_state.num_steps == 3
    assert optimizer.accelerator_state.mixed_precision == "no"
    assert not optimizer.device_placement
    assert optimizer.scaler is None
    assert scheduler.split_batches
    assert scheduler.step_with_optimizer
    optimizer.step()
    scheduler.step_with_optimizer = False
    scheduler.gradient_state.sync_gradients = False
    scheduler.step()
    assert scheduler.last_epoch == 1, "an assigned setting counts"


def test_gradients_that_the_user_reduced_are_not_reduced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    optimizer = accelerator.prepare(_sgd())
    reduced: list[Any] = []
    backend = type(context.current().backend)
    monkeypatch.setattr(backend, "reduces_gradients_at_step", True)
    monkeypatch.setattr(backend, "reduce_gradients", lambda backend, one: reduced.append(one))
    accelerator.gradient_state.is_xla_gradients_synced = True
    assert GradientState().is_xla_gradients_synced
    optimizer.step()
    assert not reduced
    assert not accelerator.gradient_state.is_xla_gradients_synced
    optimizer.step()
    assert reduced == [optimizer.optimizer]


class _Lomo(torch.optim.Optimizer):
    """An optimizer that steps only in backward, like those of ``lomo_optim``."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        loss.backward()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= lr * parameter.grad
                parameter.grad = None


def test_lomo_optimizers_step_in_backward() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="none was prepared"):
        accelerator.lomo_backward(weight.sum(), 0.5)
    assert not accelerator.has_lomo_optimizer
    optimizer = accelerator.prepare(_Lomo([weight]))
    assert accelerator.has_lomo_optimizer
    with pytest.raises(ValueError, match="learning rate"):
        accelerator.lomo_backward(weight.sum(), None)  # type: ignore[arg-type]
    accelerator.lomo_backward(weight.sum(), 0.5)
    assert weight.item() == -0.5
    accelerator.backward(weight.sum(), learning_rate=1.0)
    assert weight.item() == -1.0, "the loss is divided by the micro-steps of the window"
    optimizer.step()
    optimizer.zero_grad()
    assert weight.item() == -1.0, "it has stepped already"


def test_loaders_need_no_adapter_for_sequences() -> None:
    model, _, loader, _ = _parts()
    assert Accelerator().deepspeed_ulysses_dl_adapter(loader, model) is loader


def _scheduler(inner: Any, num_ranks: int = 4, **options: Any) -> AcceleratedScheduler:
    return AcceleratedScheduler(inner, [], AccumulationState(), num_ranks, **options)


def _sgd() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer.zero_grad()
    return optimizer


def test_a_scheduler_takes_one_step_per_process() -> None:
    optimizer = _sgd()
    scheduler = _scheduler(LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [1 / 5]
    state = scheduler.state_dict()
    scheduler.step()
    scheduler.load_state_dict(state)
    assert scheduler.last_epoch == 4


def test_a_scheduler_stops_at_its_total() -> None:
    optimizer = _sgd()
    inner = OneCycleLR(optimizer, max_lr=1.0, total_steps=6)
    scheduler = _scheduler(inner)
    optimizer.step()
    for _ in range(3):
        scheduler.step()
    assert inner.last_epoch == 6


def test_a_scheduler_on_its_own_steps_once_per_call() -> None:
    optimizer = _sgd()
    accumulation = AccumulationState()
    accumulation.sync_gradients = False
    inner = StepLR(optimizer, 1)
    scheduler = AcceleratedScheduler(inner, [], accumulation, 4, step_with_optimizer=False)
    optimizer.step()
    scheduler.step()
    assert inner.last_epoch == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda sgd: SequentialLR(sgd, [StepLR(sgd, 1), StepLR(sgd, 2)], [3]),
        lambda sgd: ChainedScheduler([StepLR(sgd, 1), StepLR(sgd, 2)]),
        ReduceLROnPlateau,
    ],
)
def test_epoch_schedulers_wait_for_the_windows_end(make: Any) -> None:
    inner = make(_sgd())
    accumulation = AccumulationState()
    scheduler = AcceleratedScheduler(inner, [], accumulation)
    steps = []
    inner.step = lambda: steps.append(accumulation.sync_gradients)
    for accumulation.sync_gradients in (False, True):
        scheduler.step()
    assert steps == [True]


def test_plateau_schedulers_step_once_per_metric() -> None:
    inner = ReduceLROnPlateau(_sgd(), patience=1)
    scheduler = _scheduler(inner)
    for _ in range(2):
        scheduler.step(1.0)
    assert inner.num_bad_epochs == 1


# --- one process among one -------------------------------------------------------------------------------------------


def test_collectives_of_a_single_process_return_their_argument() -> None:
    accelerator = Accelerator()
    data = {"x": torch.ones(2)}
    assert accelerator.gather(data) is data
    reduced = accelerator.reduce(data)
    data["x"].add_(1)
    assert reduced["x"].tolist() == [1, 1]
    data["x"].sub_(1)
    assert accelerator.reduce(data, scale=2.0)["x"].tolist() == [2, 2]
    assert accelerator.pad_across_processes(data) is data
    assert accelerator.broadcast(data) is data
    assert accelerator.gather_object(["a"]) == ["a"]
    assert accelerator.gather_for_metrics(["a"]) == ["a"]
    with pytest.raises(ValueError, match=r"reduction='avg'.*'sum', 'mean', 'max', 'min'"):
        accelerator.reduce(data, "avg")
    with pytest.raises(ValueError, match=r"from_process=1 .*0 to 0"):
        accelerator.broadcast(data, 1)
    with accelerator.no_sync(nn.Linear(1, 1)):
        accelerator.wait_for_everyone()


def test_process_helpers_in_a_lone_process(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator()

    def answer(value: int) -> int:
        """Return twice the number."""
        return 2 * value

    for decorate in (
        accelerator.on_main_process,
        accelerator.on_local_main_process,
        accelerator.on_last_process,
        accelerator.on_process(process_index=0),
        accelerator.on_local_process(local_process_index=0),
    ):
        decorated = decorate(answer)
        assert decorated(4) == 8
        assert decorated.__doc__ == "Return twice the number."
    assert accelerator.on_process(answer, process_index=0)(1) == 2
    # a single process runs the functions of all ranks
    assert accelerator.on_process(process_index=3)(answer)(1) == 2
    assert accelerator.on_local_process(answer, 3)(1) == 2
    with pytest.raises(ValueError, match="process_index=None"):
        accelerator.on_process(answer)
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        accelerator.print("once")
    assert capsys.readouterr().out == "once\n"
    with accelerator.split_between_processes([1, 2]) as share:
        assert share == [1, 2]
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert (accelerator.process_index, accelerator.local_process_index, accelerator.num_processes) == (
        0,
        0,
        1,
    )
    assert not accelerator.use_distributed
    accelerator.end_training()


def test_late_timeouts_are_reported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.warns(UserWarning, match="process group"):
            accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=9))])
        assert accelerator.state.backend == "gloo"
        assert accelerator.prepare(nn.Linear(1, 1)).__class__ is nn.Linear
        accelerator.wait_for_everyone()
        accelerator.end_training()
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_nothing_is_written_to_the_environment() -> None:
    before = dict(os.environ)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    accelerator.prepare(*_parts())
    assert dict(os.environ) == before


def test_replacements_lead_to_the_newest_parameter() -> None:
    replacements = Replacements()
    old, last = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    between = nn.Parameter(torch.zeros(1))
    replacements.add(old, between)
    replacements.add(between, last)
    del between
    assert replacements.get(old) is last
    del last
    assert replacements.get(old) is old
