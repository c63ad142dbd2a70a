"""Sharded training on real ranks equals training in one process, whatever the settings."""

from __future__ import annotations

import functools
import warnings
import weakref
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nblaunch
from nblaunch import Accelerator, FullyShardedDataParallelPlugin
from nblaunch.training.collectives import dtensor
from nblaunch.training.options import TorchDynamoPlugin
from nblaunch.training.utilities.local_sgd import LocalSGD
from nblaunch.weights import is_sharded
from tests.thorough import thorough
from tests.training import ranks
from tests.training.quantised_model import Adapted, Params4bit, train_one_step

ROWS, GLOBAL_BATCH = 64, 16


class Block(nn.Module):
    """A residual layer with a norm, as in a transformer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Network(nn.Module):
    """A model with layers in a list, sizes that no number of ranks divides, and a buffer."""

    def __init__(self, size: int = 17, num_blocks: int = 3) -> None:
        super().__init__()
        self.entry = nn.Linear(6, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(num_blocks))
        self.exit = nn.Linear(size, 1)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.exit(x) * self.scale


def network(device: str = "cpu") -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        with torch.device(device):
            return Network()


def data() -> TensorDataset:
    inputs = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(7))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())


def prepared(
    settings: dict[str, Any] | None, model: nn.Module, **accelerator_settings: Any
) -> tuple[Accelerator, Any, Any, Any]:
    """Return an Accelerator and its prepared objects; ``settings`` None: without a plugin."""
    plugin = None if settings is None else FullyShardedDataParallelPlugin(**settings)
    accelerator = Accelerator(fsdp_plugin=plugin, split_batches=True, **accelerator_settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(
        data(), batch_size=GLOBAL_BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def epoch(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, norm: float = 0.5
) -> list[float]:
    """Train for an epoch with clipping; return the mean loss of every step, and the gradient norms before clipping."""
    results = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                results.append(float(accelerator.clip_grad_norm_(model.parameters(), norm)))
            optimizer.step()
            optimizer.zero_grad()
        results.append(accelerator.reduce(loss.detach(), "mean").item())
    return results


def _train(
    settings: dict[str, Any] | None, device: str = "cpu", **accelerator_settings: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    accelerator, *rest = prepared(settings, network(device), **accelerator_settings)
    results = [*epoch(accelerator, *rest), *epoch(accelerator, *rest)]
    return results, accelerator.get_state_dict(rest[0])


@functools.cache
def expected(accumulation: int = 1, precision: str = "no") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the results of one process without sharding."""
    found: tuple[list[float], dict[str, torch.Tensor]]
    (found,) = ranks.run(
        functools.partial(_train, gradient_accumulation_steps=accumulation, mixed_precision=precision),
        1,
        None,
    )
    return found


def same(found: list[Any], accumulation: int = 1, precision: str = "no") -> None:
    """Check that every rank has the results of one process, and the main process its weights."""
    # Weights have changed by up to 0.4. Adam amplifies rounding errors of tiny gradients.
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if precision == "no" else {"rtol": 0.05, "atol": 0.05}
    results, weights = expected(accumulation, precision)
    for one, _ in found:
        torch.testing.assert_close(torch.tensor(one), torch.tensor(results), **tolerance)
    torch.testing.assert_close(found[0][1], weights, **tolerance)
    assert [one for _, one in found[1:]] == [{}] * (len(found) - 1)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_equals_a_single_process(world_size: int, accumulation: int) -> None:
    train = functools.partial(_train, gradient_accumulation_steps=accumulation)
    same(ranks.run(train, world_size, {}), accumulation)


def test_training_in_bf16_equals_a_single_process() -> None:
    same(ranks.run(functools.partial(_train, mixed_precision="bf16"), 2, {}), precision="bf16")


def _train_in_bf16(is_reference: bool) -> tuple[torch.dtype, list[list[float]]]:
    package: Any = accelerate if is_reference else nblaunch
    plugin = package.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    if is_reference:  # Accelerate shards only on GPUs; this test depends on no device
        warnings.simplefilter("ignore")
        kind = accelerate.utils.DistributedType.MULTI_XPU
        accelerate.PartialState(cpu=True)._shared_state["distributed_type"] = kind
    accelerator = package.Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    found, generator = [], torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(6):
        x = torch.randn(4, 6, generator=generator)
        outputs = model(x)
        loss = (outputs.float() - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item(), getattr(norm, "full_tensor", lambda norm=norm: norm)().item()])
    return outputs.dtype, found


def test_training_in_bf16_equals_accelerate() -> None:
    found, expected = (ranks.run(_train_in_bf16, 2, is_reference) for is_reference in (False, True))
    for (dtype, values), (reference_dtype, reference) in zip(found, expected, strict=True):
        assert dtype == reference_dtype == torch.bfloat16
        torch.testing.assert_close(torch.tensor(values), torch.tensor(reference))


def _evaluate_in_bf16() -> bool:
    plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    plain = torch.nn.Linear(8, 8)
    model = accelerator.prepare_model(plain, evaluation_mode=True)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.nn.functional.linear(x, plain.weight, plain.bias)
    return torch.equal(model(x), expected.float())


def _step_beside_full_layers(is_optimizer_first: bool) -> tuple[bool, Any]:
    """Step with lists of parameters, as by default on GPUs, with one unsharded layer."""
    warnings.filterwarnings("ignore", "ignored_modules excludes")
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="exit"))
    model = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    if is_optimizer_first:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    before = [dtensor.local(one).clone() for one in model.parameters()]
    accelerator.backward(model(torch.ones(4, 6)).sum())
    optimizer.step()
    is_stepped = all(
        not torch.equal(dtensor.local(one), old) or not old.numel()
        for one, old in zip(model.parameters(), before, strict=True)
    )
    return is_stepped, optimizer.state_dict()["param_groups"][0]["foreach"]


@pytest.mark.parametrize("is_optimizer_first", [False, True])
def test_unsharded_layers_are_trained_beside_sharded_ones(is_optimizer_first: bool) -> None:
    assert ranks.run(_step_beside_full_layers, 2, is_optimizer_first) == [(True, True)] * 2


def test_evaluated_models_are_not_sharded_and_use_autocast() -> None:
    assert ranks.run(_evaluate_in_bf16, 2) == [True, True]


@pytest.mark.parametrize(
    "settings",
    [
        {"reshard_after_forward": False},
        {"sharding_strategy": "HYBRID_SHARD"},
        {"auto_wrap_policy": "no_wrap"},
        {"cpu_offload": True},
        {"activation_checkpointing": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_change_only_memory_and_traffic(settings: dict[str, Any]) -> None:
    same(ranks.run(_train, 2, settings))


def _train_compiled(is_regional: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    # torch's compiler asks whether activations have a gradient.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=is_regional)
    return _train({}, dynamo_plugin=plugin)


@pytest.mark.parametrize("is_regional", [thorough(False), True])
def test_a_compiled_model_trains_alike(is_regional: bool) -> None:
    same(ranks.run(_train_compiled, 2, is_regional))


def test_meta_weights_are_initialised_like_a_model_on_the_cpu() -> None:
    def train() -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(3)  # the other ranks may have different seeds
        if Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()).process_index > 0:
            torch.manual_seed(4)
        return _train({"param_init_fn": _make}, "meta")

    same(ranks.run(train, 2))


def _make(module: Any) -> None:
    if isinstance(module, Network):
        module.scale.fill_(2.0)
    else:
        module.reset_parameters()


def _train_unequal(where: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    plugin = FullyShardedDataParallelPlugin()
    is_main = Accelerator(fsdp_plugin=plugin).is_main_process
    model = network("cpu" if is_main or where == "cpu" else "meta")
    if not is_main and where == "cpu":
        with torch.no_grad():
            model.entry.weight.add_(1.0)
            model.scale.add_(1.0)
    accelerator, *rest = prepared({}, model)
    return [*epoch(accelerator, *rest), *epoch(accelerator, *rest)], accelerator.get_state_dict(rest[0])


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_rank_0_sends_its_weights_to_all(where: str) -> None:
    same(ranks.run(_train_unequal, 2, where))


def _whole_tensors() -> dict[str, Any]:
    """Prepare a model whose weights only rank 0 has, with an unsharded layer, and a buffer with two names."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))
    model[1:].requires_grad_(False)
    model[2].running_mean = model[1].running_mean
    plugin = FullyShardedDataParallelPlugin(ignored_modules="[12]")
    accelerator = Accelerator(fsdp_plugin=plugin)
    if not accelerator.is_main_process:
        model.to("meta")
        model[2].running_mean = model[1].running_mean
    accelerator.prepare(model)
    return {
        "weights": dtensor.gather_weights(model, keep=True),
        "sharded": [name for name, tensor in model.named_parameters() if is_sharded(tensor)],
        "is one": model[2].running_mean is model[1].running_mean,
    }


def test_rank_0_sends_unsharded_tensors() -> None:
    first, second = ranks.run(_whole_tensors, 2)
    torch.testing.assert_close(second["weights"], first["weights"])
    assert first["weights"]["1.bias"].tolist() == first["weights"]["1.running_mean"].tolist() == [0, 1, 2]
    for one in (first, second):
        assert one["sharded"] == ["0.weight", "0.bias"]
        assert one["is one"]


def _shares() -> dict[str, Any]:
    accelerator, model, optimizer, _ = prepared({}, network())
    weights = dict(model.named_parameters())
    return {
        "held": sum(dtensor.local(weight).numel() for weight in weights.values()),
        "all": sum(weight.numel() for weight in weights.values()),
        "stepped": sum(dtensor.local(p).numel() for g in optimizer.param_groups for p in g["params"]),
        "label": accelerator.distributed_type.name,
        "is_fsdp2": accelerator.is_fsdp2,
        "unwrapped": accelerator.unwrap_model(model) is model,
        "again": accelerator.prepare(model) is model,
    }


def test_each_rank_holds_only_its_shards() -> None:
    found = ranks.run(_shares, 4)
    assert sum(one["held"] for one in found) == found[0]["all"]
    for one in found:
        assert one["held"] < 0.31 * one["all"]
        assert one["stepped"] == one["held"]
        assert one["label"] == "FSDP"
        assert one["is_fsdp2"]
        assert one["unwrapped"]
        assert one["again"]


class Tied(nn.Module):
    """A model whose last layer has the transposed weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5, bias=False)
        self.middle = Block(5)
        self.exit = nn.Linear(5, 5, bias=False)
        self.exit.weight = self.entry.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.exit(self.middle(self.entry(x)))


def _train_tied(settings: dict[str, Any] | None) -> tuple[bool, dict[str, torch.Tensor]]:
    plugin = None if settings is None else FullyShardedDataParallelPlugin(**settings)
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(3)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 5)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return model.entry.weight is model.exit.weight, accelerator.get_state_dict(model)


def test_tied_weights_stay_tied_across_units() -> None:
    settings = {"transformer_cls_names_to_wrap": ["Linear", "Block"]}
    (is_tied, alone), *_ = ranks.run(_train_tied, 1, None)
    found = ranks.run(_train_tied, 2, settings)
    assert is_tied
    assert all(is_tied for is_tied, _ in found)
    torch.testing.assert_close(found[0][1], alone)


class Views(nn.Module):
    """A model that returns views, as linear layers do for sequences, and changes its layers' outputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
            x += 1
        return {"all": (x * x).flatten(1), "first": x[:, 0]}


def _train_views(is_sharded: bool, compiler: str = "no") -> dict[str, torch.Tensor]:
    warnings.filterwarnings("error", "FSDP2-wrapped module")
    # torch's compiler asks whether activations have a gradient.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    plugin = FullyShardedDataParallelPlugin() if is_sharded else None
    accelerator = Accelerator(fsdp_plugin=plugin, dynamo_backend=compiler)
    torch.manual_seed(3)
    model = Views()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        output = model(torch.arange(24.0).reshape(2, 3, 4) / 24)
        output["all"] *= 2
        accelerator.backward(output["all"].pow(2).mean() + output["first"].mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("compiler", ["no", "aot_eager"])
def test_outputs_of_units_may_be_changed_in_place(compiler: str) -> None:
    (expected,) = ranks.run(_train_views, 1, False)
    torch.testing.assert_close(ranks.run(_train_views, 2, True, compiler)[0], expected)


def _sync_late(settings: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    accelerator, model, optimizer, _ = prepared(settings, network())
    inputs = data().tensors[0].chunk(accelerator.num_processes)[accelerator.process_index]
    with accelerator.no_sync(model):
        accelerator.backward(model(inputs).pow(2).mean())
        assert all(parameter.grad is None for parameter in model.parameters() if is_sharded(parameter))
    with accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model):
        accelerator.backward(model(inputs).pow(2).mean())
    accelerator.clip_grad_value_(model.parameters(), 0.02)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert (dtensor.local(parameter.grad).abs() <= 0.02).all()
    optimizer.step()
    return accelerator.get_state_dict(model)


def test_gradients_are_reduced_when_asked() -> None:
    (alone,) = ranks.run(_sync_late, 1, None)
    torch.testing.assert_close(ranks.run(_sync_late, 2, {})[0], alone, rtol=1e-3, atol=1e-3)


def _gradients_after_a_late_sync() -> int:
    accelerator, model, _, _ = prepared({}, network())
    inputs = data().tensors[0]
    with accelerator.no_sync(model):
        loss = model(inputs).pow(2).mean()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    for parameter in model.parameters():
        parameter.grad = None
    accelerator.backward(model(inputs).pow(2).mean())
    return sum(parameter.grad is not None for parameter in model.parameters())


def test_requesting_a_gradient_reduces_later_ones() -> None:
    count = len(list(network().parameters()))
    assert ranks.run(_gradients_after_a_late_sync, 2) == [count, count]


def _train_loaded_in(dtype: torch.dtype, precision: str) -> tuple[set[torch.dtype], Any]:
    accelerator, model, optimizer, loader = prepared({}, network().to(dtype), mixed_precision=precision)
    for inputs, targets in loader:
        loss = (model(inputs.to(next(model.parameters()).dtype)) - targets).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    held = [parameter.dtype for parameter in model.parameters()]
    held += [state["exp_avg"].dtype for state in optimizer.state.values()]
    return set(held), accelerator.get_state_dict(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_trained_in_fp32(dtype: torch.dtype) -> None:
    assert ranks.run(_train_loaded_in, 2, dtype, "bf16")[0][0] == {torch.float32}


def test_without_mixed_precision_models_keep_their_dtype() -> None:
    assert ranks.run(_train_loaded_in, 2, torch.bfloat16, "no")[0][0] == {torch.bfloat16}


class MixedBlock(Block):
    """A layer in bf16 whose norm is in fp32."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.linear.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x).to(self.linear.weight.dtype))).float()


def _train_mixed(settings: dict[str, Any] | None, precision: str) -> dict[str, torch.Tensor]:
    model = network()
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model.blocks = nn.ModuleList(MixedBlock(17) for _ in range(2))
    accelerator, *rest = prepared(settings, model, mixed_precision=precision)
    epoch(accelerator, *rest)
    return {name: value.float() for name, value in accelerator.get_state_dict(rest[0]).items()}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_unit_may_have_weights_of_several_dtypes(precision: str) -> None:
    (alone,) = ranks.run(_train_mixed, 1, None, "no")
    found = ranks.run(_train_mixed, 2, {}, precision)[0]
    assert found.keys() == alone.keys()
    # Weights have changed by up to 0.2; Adam amplifies rounding errors of single weights.
    assert max(float((found[name] - alone[name]).abs().mean()) for name in alone) < 0.02


def _train_adapters(folder: str) -> tuple[list[torch.dtype], bool]:
    torch.manual_seed(0)
    model = Adapted()
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), mixed_precision="bf16")
    prepared_model: Any = train_one_step(accelerator, model)
    sharded = {name for name, one in prepared_model.named_parameters() if is_sharded(one)}
    assert sharded == {"lora_A.weight", "lora_B.weight", "base_layer.bias"}
    trained = prepared_model.lora_B.weight.to_local().clone()
    accelerator.save_state(folder)
    with torch.no_grad():
        prepared_model.lora_B.weight.zero_()
    accelerator.load_state(folder)
    assert torch.equal(prepared_model.lora_B.weight.to_local(), trained)
    return [prepared_model.lora_B.weight.dtype, prepared_model.base_layer.weight.dtype], isinstance(
        prepared_model.base_layer.weight, Params4bit
    )


def test_quantised_weights_stay_whole_beside_sharded_adapters(tmp_path: Path) -> None:
    assert ranks.run(_train_adapters, 2, str(tmp_path)) == [([torch.float32, torch.uint8], True)] * 2


def _stepped_before(settings: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(data().tensors[0]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    accelerator = Accelerator(
        fsdp_plugin=None if settings is None else FullyShardedDataParallelPlugin(**settings)
    )
    optimizer, model = accelerator.prepare(optimizer, model)
    accelerator.backward(model(data().tensors[0]).pow(2).mean())
    optimizer.step()
    return accelerator.get_state_dict(model)


def test_optimizers_keep_their_state() -> None:
    (alone,) = ranks.run(_stepped_before, 1, None)
    torch.testing.assert_close(ranks.run(_stepped_before, 2, {})[0], alone, rtol=1e-3, atol=1e-3)


def _freed_models() -> list[bool]:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    shards = []
    for _ in range(3):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(data().tensors[0]).pow(2).mean())
        optimizer.step()
        shards.append(weakref.ref(model.exit.weight))
        del model, optimizer
        accelerator.free_memory()
    return [shard() is None for shard in shards]


def test_free_memory_drops_all_shards() -> None:
    assert ranks.run(_freed_models, 2) == [[True] * 3] * 2


def _stepped_after_free_memory(settings: dict[str, Any] | None) -> Any:
    accelerator = Accelerator(
        fsdp_plugin=None if settings is None else FullyShardedDataParallelPlugin(**settings)
    )
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model = accelerator.prepare(model)
    accelerator.free_memory()
    optimizer = accelerator.prepare(optimizer)
    accelerator.backward(model(data().tensors[0]).pow(2).mean())
    optimizer.step()
    return accelerator.get_state_dict(model)


def test_optimizers_get_shards_after_free_memory() -> None:
    (alone,) = ranks.run(_stepped_after_free_memory, 1, None)
    torch.testing.assert_close(ranks.run(_stepped_after_free_memory, 2, {})[0], alone, rtol=1e-3, atol=1e-3)


def _norms(norm_type: float, ignored: str | None) -> float:
    warnings.filterwarnings("ignore", message="ignored_modules excludes")
    accelerator, model, _, _ = prepared({"ignored_modules": ignored}, network())
    accelerator.backward(model(data().tensors[0]).pow(2).mean())
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    again = accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    assert float(again) == pytest.approx(0.1, rel=1e-3)
    assert not is_sharded(norm)
    return float(norm)


@pytest.mark.parametrize(("norm_type", "ignored"), [(2.0, "exit"), (1.0, None), (float("inf"), None)])
def test_norms_cover_all_shards(norm_type: float, ignored: str | None) -> None:
    model = network()
    model(data().tensors[0]).pow(2).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)  # type: ignore[misc]
    assert ranks.run(_norms, 2, norm_type, ignored) == pytest.approx([float(norm)] * 2, rel=1e-4)


def _evaluate(accelerator: Accelerator, model: Any) -> list[float]:
    model.eval()
    with torch.inference_mode():
        inputs = data().tensors[0].chunk(accelerator.num_processes)[accelerator.process_index]
        outputs = accelerator.gather_for_metrics(model(inputs))
    model.train()
    return outputs.flatten().tolist()


def _evaluate_in_between(settings: dict[str, Any] | None) -> list[float]:
    accelerator, model, *rest = prepared(settings, network())
    results = _evaluate(accelerator, model)  # before torch has gathered anything
    results += epoch(accelerator, model, *rest)
    return results + _evaluate(accelerator, model) + epoch(accelerator, model, *rest)


def _warnings_of_ignored(is_frozen: bool) -> list[str]:
    model = network()
    model.exit.requires_grad_(not is_frozen)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared({"ignored_modules": "exit"}, model)
    return [str(one.message) for one in caught]


def test_unsharded_trained_weights_warn_once() -> None:
    (message,), others = ranks.run(_warnings_of_ignored, 2, False)
    assert message.startswith("ignored_modules excludes exit.weight, exit.bias from sharding")
    assert "requires_grad_(False)" in message
    assert others == []
    assert ranks.run(_warnings_of_ignored, 2, True) == [[], []]


def test_training_works_after_inference_mode() -> None:
    (alone,) = ranks.run(_evaluate_in_between, 1, None)
    for results in ranks.run(_evaluate_in_between, 2, {}):
        assert results == pytest.approx(alone, rel=1e-3, abs=1e-3)


def _average_locally() -> str:
    accelerator, model, *_ = prepared({}, network())
    with pytest.raises(ValueError) as caught:
        LocalSGD(accelerator, model, 2)
    return str(caught.value)


def test_local_steps_of_whole_models_are_rejected() -> None:
    assert "every rank holds only a shard" in ranks.run(_average_locally, 2)[0]


def _backends_for(offload: bool) -> list[str | None]:
    asked: list[str | None] = []

    def new_group(backend: str | None = None) -> Any:
        asked.append(backend)
        return dist.group.WORLD

    with pytest.MonkeyPatch.context() as patch:  # the CPU has no NCCL
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=offload))
        patch.setattr(dist, "get_backend", lambda: "nccl")
        patch.setattr(dist, "new_group", new_group)
        accelerator._preparer.strategy._mesh()  # type: ignore[attr-defined]
    return asked


def test_offloaded_shards_use_gloo_beside_nccl() -> None:
    assert ranks.run(_backends_for, 2, True) == [["cpu:gloo,cuda:nccl"]] * 2
    assert ranks.run(_backends_for, 2, False) == [[], []]
