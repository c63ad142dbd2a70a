"""DeepSpeed's engine behind ``prepare``, on real ranks: it trains like one process, with an unchanged loop."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import backends, context, env
from nblaunch.errors import CheckpointError
from nblaunch.topology import Topology
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.checkpoints.load_weights import load_checkpoint_in_model
from nblaunch.training.shared_state import get_shared_state
from nblaunch.training.strategies.deepspeed import checkpoint, library
from nblaunch.training.strategies.deepspeed.config import DummyOptim, DummyScheduler
from nblaunch.training.strategies.deepspeed.strategy import DeepSpeedPlugin
from nblaunch.training.strategies.fsdp2.strategy import FullyShardedDataParallelPlugin
from tests.thorough import thorough
from tests.training import ranks

GLOBAL_BATCH = 8
NUM_ROWS = 56  # seven batches, so the last window of an epoch is short
STEPS = 2
# Tolerance for losses, norms and weights, which change by up to 0.16: Adam amplifies rounding errors of tiny gradients,
# and these errors differ between processors.
TOLERANCE = 1e-3
MAX_NORM = 2.0


def _module() -> nn.Module:
    torch.manual_seed(0)
    # not a multiple of the number of ranks
    return nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1))


def _loader(world_size: int = 1) -> DataLoader:
    inputs = torch.randn(NUM_ROWS, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    return DataLoader(data, batch_size=GLOBAL_BATCH // world_size)


def _epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, max_norm: float) -> list[Any]:
    """Return the global loss of every micro-step, and the norms from clipping."""
    results: list[Any] = []
    for x, y in loader:
        with accelerator.accumulate(model):
            output = model(x)
            assert output.dtype == torch.float32
            loss = (output - y).square().mean()
            accelerator.backward(loss)
            norm = None
            if accelerator.sync_gradients and max_norm:
                norm = accelerator.clip_grad_norm_(model.parameters(), max_norm).item()
            optimizer.step()
            optimizer.zero_grad()
        results.append((accelerator.reduce(loss.detach(), "mean").item(), norm))
    return results


def _prepare(accelerator: Accelerator, module: nn.Module | None = None) -> Any:
    module = module or _module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    return accelerator.prepare(module, optimizer, _loader(accelerator.num_processes))


def _train(
    plugin: DeepSpeedPlugin | None, precision: str = "no", epochs: int = 2, compiler: str = "no"
) -> SimpleNamespace:
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=STEPS,
        mixed_precision=precision,
        dynamo_backend=compiler,
    )
    module = _module()
    model, optimizer, loader = _prepare(accelerator, module)
    results = [one for _ in range(epochs) for one in _epoch(accelerator, model, optimizer, loader, MAX_NORM)]
    weights = accelerator.get_state_dict(model)
    return SimpleNamespace(
        losses=[loss for loss, _ in results],
        norms=[norm for _, norm in results if norm is not None],
        weights={name: value.float() for name, value in weights.items()},
        kind=str(accelerator.distributed_type),
        is_compiled=module._compiled_call_impl is not None,
        is_own=accelerator.unwrap_model(model) is module,
        gradients=[p.grad for p in model.parameters() if p.grad is not None],
        optimizer=type(optimizer).__name__,
    )


def _same(ours: SimpleNamespace, alone: SimpleNamespace, tolerance: float = TOLERANCE) -> None:
    assert ours.losses == pytest.approx(alone.losses, abs=tolerance, rel=tolerance)
    assert ours.norms == pytest.approx(alone.norms, abs=tolerance, rel=tolerance)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def alone() -> SimpleNamespace:
    """Train on the same data in one process, without DeepSpeed."""
    context.install(context.ProcessContext(Topology(), backends.choose("cpu")))
    return _train(None)


@pytest.fixture(scope="module", autouse=True)
def server_with_deepspeed(rank_server: None) -> Iterator[None]:
    """Fork ranks from a process that has imported DeepSpeed, like a notebook."""
    ranks.stop_server()
    with env.patched({"DS_ACCELERATOR": "cpu"}):
        ranks.start_server("tests.training.strategies.deepspeed_imports", __name__)
        yield


# --- as one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "world_size"), [thorough(0, 2), (1, 2), (2, 2), thorough(2, 4), (3, 2), thorough(3, 4)]
)
def test_training_equals_a_single_process(stage: int, world_size: int, alone: SimpleNamespace) -> None:
    # shard small ones, too
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    main, *others = ranks.run(_train, world_size, DeepSpeedPlugin({"zero_optimization": zero}))
    _same(main, alone)
    assert main.losses[-1] < main.losses[0] / 2
    assert main.kind == "DistributedType.DEEPSPEED"
    assert main.optimizer == "EngineOptimizer"
    assert main.is_own
    assert not main.gradients  # the engine has cleared them
    assert all(other.losses == main.losses and not other.weights for other in others)


@pytest.mark.parametrize(
    "plugin",
    [
        DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="cpu"),
        DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu", offload_param_device="cpu"),
    ],
    ids=["optimizer", "optimizer and weights"],
)
def test_offloading_to_the_host_changes_nothing(plugin: DeepSpeedPlugin, alone: SimpleNamespace) -> None:
    _same(ranks.run(_train, 2, plugin)[0], alone)


def test_an_engine_trains_without_a_job(alone: SimpleNamespace) -> None:
    def lone() -> SimpleNamespace:
        context.install(context.ProcessContext(Topology(), backends.choose("cpu")))
        return _train(DeepSpeedPlugin(zero_stage=3))

    _same(ranks.run(lone, 1)[0], alone)


def test_the_module_inside_the_engine_is_compiled(alone: SimpleNamespace) -> None:
    def compiled() -> SimpleNamespace:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "default"
            )  # torch's compiler traces warnings, and takes an error for its own
            return _train(DeepSpeedPlugin(zero_stage=2), compiler="eager")

    results = ranks.run(compiled, 2)[0]
    assert results.is_compiled
    assert results.is_own
    _same(results, alone)


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_keeps_weights_in_16_bits_and_trains_alike(stage: int, alone: SimpleNamespace) -> None:
    def train() -> tuple[SimpleNamespace, set[torch.dtype]]:
        trained = _train(DeepSpeedPlugin(zero_stage=stage), "bf16")
        return trained, {value.dtype for value in Accelerator().get_state_dict(_last_model()).values()}

    def _last_model() -> Any:
        return next(iter(context.current().training.models))

    trained, dtypes = ranks.run(train, 2)[0]
    assert trained.losses == pytest.approx(alone.losses, rel=0.05, abs=0.1)
    assert trained.losses[-1] < trained.losses[0] / 2
    assert dtypes == {torch.bfloat16}


# --- the loop ---------------------------------------------------------------------------------------------------------


def _by_hand(plugin: DeepSpeedPlugin | None) -> dict[str, torch.Tensor]:
    """Train with a loop that defines its own windows."""
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model, optimizer, loader = _prepare(accelerator)
    for number, (x, y) in enumerate(loader):
        if number % 2 == 0:
            with accelerator.no_sync(model):
                accelerator.backward((model(x) - y).square().mean() / 2)
            continue
        accelerator.backward((model(x) - y).square().mean() / 2)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_manual_accumulation_windows_are_kept(stage: int) -> None:
    ours = ranks.run(_by_hand, 2, DeepSpeedPlugin(zero_stage=stage))[0]
    for name, weight in _by_hand(None).items():
        torch.testing.assert_close(ours[name], weight, atol=TOLERANCE, rtol=TOLERANCE)


def _divided_by_the_loop(options: dict[str, bool], divisor: int) -> tuple[dict[str, torch.Tensor], int]:
    plugin = DeepSpeedPlugin({"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}})
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model, optimizer, loader = _prepare(accelerator)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean() / divisor, **options)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model), accelerator.gradient_accumulation_steps


def test_scale_wrt_gas_leaves_the_loss_undivided() -> None:
    # transformers' Trainer does the same.
    weights, num_steps = ranks.run(_divided_by_the_loop, 2, {"scale_wrt_gas": False}, 2)[0]
    expected, _ = ranks.run(_divided_by_the_loop, 2, {}, 1)[0]
    assert num_steps == 2
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight)


CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": STEPS,
    "gradient_clipping": MAX_NORM,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"
        },
    },
}  # fmt: skip


def _by_file(path: str) -> dict[str, Any]:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(path))
    module = _module()
    optimizer = DummyOptim(module.parameters(), lr=0.02, weight_decay=0.01)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=4)
    scheduler, optimizer, model, loader = accelerator.prepare(
        scheduler, optimizer, module, _loader(accelerator.num_processes)
    )
    rates, losses = [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {
        "rates": rates,
        "losses": losses,
        "steps": accelerator.gradient_accumulation_steps,
        "batch": model.train_batch_size(),
        "adam": type(model.basic_optimizer),
        "decay": optimizer.param_groups[0]["weight_decay"],
    }


def test_a_configuration_file_describes_the_whole_training(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    results = ranks.run(_by_file, 2, str(path))[0]
    assert results["steps"] == STEPS
    assert results["batch"] == GLOBAL_BATCH * STEPS
    assert results["adam"] is torch.optim.AdamW  # nothing is compiled for the CPU
    assert results["decay"] == 0.01
    # Seven micro-steps, four steps: the rate rises with the engine's steps, not with the calls, in four equal steps.
    assert results["rates"] == pytest.approx([0.02 * part / 4 for part in (0, 0, 0, 1, 1, 2, 3)])
    # The configuration clips; the loop does not.
    context.install(context.ProcessContext(Topology(), backends.choose("cpu")))
    assert results["losses"][:STEPS] == pytest.approx(_train(None, epochs=1).losses[:STEPS], abs=TOLERANCE)


def test_a_schedule_of_torch_follows_the_steps() -> None:
    def train(plugin: DeepSpeedPlugin | None) -> list[float]:
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=STEPS)
        module = _module()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        model, optimizer, scheduler, loader = accelerator.prepare(
            module, optimizer, scheduler, _loader(accelerator.num_processes)
        )
        rates = []
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean() * 1e-3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    # A schedule is written for one process; with two, it advances twice as fast, as without DeepSpeed.
    assert ranks.run(train, 2, DeepSpeedPlugin(zero_stage=2))[0] == ranks.run(train, 2, None)[0]


def _modes() -> list[bool]:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
    model, *_ = _prepare(accelerator)
    shared = get_shared_state()
    seen = [shared.is_training]
    model.eval()
    seen.append(shared.is_training)
    model.train()
    return [*seen, shared.is_training]


def test_a_loop_in_evaluation_mode_is_not_an_epoch() -> None:
    assert ranks.run(_modes, 2) == [[True, False, True]] * 2


# --- saved states -----------------------------------------------------------------------------------------------------


def _save(stage: int, precision: str, folder: str) -> tuple[list[Any], list[Any]]:
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage),
        gradient_accumulation_steps=STEPS,
        mixed_precision=precision,
    )
    parts = _prepare(accelerator)
    _epoch(accelerator, *parts, MAX_NORM)
    accelerator.save_state(folder)
    further = _epoch(accelerator, *parts, MAX_NORM)
    accelerator.load_state(folder)  # in the same process, whose engine has continued
    return further, _epoch(accelerator, *parts, MAX_NORM)


def _resume(stage: int, precision: str, folder: str) -> list[Any]:
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage),
        gradient_accumulation_steps=STEPS,
        mixed_precision=precision,
    )
    parts = _prepare(accelerator)
    accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())  # like diffusers' scripts
    accelerator.load_state(folder)
    return _epoch(accelerator, *parts, MAX_NORM)


@pytest.mark.parametrize(
    ("stage", "precision", "world_size"),
    [
        *((1, "no", 1), (2, "bf16", 2), (3, "no", 2)),
        *(thorough(0, "no", 2), thorough(2, "no", 4), thorough(3, "bf16", 4)),
    ],
)
def test_training_resumes_on_any_number_of_ranks(
    stage: int, precision: str, world_size: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "state")
    further, again = ranks.run(_save, 2, stage, precision, folder)[0]
    assert again == further
    resumed = ranks.run(_resume, world_size, stage, precision, folder)[0]
    if world_size == 2:
        assert resumed == further
    tolerance = TOLERANCE if precision == "no" else 0.05
    assert [loss for loss, _ in resumed] == pytest.approx(
        [loss for loss, _ in further], abs=tolerance, rel=tolerance
    )
    assert [path.name for path in tmp_path.iterdir()] == ["state"]  # the converted checkpoint is gone


def _save_whole(folder: str) -> None:
    accelerator = Accelerator()
    _prepare(accelerator)
    accelerator.save_state(folder)


def test_misfit_checkpoints_are_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    ranks.run(_save_whole, 2, str(tmp_path / "whole"))
    ranks.run(_save, 2, 2, "no", str(folder))

    def rejected(stage: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            _resume(stage, "no", str(folder))
        return str(caught.value)

    assert (
        "was saved with zero_optimization.stage=1 or 2, but this engine has stage 3"
        in ranks.run(rejected, 2, 3)[0]
    )
    folder, sharded = tmp_path / "whole", folder
    assert "saved without DeepSpeed" in ranks.run(rejected, 2, 2)[0]
    folder = sharded
    damaged = next((folder / "pytorch_model").glob("*rank_1*"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert f"{damaged.name} has 100 bytes" in ranks.run(rejected, 2, 2)[0]


def test_misfit_weights_beside_an_engine_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    process: Any = None  # only engines have optimizer states
    torch.save(nn.Linear(2, 1).state_dict(), path)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin does not fit .* size mismatch for weight"):
        checkpoint.load(tmp_path, [nn.Linear(1, 1)], process)
    path.write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin does not fit .*, or is damaged"):
        checkpoint.load(tmp_path, [nn.Linear(1, 1)], process)


def test_a_failed_save_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    def fail(folder: str) -> tuple[str, list[str]]:
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
        model, optimizer, loader = _prepare(accelerator)
        accelerator.save_state(folder)
        before = sorted(str(path) for path in Path(folder).rglob("*"))
        _epoch(accelerator, model, optimizer, loader, 0.0)

        class Lock:
            def state_dict(self) -> Any:
                raise OSError("no space left")

            def load_state_dict(self, state: Any) -> None: ...

        accelerator.register_for_checkpointing(Lock())
        try:
            accelerator.save_state(folder)
        except Exception as error:
            return str(error), before
        return "", before

    folder = tmp_path / "state"
    message, before = ranks.run(fail, 2, str(folder))[0]
    assert "no space left" in message
    assert sorted(str(path) for path in folder.rglob("*")) == before


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_weights_of_stage_3_are_saved_as_a_whole(precision: str, tmp_path: Path) -> None:
    def save(folder: str) -> dict[str, torch.Tensor]:
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3), mixed_precision=precision)
        module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.LayerNorm(8))
        module[1].weight = module[0].weight  # tied
        model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        accelerator.backward(model(torch.randn(4, 8)).sum())
        optimizer.step()
        accelerator.save_model(model, folder)
        return accelerator.get_state_dict(model)

    folder = tmp_path / "model"
    main, other = ranks.run(save, 2, str(folder))
    assert not other
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.LayerNorm(8))
    module[1].weight = module[0].weight
    load_checkpoint_in_model(module, folder, strict=True)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, main[name].to(value.dtype))
    assert main["0.weight"].dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)


# --- several models ---------------------------------------------------------------------------------------------------


def test_a_student_is_trained_beside_a_teacher_in_parts() -> None:
    def distil() -> tuple[float, float, bool, str]:
        plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
        accelerator = Accelerator(deepspeed_plugins=plugins)
        student, optimizer, loader = _prepare(accelerator)
        accelerator.state.select_deepspeed_plugin("teacher")
        torch.manual_seed(5)
        teacher = accelerator.prepare(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)))
        losses = []
        for _ in range(3):
            for x, _ in loader:
                with torch.no_grad():
                    wanted = teacher(x)
                loss = (student(x) - wanted).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                losses.append(loss.item())
        weights = accelerator.get_state_dict(teacher)
        torch.manual_seed(5)
        expected = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)).state_dict()
        is_kept = all(torch.equal(weights[name], expected[name]) for name in weights)
        return losses[0], losses[-1], is_kept, str(accelerator.deepspeed_plugin.zero_stage)

    first, last, is_kept, stage = ranks.run(distil, 2)[0]
    assert last < first / 2
    assert is_kept
    assert stage == "3"


def test_only_deepspeeds_warnings_are_silenced() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            library.quieten()
            warnings.warn("the loop's own", UserWarning, stacklevel=1)
            warnings.warn(
                "`torch.distributed.all_gather_into_tensor` is deprecated", FutureWarning, stacklevel=1
            )
    assert [str(one.message) for one in caught] == ["the loop's own"]


# --- rejections -------------------------------------------------------------------------------------------------------


def test_missing_deepspeed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *args: None if name == "deepspeed" else find_spec(name, *args),
    )
    monkeypatch.delitem(__import__("sys").modules, "deepspeed", raising=False)
    with pytest.raises(ImportError, match="pip install deepspeed"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin())


def test_versions_with_training_bugs_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin())
    model = nn.Linear(2, 2)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.6")
    with pytest.raises(ImportError, match=r"0\.17\.6.* pip install -U deepspeed"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"deepspeed_plugin": DeepSpeedPlugin(gradient_accumulation_steps=4), "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=4, which contradicts",
        ),
        (
            {"deepspeed_plugin": DeepSpeedPlugin({"zero_optimization": {}, "bf16": {"enabled": True}}),
             "mixed_precision": "no"},
            "bf16.enabled=True, which contradicts mixed_precision='no'",
        ),
        (
            {"deepspeed_plugin": DeepSpeedPlugin({"zero_optimization": {}, "fp16": {"enabled": True}})},
            "fp16.enabled=True, which can't be used on cpu",
        ),
        ({"deepspeed_plugin": DeepSpeedPlugin(), "mixed_precision": "fp16"}, "can't be used with DeepSpeed"),
        ({"deepspeed_plugin": DeepSpeedPlugin(), "deepspeed_plugins": {"a": DeepSpeedPlugin()}}, "both given"),
        (
            {"deepspeed_plugin": DeepSpeedPlugin(), "fsdp_plugin": FullyShardedDataParallelPlugin()},
            "deepspeed_plugin and fsdp_plugin were both given",
        ),
        ({"deepspeed_plugins": {}}, "has no plugin"),
    ],
)  # fmt: skip
def test_contradictions_are_rejected_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Accelerator(**arguments)


def test_plugins_of_another_library_are_rejected_by_type() -> None:
    with pytest.raises(TypeError, match=r"nblaunch\.DeepSpeedPlugin"):
        Accelerator(deepspeed_plugin=SimpleNamespace(zero_stage=2))  # type: ignore[arg-type]


def test_precision_and_accumulation_of_the_configuration_hold() -> None:
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 3}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(config))
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 3
    # like a trainer's second Accelerator
    assert Accelerator().deepspeed_plugin is accelerator.deepspeed_plugin
    with pytest.raises(ValueError, match=r"'teacher'.*'default'"):
        accelerator.state.get_deepspeed_plugin("teacher")


def test_prepare_needs_all_objects_of_an_engine() -> None:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin())
    module = _module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="to prepare without its model"):
        accelerator.prepare(optimizer)
    with pytest.raises(ValueError, match="2 models"):
        accelerator.prepare(module, _module(), optimizer)
    accelerator.free_memory()
    model = accelerator.prepare(module)  # for evaluation
    assert model is module
    with pytest.raises(ValueError, match=r"backward .*prepared"):
        accelerator.backward(model(torch.ones(2, 8)).sum())


def test_placeholders_need_a_deepspeed_plugin() -> None:
    with pytest.raises(ValueError, match="needs Accelerator"):
        Accelerator().prepare(DummyOptim(_module().parameters()))
    with pytest.raises(ValueError, match="needs Accelerator"):
        Accelerator().prepare(DummyScheduler(None))
    with pytest.raises(ValueError, match="no DeepSpeed plugins"):
        Accelerator().state.select_deepspeed_plugin("teacher")


def test_unsupported_operations_of_an_engine_are_rejected() -> None:
    def problems() -> list[str]:
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1, gradient_clipping=1.0))
        module = _module()
        model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 8)).sum())
        parameters = list(model.parameters())
        calls: list[Any] = [
            lambda: accelerator.clip_grad_value_(parameters, 1.0),
            lambda: accelerator.clip_grad_norm_(parameters, 1.0, norm_type=1.0),
            lambda: accelerator.clip_grad_norm_(parameters, 0.5),
            lambda: accelerator.clip_grad_norm_(parameters[:2], 1.0),
            lambda: optimizer.step(lambda: 0.0),
            lambda: accelerator.backward(model(torch.ones(2, 8)).sum()),
            lambda: accelerator.prepare(_module(), torch.optim.SGD(_module().parameters(), lr=0.1)),
        ]
        results = []
        for call in calls:
            try:
                call()
            except ValueError as error:
                results.append(str(error))
        accelerator.free_memory()
        again, _ = accelerator.prepare(*_fresh())  # the earlier engine is gone
        return [*results, type(again).__name__]

    def _fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = _module()
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    value, norm, contradiction, part, closure, twice, second, again = ranks.run(problems, 1)[0]
    assert "clip_grad_value_ can't be used with DeepSpeed" in value
    assert "norm_type=1.0" in norm
    assert "max_norm=0.5) contradicts gradient_clipping=1.0" in contradiction
    assert "got 2 trainable parameters, but DeepSpeed clips all 4" in part
    assert "closure" in closure
    assert "backward was called twice without optimizer.step()" in twice
    assert "trains a Sequential with DeepSpeed" in second
    assert again == "DeepSpeedEngine"
