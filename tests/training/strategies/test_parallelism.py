"""Ranks divided among sharded, replicated and tensor parallelism train like one process."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader

from nblaunch import (
    Accelerator,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    context,
    notebook_launcher,
)
from nblaunch.training import arguments
from nblaunch.training.collectives import dtensor
from nblaunch.training.parallelism import (
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from nblaunch.utils import patch_environment
from nblaunch.weights import is_sharded
from tests.thorough import thorough
from tests.training import ranks
from tests.training.strategies.test_fsdp2 import GLOBAL_BATCH, data, epoch

TENSOR = {"tp_size": 2}
BOTH = {"dp_shard_size": 2, "tp_size": 2}
HYBRID = {"dp_replicate_size": 2, "dp_shard_size": 2}


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Network(nn.Module):
    """Blocks to shard, with unsharded layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(Block(10) for _ in range(2))
        self.exit = nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.exit(x)


def _network(seed: int = 3) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Network()


def _cut(model: nn.Module, accelerator: Accelerator) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)


def _prepare(
    sizes: dict[str, int] | None, model: nn.Module | None = None, **settings: Any
) -> tuple[Accelerator, Any, Any, Any]:
    config = None if sizes is None else ParallelismConfig(**sizes)
    accelerator = Accelerator(parallelism_config=config, split_batches=True, **settings)
    model = _network() if model is None else model
    if config is not None and config.tp_enabled:
        _cut(model, accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)  # torch's default on GPUs
    loader = DataLoader(
        data(), batch_size=GLOBAL_BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def _train(sizes: dict[str, int] | None, folder: str, **settings: Any) -> tuple[list[float], dict[str, Any]]:
    """Train for two epochs, save after the first, and return losses, norms and weights."""
    accelerator, *rest = _prepare(sizes, **settings)
    losses = epoch(accelerator, *rest)
    if folder:
        accelerator.save_state(folder, asynchronous=bool(sizes))
    losses += epoch(accelerator, *rest)
    weights = accelerator.get_state_dict(rest[0])
    accelerator.end_training()
    return losses, weights


@functools.cache
def _expected(accumulation: int = 1, precision: str = "no") -> tuple[list[float], dict[str, torch.Tensor]]:
    program = functools.partial(_train, gradient_accumulation_steps=accumulation, mixed_precision=precision)
    found: tuple[list[float], dict[str, torch.Tensor]]
    (found,) = ranks.run(program, 1, None, "")
    return found


def _resume(sizes: dict[str, int] | None, folder: str, **settings: Any) -> list[float]:
    accelerator, *rest = _prepare(sizes, _network(4), **settings)
    accelerator.load_state(folder)
    return epoch(accelerator, *rest)


CASES = [(2, TENSOR), thorough(4, BOTH), thorough(4, HYBRID)]


@pytest.mark.parametrize(("num_ranks", "sizes"), CASES)
def test_training_saving_and_resuming_equal_one_process(
    num_ranks: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    folder = str(tmp_path / "state")
    expected, weights = _expected()
    results = ranks.run(_train, num_ranks, sizes, folder)
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)
    whole = results[0][1]
    assert whole.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(whole[name], weight, rtol=1e-4, atol=1e-5)
    second = expected[len(expected) // 2 :]
    for losses in ranks.run(_resume, num_ranks, sizes, folder):
        assert losses == pytest.approx(second, rel=1e-5, abs=1e-5)
    if sizes is BOTH:  # shards from a mesh with two dimensions, loaded on a mesh with one
        for losses in ranks.run(_resume, 2, {"dp_shard_size": 2}, folder):
            assert losses == pytest.approx(second, rel=1e-5, abs=1e-5)


def test_tensor_parallel_ranks_go_on_with_a_checkpoint_of_one_process(tmp_path: Path) -> None:
    """Its optimizer steps parameters in lists, which torch can't do with partly sharded layers."""
    folder = str(tmp_path / "state")
    ((expected, _),) = ranks.run(_train, 1, None, folder)
    for losses in ranks.run(_resume, 2, TENSOR, folder):
        assert losses == pytest.approx(expected[len(expected) // 2 :], rel=1e-5, abs=1e-5)


def _gather_over_gloo() -> list[bool]:
    """Gather shards to full tensors like ranks that share a GPU: on the CPU, with the groups of their mesh."""
    Accelerator().wait_for_everyone()
    full, found = torch.arange(24.0).reshape(6, 4), []
    for sizes, places in (
        ((4,), [Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Replicate(), Shard(0)]),
    ):
        shard = distribute_tensor(full, init_device_mesh("cpu", sizes), places)
        moved = dtensor.with_local(shard, shard.to_local(), dtensor._on_cpu(shard.device_mesh))
        found.append(torch.equal(moved.full_tensor(), full))
    return found


def test_shards_of_any_mesh_are_gathered_on_the_cpu() -> None:
    assert ranks.run(_gather_over_gloo, 4) == [[True] * 3] * 4


def test_mixed_precision_and_accumulation_on_both() -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}
    expected, _ = _expected(2, "bf16")
    for losses, _ in ranks.run(functools.partial(_train, **settings), 4, BOTH, ""):
        assert losses == pytest.approx(expected, rel=0.05, abs=0.02)  # bf16 has 8 bits


# --- data -------------------------------------------------------------------------------------------------------------


def _read(dispatches: bool) -> tuple[list[int], list[int], list[int], list[int], int]:
    config = DataLoaderConfiguration(dispatch_batches=dispatches)
    accelerator = Accelerator(
        dataloader_config=config, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2)
    )
    loader = accelerator.prepare(DataLoader(torch.arange(10), batch_size=2))
    own, gathered, objects = [], [], []
    for batch in loader:
        own += batch.tolist()
        gathered += accelerator.gather_for_metrics(batch).tolist()
        objects += accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
    coordinates = [accelerator.data_parallel_shard_rank, accelerator.tensor_parallel_rank]
    assert accelerator.torch_device_mesh.mesh_dim_names == ("dp_shard", "tp")
    assert accelerator.state.device_mesh is accelerator.torch_device_mesh
    return coordinates, own, gathered, objects, context.current().slot.read(0).samples


@pytest.mark.parametrize("dispatches", [False, True])
def test_tensor_parallel_ranks_read_the_same_data(dispatches: bool) -> None:
    parts = ranks.run(_read, 4, dispatches)
    assert [part[0] for part in parts] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert parts[0][1] == parts[1][1] == [0, 1, 4, 5, 8, 9][: 5 if dispatches else 6]
    assert parts[2][1] == parts[3][1]
    for _, _, gathered, objects, _ in parts:
        assert gathered == objects == list(range(10))
    # If two ranks read the same samples, only the first reports them, so the sum over ranks is correct.
    assert [part[4] for part in parts] == [len(parts[0][1]), 0, len(parts[2][1]), 0]


def _schedule() -> float:
    accelerator, model, optimizer, loader = _prepare(TENSOR)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5))
    accelerator.backward(model(next(iter(loader))[0]).mean())
    optimizer.step()
    scheduler.step()
    return optimizer.param_groups[0]["lr"]


def test_a_schedule_counts_ranks_with_different_data() -> None:
    assert ranks.run(_schedule, 2) == [0.025, 0.025]


# --- the notebook -----------------------------------------------------------------------------------------------------


def _in_notebook(model: nn.Module, folder: str) -> None:
    accelerator, model, *rest = _prepare(BOTH, model)
    epoch(accelerator, model, *rest)
    accelerator.save_model(model, folder)


def test_weights_come_back_and_are_saved_whole(tmp_path: Path) -> None:
    model = _network()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    notebook_launcher(_in_notebook, (model, str(tmp_path)), num_processes=4, backend="cpu")
    saved = load_file(tmp_path / "model.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, saved[name])
        assert not torch.equal(weight, before[name])


def _load_cut(folder: str) -> tuple[bool, list[float]]:
    from transformers import AutoModelForCausalLM

    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    warnings.filterwarnings("ignore", "Passing `tp_plan` directly", FutureWarning)  # programs still do this
    model = AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", device_mesh=accelerator.torch_device_mesh["tp"], dtype=torch.float32
    )
    is_cut = any(is_sharded(one) for one in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return is_cut, _train_language_model(accelerator, model, optimizer)


def _train_language_model(accelerator: Accelerator, model: Any, optimizer: Any) -> list[float]:
    tokens = torch.arange(16).reshape(2, 8)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def _one_after_another() -> list[tuple[str, bool]]:
    plugin, shards = FullyShardedDataParallelPlugin(reshard_after_forward=False), {"dp_shard_size": 2}
    settings: list[dict[str, Any]] = [
        {"fsdp_plugin": plugin},
        {},
        {"parallelism_config": ParallelismConfig(**shards)},
        {"parallelism_config": ParallelismConfig(**TENSOR)},
        {},
    ]
    found = []
    for given in settings:
        state = Accelerator(**given).state
        found.append((state.distributed_type.name, state.fsdp_plugin is plugin))
    return found


def test_later_accelerators_shard_by_default() -> None:
    expected = [("FSDP", True)] * 3 + [("MULTI_CPU", False)] * 2
    assert ranks.run(_one_after_another, 2) == [expected] * 2


def test_models_split_by_transformers_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # a thread that does not end
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    whole = LlamaForCausalLM(config)
    whole.save_pretrained(tmp_path)
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(whole, torch.optim.SGD(whole.parameters(), lr=0.5))
    expected = _train_language_model(accelerator, model, optimizer)
    for is_cut, losses in ranks.run(_load_cut, 2, str(tmp_path)):
        assert is_cut
        assert losses == pytest.approx(expected, rel=1e-5)


# --- what can't be done -----------------------------------------------------------------------------------------------


def _rejected() -> list[str]:
    messages = []
    for settings in (
        {"parallelism_config": ParallelismConfig(tp_size=3)},
        {"parallelism_config": ParallelismConfig(cp_size=2)},
        {
            "parallelism_config": ParallelismConfig(tp_size=2),
            "fsdp_plugin": FullyShardedDataParallelPlugin(),
        },
        {"parallelism_config": ParallelismConfig(tp_size=2), "deepspeed_plugin": DeepSpeedPlugin()},
    ):
        with pytest.raises(ValueError, match=r"_size|parallelism_config") as caught:
            Accelerator(**settings)  # type: ignore[arg-type]
        messages.append(str(caught.value))
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    if accelerator.is_main_process:
        with pytest.warns(UserWarning, match="the Linear is not sharded") as warned:
            accelerator.prepare(nn.Linear(2, 2))
        messages.append(str(warned[0].message))
    else:
        accelerator.prepare(nn.Linear(2, 2))
    return messages


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"parallelism_config": ParallelismConfig(**TENSOR)}, "tp_size"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, "fsdp_plugin"),
    ],
)
def test_old_torch_is_rejected_at_once(settings: dict[str, Any], asked: str) -> None:
    def use() -> None:
        del torch.nn.utils.get_total_norm  # as in torch 2.5
        with pytest.raises(
            RuntimeError, match=f"^{asked} needs torch 2.6 or newer, but this is .*: pip install"
        ):
            Accelerator(**settings)

    ranks.run(use, 2)


def test_invalid_divisions_are_rejected() -> None:
    messages, _ = ranks.run(_rejected, 2)
    for message, part in zip(
        messages,
        (
            "total_size (3) does not match num_processes (2)",
            "on cpu",
            "dp_shard_size",
            "DeepSpeed",
            "parallelize_module",
        ),
        strict=True,
    ):
        assert part in message
    with pytest.raises(TypeError, match="ParallelismConfig"):
        Accelerator(parallelism_config={"tp_size": 2})  # type: ignore[arg-type]


def _cut_under_ddp() -> None:
    accelerator = Accelerator()
    model = _network()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model, init_device_mesh("cpu", (2,)), {"entry": ColwiseParallel()})
    with pytest.raises(ValueError, match="contains `DTensor` parameters, which is incompatible with DDP"):
        accelerator.prepare(model)


def test_split_models_need_a_parallelism_config() -> None:
    ranks.run(_cut_under_ddp, 2)


# --- the configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_size": 0}, "tp_size=0 must be a whole number of at least 1"),
        ({"dp_replicate_size": 2, "tp_size": 2}, "Set dp_shard_size"),
        ({"cp_backend": "other"}, "cp_backend"),
        ({"cp_size": 2, "cp_handler": TorchTensorParallelConfig()}, "requires a TorchContextParallelConfig"),
    ],
)
def test_impossible_configurations_are_rejected(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelismConfig(**sizes)


def test_deepspeed_sequence_parallelism_is_rejected() -> None:
    problem = r"\(sp_size\) is not available.* ParallelismConfig\(cp_size=\.\.\.\) shards"
    with pytest.raises(NotImplementedError, match=problem):
        ParallelismConfig(sp_size=2)
    with (
        patch_environment(parallelism_config_sp_size="2"),
        pytest.raises(NotImplementedError, match=problem),
    ):
        ParallelismConfig()
    config = ParallelismConfig(sp_size=1)
    config.sp_size = 2
    with pytest.raises(NotImplementedError, match=problem):
        Accelerator(parallelism_config=config)


def test_sizes_come_from_the_environment() -> None:
    with patch_environment(
        parallelism_config_tp_size="2",
        parallelism_config_cp_size="2",
        parallelism_config_cp_comm_strategy="alltoall",
    ):
        config = ParallelismConfig(dp_shard_size=3)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (12, 3, 4)
    assert config.cp_handler == TorchContextParallelConfig("alltoall")
    assert config.active_mesh_dims == ["dp_shard", "tp", "cp"]
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert config.dp_cp_dim_names == config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config._get_mesh() == (("dp_shard", "cp", "tp"), (3, 2, 2))
    assert config.to_json()["cp_handler"] == {"cp_comm_strategy": "alltoall"}
    with patch_environment(accelerate_use_parallelism_config="true"):
        found = Accelerator().parallelism_config
    assert found is not None
    assert found.total_size == 1


def test_a_launch_may_divide_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"dp_shard_size": 2, "cp_size": 2, "cp_comm_strategy": "alltoall"}
    monkeypatch.setattr(context.current(), "accelerator_defaults", {"parallelism_config": chosen})
    found = arguments.resolve_parallelism(None, None)
    assert found is not None
    assert (found.dp_shard_size, found.cp_size, found.tp_size) == (2, 2, 1)
    assert found.cp_handler == TorchContextParallelConfig("alltoall")
    own = ParallelismConfig(tp_size=2)
    assert arguments.resolve_parallelism(own, None) is own


def test_a_lone_process_needs_no_mesh() -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig())
    assert accelerator.torch_device_mesh is None
    with accelerator.maybe_context_parallel(buffers=[torch.ones(2)], buffer_seq_dims=[0]):
        assert accelerator.tensor_parallel_rank == accelerator.data_parallel_rank == 0


# --- context parallelism ----------------------------------------------------------------------------------------------


def _cut_sequences(sizes: dict[str, int] | None) -> list[float]:
    """Shard sequences for layers without attention, which needs a GPU: each token is computed separately."""
    arguments.check_context_parallel = lambda *_: None  # type: ignore[assignment]  # as on a GPU
    accelerator = Accelerator(parallelism_config=None if sizes is None else ParallelismConfig(**sizes))
    model = _network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(3):
        inputs = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))
        targets = inputs.sum(dim=2, keepdim=True).sin()
        with accelerator.maybe_context_parallel(buffers=[inputs, targets], buffer_seq_dims=[1, 1]):
            assert inputs.shape[1] == (8 if sizes is None else 4)
            loss = (model(inputs) - targets).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert inputs.shape[1] == 8
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


@pytest.mark.parametrize(
    ("num_ranks", "sizes"), [(2, {"cp_size": 2}), (4, {"dp_shard_size": 2, "cp_size": 2})]
)
def test_sequences_are_cut_and_gradients_averaged(num_ranks: int, sizes: dict[str, int]) -> None:
    (expected,) = ranks.run(_cut_sequences, 1, None)
    for losses in ranks.run(_cut_sequences, num_ranks, sizes):
        assert losses == pytest.approx(expected, rel=1e-5)
