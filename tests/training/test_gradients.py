"""Gradients over ranks and micro-steps: uneven data, short windows, triggers, hooks, local steps, compiled models."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nblaunch import Accelerator, GradientState, context
from nblaunch.config.settings import COMPILERS
from nblaunch.training.options import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from nblaunch.training.precision import Fp16Precision
from nblaunch.training.utilities.local_sgd import LocalSGD
from tests.training import ranks


def _data(count: int) -> TensorDataset:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, inputs.prod(dim=1, keepdim=True))


def _model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


# --- tails -----------------------------------------------------------------------------------------------------------


def _train_tail(world_batch: int, rows: int, num_models: int = 1) -> list[torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=4, split_batches=True)
    modules = [_model() for _ in range(num_models)]
    models = [accelerator.prepare(module) for module in modules]
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.3)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(_data(rows), batch_size=world_batch))
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(*models):
                for model in models:
                    accelerator.backward((model(inputs) - targets).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach() for module in modules for p in module.parameters()]


def _train_whole(batch: int, rows: int, window: int) -> list[torch.Tensor]:
    """Train with plain PyTorch: one step per window, even if it is short, with losses divided by its length."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    inputs, targets = _data(rows).tensors
    for _ in range(2):
        for start in range(0, rows, batch * window):
            for first in range(start, min(start + batch * window, rows), batch):
                part = slice(first, first + batch)
                ((model(inputs[part]) - targets[part]).pow(2).mean() / window).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def _train_tails(rows: Sequence[int], num_models: int) -> list[list[torch.Tensor]]:
    return [_train_tail(2, count, num_models) for count in rows]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_models", [1, 2])
def test_the_end_of_a_loader_closes_a_partial_window(world_size: int, num_models: int) -> None:
    rows = [2 * batches for batches in (8, 9, 10, 11, 2)]
    expected = [_train_whole(2, count, 4) * num_models for count in rows]
    for weights in ranks.run(_train_tails, world_size, rows, num_models):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


# --- several Accelerators --------------------------------------------------------------------------------------------


def _learner(num_steps: int) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=num_steps)
    module = _model()
    return accelerator, *accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))


def _micro_step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> bool:
    """Run a micro-step; return whether the weights changed."""
    before = model[0].weight.clone()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return not torch.equal(before, model[0].weight)


def test_each_accelerator_has_its_own_window() -> None:
    first, second = _learner(2), _learner(3)
    moved = [(_micro_step(*first), _micro_step(*second)) for _ in range(6)]
    assert [step for step, _ in moved] == [False, True] * 3
    assert [step for _, step in moved] == [False, False, True] * 2
    assert first[0].gradient_state.num_steps == 2
    assert GradientState().num_steps == second[0].gradient_state.num_steps == 3


def test_gradient_state_settings_apply_to_their_accelerator() -> None:
    first, second = _learner(2), _learner(2)
    first[0].gradient_state._set_sync_gradients(False)
    second[0].gradient_state.sync_gradients = True
    assert (first[0].sync_gradients, second[0].sync_gradients) == (False, True)


def test_the_end_of_a_loader_closes_windows_of_all_accelerators() -> None:
    first, second = _learner(4), _learner(4)
    loader = first[0].prepare(DataLoader(_data(3), batch_size=1))
    moved = [(_micro_step(*first), _micro_step(*second)) for _ in loader]
    assert moved == [(False, False), (False, False), (True, True)]


def _collect_by_another_accelerator() -> list[int]:
    loader = Accelerator().prepare(DataLoader(torch.arange(10), batch_size=4))  # type: ignore[arg-type]
    return [row for rows in loader for row in Accelerator().gather_for_metrics(rows).tolist()]


def test_accelerators_created_in_a_loop_know_it() -> None:
    assert ranks.run(_collect_by_another_accelerator, 2) == [list(range(10))] * 2


def test_an_interrupted_window_does_not_reach_the_next_command() -> None:
    accelerator, model, optimizer = _learner(4)
    batches = iter(accelerator.prepare(DataLoader(_data(1), batch_size=1)))
    next(batches)  # like a traceback, which keeps the loader in its loop at its last batch

    def interrupted() -> None:
        with accelerator.accumulate(model):
            raise KeyboardInterrupt

    accelerator.gradient_state.sync_gradients = False
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    accelerator.gradient_state.sync_gradients = False

    context.current().num_commands += 1  # a session counts commands this way
    module = _model()
    later = Accelerator()
    model, optimizer = later.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    before = module[0].weight.clone()
    later.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    assert not torch.equal(before, module[0].weight), "a plain loop steps"
    assert not later.gradient_state.in_dataloader
    rows = torch.ones(5)
    assert later.gather_for_metrics(rows) is rows, "nothing is cut to the rows of a loop that is over"
    windowed = _learner(3)
    assert [_micro_step(*windowed) for _ in range(6)] == [False, False, True] * 2
    del batches


# --- uneven data -----------------------------------------------------------------------------------------------------


def _join(rows: int, even_batches: bool | None) -> tuple[int, list[bool], float]:
    accelerator = Accelerator()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_data(rows), batch_size=2))
    settings = []
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=even_batches):
        settings.append(loader.shard.even_batches)
        for inputs, targets in loader:
            batches += 1
            accelerator.backward((model(inputs) - targets).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    settings.append(loader.shard.even_batches)
    return batches, settings, accelerator.gather(model.module[0].weight.sum()).diff().item()


def test_ranks_with_unequal_data_join() -> None:
    zero, one = JOINED["unequal data"]
    assert (zero[0], one[0]) == (2, 1)
    assert zero[1] == [False, True]
    assert zero[2] == one[2] == 0, "weights are equal on all ranks"


def _join_accumulating(rows: int) -> tuple[int, float]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_data(rows), batch_size=2))
    num_steps = 0
    for _ in range(2):
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for inputs, _targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(inputs).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    num_steps += accelerator.sync_gradients
    difference = accelerator.gather(model.module.weight.sum()).diff().item()
    return num_steps, difference


def test_joining_ranks_accumulate_past_the_middle_of_a_window() -> None:
    """An epoch has four and three batches, so windows close at the second and the fourth."""
    assert JOINED["in the middle of a window"] == [(4, 0), (2, 0)]


def test_ranks_that_join_and_end_together_close_their_last_window() -> None:
    """An epoch has three batches on each rank, so windows close at the second and the third."""
    assert JOINED["together"] == [(4, 0), (4, 0)]


def _join_number() -> float:
    accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ones = TensorDataset(torch.ones(3, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ones))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for (inputs,) in loader:
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
    return float(model.module.weight)


def test_joined_ranks_contribute_zero_gradients() -> None:
    """This is the same as in Accelerate. Each batch has the gradient 1; only rank 0 contributes to the second step."""
    assert JOINED["number"] == [-1.5, -1.5]


def test_joining_leaves_even_batches_alone_unless_asked() -> None:
    assert [answer[:2] for answer in JOINED["even data"]] == [(2, [True, True])] * 2


class _Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(4))


def _join_warnings() -> list[str]:
    accelerator = Accelerator()
    model = accelerator.prepare(_model())
    accelerator.prepare(DataLoader(_Stream()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass
        with accelerator.join_uneven_inputs([nn.Linear(1, 1)]):
            pass
    assert {one.filename for one in caught} == {__file__}, "warnings point at the line of the user"
    return [str(one.message) for one in caught]


def test_joining_warns_about_other_loaders() -> None:
    for first, second in JOINED["warnings"]:
        assert "1 of the 1 prepared loaders are different" in first
        assert "supported only for map-style datasets" in first, "by which users of Accelerate recognise it"
        assert "has no effect" in second
        assert "It got Linear." in second


JOINED = ranks.Together(
    2,
    **{
        "unequal data": lambda: _join(6, False),
        "even data": lambda: _join(6, None),
        "in the middle of a window": lambda: _join_accumulating(13),
        "together": lambda: _join_accumulating(12),
        "number": _join_number,
        "warnings": _join_warnings,
    },
)


def test_joining_does_nothing_in_a_lone_process() -> None:
    accelerator = Accelerator()
    with accelerator.join_uneven_inputs([accelerator.prepare(_model())], even_batches=False):
        pass


# --- synchronising by hand -------------------------------------------------------------------------------------------


def _sync_late(is_triggered: bool) -> list[bool]:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    mine = torch.full((1, 1), 1.0 + accelerator.process_index)
    with accelerator.no_sync(model):
        loss = model(mine).sum() + model(2 * mine).sum()
    if is_triggered:
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
    else:
        accelerator.backward(loss)
    gradients = accelerator.gather(accelerator.unwrap_model(model).weight.grad)
    before = bool(gradients[0] == gradients[1])
    # Later calls work as usual.
    accelerator.backward(model(mine).sum())
    gradients = accelerator.gather(accelerator.unwrap_model(model).weight.grad)
    return [before, bool(gradients[0] == gradients[1])]


def test_a_backward_can_be_forced_to_sync() -> None:
    assert ranks.run(_sync_late, 2, True) == [[True, True]] * 2
    assert ranks.run(_sync_late, 2, False)[0][0] is False
    with Accelerator.trigger_sync_in_backward(nn.Linear(1, 1)):
        pass


def _trigger() -> list[bool]:
    accelerator = Accelerator()
    checks = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [*checks, accelerator.check_trigger(), accelerator.check_trigger()]


def test_any_rank_may_raise_the_flag_for_all() -> None:
    assert ranks.run(_trigger, 2) == [[False, True, False]] * 2
    accelerator = Accelerator()
    accelerator.set_trigger()
    assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]


def _hooked(hook: str, wrapper: str) -> bool:
    options = {"matrix_approximation_rank": 1} if "sgd" in hook else {}
    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType(hook),
        comm_wrapper=DDPCommunicationHookType(wrapper),
        comm_state_option=options,
    )
    accelerator = Accelerator(kwargs_handlers=[handler])
    model = accelerator.prepare(_model())
    accelerator.backward(model(torch.ones(2, 3) + accelerator.process_index).sum())
    gradients = accelerator.gather(model.module[0].weight.grad.reshape(1, -1))
    return bool(torch.equal(gradients[0], gradients[1]))


@pytest.mark.parametrize(("hook", "wrapper"), [("fp16", "no"), ("power_sgd", "fp16")])
def test_communication_hooks_apply(hook: str, wrapper: str) -> None:
    assert ranks.run(_hooked, 2, hook, wrapper) == [True, True]


def test_unknown_hooks_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"comm_wrapper='power_sgd'.*'no', 'fp16', 'bf16'"):
        DistributedDataParallelKwargs(comm_wrapper=DDPCommunicationHookType.POWER_SGD)


def _twice() -> str:
    accelerator = Accelerator()
    module = _model()
    accelerator.prepare(module)
    try:
        accelerator.prepare(module)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_a_model_is_not_wrapped_twice() -> None:
    for message in ranks.run(_twice, 2):
        assert message.startswith("this Sequential was prepared before, as model 0 of this Accelerator; use")


# --- local steps -----------------------------------------------------------------------------------------------------


def _local_steps(steps: int, enabled: bool, between: int = 2, accumulated: int = 1) -> list[bool]:
    accelerator = Accelerator(gradient_accumulation_steps=accumulated)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    equal = []

    def note() -> None:
        weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
        equal.append(bool(weights[0] == weights[1]))

    with LocalSGD(accelerator, model, local_sgd_steps=between, enabled=enabled) as local:
        for _ in range(steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 1), 1.0 + accelerator.process_index)).sum())
                optimizer.step()
                optimizer.zero_grad()
            local.step()
            note()
    note()
    return equal


def test_local_sgd_averages_weights() -> None:
    assert LOCAL["every second step"] == [[False, True, False, True]] * 2
    assert LOCAL["disabled"] == [[True] * 4] * 2
    with pytest.raises(ValueError, match="local_sgd_steps=0 must be at least 1"):
        LocalSGD(Accelerator(), _model(), 0)


class _ManyParameters(nn.Module):
    """A frozen parameter, small ones of two types, and two large ones."""

    def __init__(self) -> None:
        super().__init__()
        small = [
            nn.Parameter(torch.zeros(3, dtype=torch.float64 if number < 4 else None)) for number in range(9)
        ]
        self.parts = nn.ParameterList([*small, *(nn.Parameter(torch.zeros(4 << 20)) for _ in range(2))])
        self.parts[0].requires_grad_(False)


def _local_averages() -> list[float]:
    accelerator = Accelerator()
    model = accelerator.prepare(_ManyParameters())
    parameters = accelerator.unwrap_model(model).parts
    for number, parameter in enumerate(parameters):
        nn.init.constant_(parameter, number + accelerator.process_index)
    num_exchanges, original = 0, dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_exchanges
        num_exchanges += 1
        return original(*args, **kwargs)

    dist.all_reduce = count
    with LocalSGD(accelerator, model, local_sgd_steps=1):
        pass
    dist.all_reduce = original
    return [num_exchanges, *(float(parameter.detach().mean()) for parameter in parameters)]


def test_parameters_are_averaged_together() -> None:
    means = [number + 0.5 for number in range(1, 11)]
    assert LOCAL["averages"] == [[3, rank, *means] for rank in range(2)]


def test_local_steps_count_calls() -> None:
    # The optimizer steps at the second, fourth and sixth call; weights are averaged at the third and sixth, as in
    # Accelerate.
    equal = [True, False, True, False, False, True, True, True]
    assert LOCAL["calls"] == [equal] * 2


LOCAL = ranks.Together(
    2,
    **{
        "every second step": lambda: _local_steps(3, True),
        "disabled": lambda: _local_steps(3, False),
        "averages": _local_averages,
        "calls": lambda: _local_steps(7, True, 3, 2),
    },
)


def _local_where_steps_average(enabled: bool) -> str:
    accelerator = Accelerator()
    context.current().backend.reduces_gradients_at_step = True  # like XLA devices
    try:
        LocalSGD(accelerator, _model(), 2, enabled)
    except ValueError as error:
        return str(error)
    return ""


def test_local_steps_are_rejected_where_every_step_averages_gradients() -> None:
    for message in ranks.run(_local_where_steps_average, 2, True):
        assert "LocalSGD has no effect on CPU devices" in message
    assert ranks.run(_local_where_steps_average, 2, False) == [""] * 2


# --- clipping --------------------------------------------------------------------------------------------------------


def _clip(precision: str) -> tuple[float, float, float]:
    accelerator = Accelerator(mixed_precision=precision)
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        accelerator.unwrap_model(model).weight.fill_(1.0)
    # The ranks' gradients are [2, 0] and [4, 8], and their mean is [3, 4].
    inputs = torch.tensor([[2.0, 0.0], [4.0, 8.0]])[accelerator.process_index : accelerator.process_index + 1]
    accelerator.backward(model(inputs).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
    weight = accelerator.unwrap_model(model).weight
    clipped = weight.grad.norm().item()
    accelerator.clip_grad_value_(model.parameters(), 0.25)
    return norm, clipped, weight.grad.abs().max().item()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_clipping_sees_the_gradient_of_all_ranks(precision: str) -> None:
    for norm, clipped, largest in ranks.run(_clip, 2, precision):
        assert (norm, clipped, largest) == pytest.approx((5.0, 1.0, 0.25), abs=1e-4)


def test_clipping_takes_one_parameter_and_sees_unscaled_gradients() -> None:
    accelerator = Accelerator()
    accelerator._preparer.precision = Fp16Precision(context.current().backend, {})
    weight = nn.Parameter(torch.ones(2))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    accelerator.backward((weight * torch.tensor([3.0, 4.0])).sum())
    assert accelerator.clip_grad_norm_(weight, 1.0).item() == pytest.approx(5.0)
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.4, 0.2])
    assert not accelerator.optimizer_step_was_skipped


class _Reducing:
    """A backend that averages gradients in the optimizer step."""

    reduces_gradients_at_step = True

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.reduced: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def reduce_gradients(self, optimizer: Any) -> None:
        self.reduced.append(optimizer)


def test_clipping_reduces_only_clipped_gradients_once() -> None:
    accelerator = Accelerator()
    first, second = _model(), _model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    prepared = accelerator.prepare(*optimizers)
    backend = _Reducing(context.current().backend)
    for one in prepared:
        one._backend = backend
    (first(torch.ones(1, 3)).sum() + second(torch.ones(1, 3)).sum()).backward()
    accelerator.clip_grad_norm_(first.parameters(), 1.0)
    accelerator.clip_grad_norm_(first.parameters(), 1.0)
    assert backend.reduced == [optimizers[0]]
    for one in prepared:
        one.step()
    assert backend.reduced == optimizers
    prepared[0].step()
    assert backend.reduced == [*optimizers, optimizers[0]]


# --- compiled models, profiles ---------------------------------------------------------------------------------------


def _compiled(as_plugin: bool) -> dict[str, bool]:
    options: dict[str, Any] = {"dynamo_backend": "eager"}
    if as_plugin:
        options = {"dynamo_plugin": TorchDynamoPlugin(backend="EAGER", fullgraph=False)}
    accelerator = Accelerator(**options)
    module = nn.Linear(2, 1)
    model = accelerator.prepare(module)
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    kept = accelerator.unwrap_model(model)
    return {
        "compiled": type(model).__name__ == "OptimizedModule",
        "again": accelerator.prepare(model) is model,
        "kept compiled": type(kept).__name__ == "OptimizedModule" and kept._orig_mod is module,
        "bare": accelerator.unwrap_model(model, keep_torch_compile=False) is module,
        "same weights": next(kept.parameters()) is module.weight,
        "gradient": module.weight.grad is not None,
    }


@pytest.mark.parametrize(("world_size", "as_plugin"), [(1, True), (2, False)])
def test_models_are_compiled(world_size: int, as_plugin: bool) -> None:
    for answers in ranks.run(_compiled, world_size, as_plugin):
        assert all(answers.values()), answers


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.heads = nn.ModuleList([nn.Linear(2, 1), nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_repeated_blocks_can_be_compiled_alone() -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    module = _Blocks()
    expected = copy.deepcopy(module)(torch.ones(1, 2))
    model = Accelerator(dynamo_plugin=plugin).prepare(module)
    assert model is module
    assert [block._compiled_call_impl is not None for block in model.blocks] == [True] * 3
    assert model.heads[0]._compiled_call_impl is None
    torch.testing.assert_close(model(torch.ones(1, 2)), expected)


def test_compilation_has_the_documented_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(1, 1)
    assert Accelerator().prepare(module) is module
    with pytest.raises(ValueError, match=r"'nosuch' .*aot_eager"):
        Accelerator(dynamo_backend="nosuch")
    assert {name.lower() for name in DynamoBackend.__members__} == set(COMPILERS)
    with pytest.raises(ValueError, match="dynamo_backend='eager' and dynamo_plugin"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    model = Accelerator().prepare(nn.Linear(1, 1))
    assert type(model).__name__ == "OptimizedModule"


def _profile(folder: str) -> list[str]:
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)])
    with accelerator.profile() as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    with accelerator.profile(ProfileKwargs(activities=["cpu"], record_shapes=True)):
        pass
    return [event.key for event in profiler.key_averages()]


def test_profiles_of_every_rank_are_written(tmp_path: Any) -> None:
    for keys in ranks.run(_profile, 2, str(tmp_path / "traces")):
        assert "aten::matmul" in keys
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "profile_0.json",
        "profile_1.json",
    ]


def test_invalid_profiles_are_rejected() -> None:
    with pytest.raises(ValueError, match="activity='gpu' is unknown"):
        ProfileKwargs(activities=["gpu"])
    with pytest.raises(ValueError, match=r"downcast_bf16=True .*XLA.* cpu"):
        Accelerator(downcast_bf16=True)


def test_the_last_loss_of_a_pass_is_shown() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration())
    weight = nn.Parameter(torch.ones(1))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(5.0))))
    for (value,) in loader:
        accelerator.backward((weight * value).sum())
    assert context.current().slot.read(0).loss == 4.0
    for (value,) in loader:
        accelerator.backward((weight * 10 * value).sum())
        if value == 2:
            break
    assert context.current().slot.read(0).loss == 20.0
    for value in accelerator.progress([7.0, 9.0]):
        accelerator.backward((weight * value).sum())
    assert context.current().slot.read(0).loss == 9.0


def _calls_per_step(step: Callable[[], object], num_steps: int = 50) -> float:
    """Return the calls of Python and C functions in a step after the first."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    step()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(num_steps):
            step()
    finally:
        sys.setprofile(before)
    return num_calls / num_steps


def test_a_step_adds_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """This measures a step without a clock; the number does not grow with the number of parameters."""
    monkeypatch.setenv("NBLAUNCH_CHECKS", "off")  # checks run in the first steps
    extra = []
    for num_layers in (1, 4):
        plain, module = (nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers))) for _ in range(2))
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        inputs = torch.ones(3, 2)

        def step_plainly(
            plain: nn.Module = plain, optimizer: Any = plain_optimizer, inputs: torch.Tensor = inputs
        ) -> None:
            plain(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        def step(
            accelerator: Any = accelerator,
            model: nn.Module = model,
            optimizer: Any = optimizer,
            inputs: torch.Tensor = inputs,
        ) -> None:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).sum())
                optimizer.step()
                optimizer.zero_grad()

        extra.append(_calls_per_step(step) - _calls_per_step(step_plainly))
    assert max(extra) <= 48, extra
    assert abs(extra[0] - extra[1]) < 2
