"""DeepSpeed's configuration: "auto" values are filled in from prepared objects, contradictions are rejected by key."""

from __future__ import annotations

import base64
import gc
import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch.training.strategies.deepspeed import config as deepspeed_config
from nblaunch.training.strategies.deepspeed.config import (
    DummyOptim,
    DummyScheduler,
    EngineInputs,
    HfDeepSpeedConfig,
    complete,
)
from nblaunch.training.strategies.deepspeed.strategy import DeepSpeedPlugin

MODEL = nn.Linear(3, 2)  # 8 parameters
ADAM = torch.optim.Adam(MODEL.parameters())

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}


def _complete(config: dict[str, Any], **prepared: Any) -> dict[str, Any]:
    return complete(DeepSpeedPlugin(config).deepspeed_config, EngineInputs(**{"model": MODEL, **prepared}))


@pytest.mark.parametrize("asked", ["no", "fp16", "bf16", "fp8"])
@pytest.mark.parametrize("given", [{}, {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}])
def test_the_precision_fills_an_open_configuration(asked: str, given: dict[str, Any]) -> None:
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 1}, **given})
    plugin.set_mixed_precision(asked)
    config = plugin.deepspeed_config
    assert config["fp16"]["enabled"] is (asked == "fp16")
    assert config["bf16"]["enabled"] is (asked in ("bf16", "fp8"))
    assert config["fp16"].get("auto_cast", False) is (asked == "fp16" and not given)


def test_contradictory_precisions_are_rejected() -> None:
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}})
    with pytest.raises(
        ValueError, match="cannot be set to `fp16` when `bf16` is set in the DeepSpeed config"
    ):
        plugin.set_mixed_precision("fp16")
    with pytest.raises(ValueError, match="fp5"):
        plugin.set_mixed_precision("fp5")
    plugin.set_mixed_precision("no")
    assert plugin.deepspeed_config["bf16"]["enabled"] is True


def test_transformers_sees_the_configuration_while_the_plugin_lives() -> None:
    pytest.importorskip("deepspeed")
    from transformers.integrations import deepspeed as integration

    plugin = DeepSpeedPlugin({**AUTO, "zero_optimization": {"stage": 3}})
    plugin.set_deepspeed_weakref()
    assert integration.is_deepspeed_zero3_enabled()
    assert integration.deepspeed_config()["train_micro_batch_size_per_gpu"] == 1
    assert "train_batch_size" not in integration.deepspeed_config()
    assert plugin.deepspeed_config["train_batch_size"] == "auto"
    del plugin
    gc.collect()
    assert not integration.is_deepspeed_zero3_enabled()


def test_later_changes_by_a_trainer_reach_the_engine() -> None:
    """transformers knows the number of steps only when it trains, long after the plugin was created."""
    params = {"warmup_num_steps": "auto", "total_num_steps": "auto"}
    given = HfDeepSpeedConfig({**AUTO, "scheduler": {"type": "WarmupDecayLR", "params": params}})
    plugin = DeepSpeedPlugin(given)
    given.config["scheduler"]["params"] = {"warmup_num_steps": 7, "total_num_steps": 90}
    config = complete(plugin.deepspeed_config, EngineInputs(MODEL, ADAM, DummyScheduler(ADAM)))
    assert config["scheduler"]["params"] == {"warmup_num_steps": 7, "total_num_steps": 90}


def test_a_trainer_fills_in_auto_values(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import propagate_args_to_deepspeed

    plugin = DeepSpeedPlugin(zero_stage=3)
    assert plugin.hf_ds_config.is_zero3()
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, gradient_accumulation_steps=3, max_grad_norm=0.5
    )
    propagate_args_to_deepspeed(accelerator, arguments)
    assert plugin.get_value("gradient_accumulation_steps") == 3
    assert plugin.get_value("gradient_clipping") == 0.5
    assert plugin.get_value("train_micro_batch_size_per_gpu") == arguments.per_device_train_batch_size


@pytest.mark.parametrize("kit", ["nblaunch", "accelerate"])
def test_a_deepspeed_configuration_answers_questions(kit: str, tmp_path: Path) -> None:
    Config = importlib.import_module(f"{kit}.utils.deepspeed").HfDeepSpeedConfig
    config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": True},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    for source in (config, str(path)):
        asked = Config(source)
        assert asked.config == config
        assert (asked.is_zero2(), asked.is_zero3(), asked.is_offload()) == (False, True, True)
        assert asked.get_value("zero_optimization.offload_param.device") == "cpu"
        assert asked.get_value("fp16.enabled", 7) == 7
        assert asked.is_true("bf16.enabled")
        assert (asked.is_true("fp16.enabled"), asked.is_false("fp16.enabled")) == (False, False)
        assert asked.find_config_node("bf16.enabled") == ({"enabled": True}, "enabled")
        assert asked.find_config_node("fp16.enabled")[0] is None
        asked.del_config_sub_tree("zero_optimization")
        assert asked.get_value("zero_optimization.stage") is None
        with pytest.raises(ValueError, match="fp16"):
            asked.del_config_sub_tree("fp16.enabled", must_exist=True)
    assert not Config({"zero_optimization": {"stage": 2}}).is_offload()


# --- the plugin -------------------------------------------------------------------------------------------------------


def test_fields_make_a_configuration() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=0.5, offload_param_device="cpu")
    zero = plugin.deepspeed_config["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_param"]["device"] == "cpu"
    assert zero["offload_optimizer"]["device"] == "none"
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert plugin.get_value("gradient_clipping") == 0.5
    assert plugin.is_auto("gradient_accumulation_steps")
    assert plugin.get_value("zero_optimization.nothing", 7) == 7


def test_a_configuration_fills_in_fields() -> None:
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4})
    assert plugin.zero_stage == 1
    assert plugin.gradient_accumulation_steps == 4
    assert plugin.gradient_clipping == "auto"
    assert DeepSpeedPlugin({"zero_optimization": {}}).zero_stage == 0  # the form that DeepSpeed accepts


@pytest.mark.parametrize("kind", ["dict", "file", "home", "path", "text", "base64", "object"])
def test_configurations_can_be_files_or_dicts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = {"zero_optimization": {"stage": 3}}
    text = json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    source: Any = {
        "dict": config,
        "file": str(tmp_path / "config.json"),
        "home": "~/config.json",
        "path": tmp_path / "config.json",
        "text": text,
        "base64": base64.urlsafe_b64encode(text.encode()).decode(),
        "object": SimpleNamespace(config=config),
    }[kind]
    plugin = DeepSpeedPlugin(source)
    assert plugin.zero_stage == 3
    plugin.deepspeed_config["zero_optimization"]["stage"] = 1
    assert config == {"zero_optimization": {"stage": 3}}  # a copy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hf_ds_config": "no/such/file.json"}, "there is no DeepSpeed configuration"),
        ({"hf_ds_config": "{"}, "is not JSON"),
        ({"hf_ds_config": {}}, "has no 'zero_optimization'"),
        ({"zero_stage": 4}, "zero_optimization.stage=4"),
        ({"offload_optimizer_device": "gpu"}, "zero_optimization.offload_optimizer.device='gpu'"),
        ({"offload_optimizer_device": "nvme", "zero_stage": 3}, "needs zero_optimization.offload_optimizer.nvme_path"),
        ({"offload_param_device": "cpu", "zero_stage": 2}, "offload_param.device='cpu' needs stage 3"),
        ({"offload_optimizer_device": "cpu", "zero_stage": 0}, "stages 1 to 3"),
        (
            {"hf_ds_config": {"zero_optimization": {"stage": 3}}, "zero_stage": 2},
            r"zero_optimization.stage=3, which contradicts DeepSpeedPlugin\(zero_stage=2\)",
        ),
        (
            {"hf_ds_config": AUTO | {"gradient_clipping": 1.0}, "gradient_clipping": 0.5},
            "gradient_clipping=1.0, which contradicts",
        ),
    ],
)  # fmt: skip
def test_contradictory_plugins_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeedPlugin(**fields)


def test_a_configuration_of_another_kind_is_rejected() -> None:
    with pytest.raises(TypeError, match="not 3"):
        DeepSpeedPlugin(3)


@pytest.mark.parametrize(
    "fields", [{"zero3_init_flag": True}, {"enable_msamp": True}, {"msamp_opt_level": "O1"}]
)
def test_unsupported_fields_are_rejected_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(fields))):
        DeepSpeedPlugin(**fields)


# --- filling in -------------------------------------------------------------------------------------------------------


def test_batches_come_from_the_loaders() -> None:
    config = _complete(AUTO, batch_sizes=[16, 8, None], world_size=2, num_steps=3)
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["gradient_accumulation_steps"] == 3
    assert config["train_batch_size"] == 48
    largest = _complete(AUTO, batch_sizes=[16, 8], is_train_batch_min=False)
    assert largest["train_micro_batch_size_per_gpu"] == 16
    split = _complete(AUTO, batch_sizes=[16], world_size=4, splits_batches=True)
    assert (split["train_micro_batch_size_per_gpu"], split["train_batch_size"]) == (4, 16)


def test_without_loaders_the_configuration_sets_the_batch_size() -> None:
    assert _complete(AUTO)["train_micro_batch_size_per_gpu"] == 1
    config = _complete(AUTO | {"train_batch_size": 24}, world_size=2, num_steps=3)
    assert config["train_micro_batch_size_per_gpu"] == 4


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_precision(precision: str) -> None:
    for source in (AUTO, {"zero_optimization": {"stage": 2}}):
        config = _complete(source, precision=precision)
        assert config["bf16"]["enabled"] is (precision == "bf16")
        assert config["fp16"]["enabled"] is (precision == "fp16")


def test_without_settings_gradients_are_not_clipped() -> None:
    assert _complete(AUTO)["gradient_clipping"] == 0.0
    assert _complete(AUTO | {"gradient_clipping": 2.0})["gradient_clipping"] == 2.0


def test_buckets_follow_the_hidden_size() -> None:
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    for described in (
        SimpleNamespace(hidden_size=10),
        SimpleNamespace(hidden_sizes=[3, 10]),
        SimpleNamespace(text_config=SimpleNamespace(hidden_size=10)),
    ):
        model = nn.Linear(3, 2)
        model.config = described
        filled = _complete({"zero_optimization": zero}, model=model)["zero_optimization"]
        assert filled["reduce_bucket_size"] == 100
        assert filled["stage3_prefetch_bucket_size"] == 90
        assert filled["stage3_param_persistence_threshold"] == 100
    with pytest.raises(
        ValueError, match=r"zero_optimization.reduce_bucket_size, .*stage3_prefetch_bucket_size"
    ):
        _complete({"zero_optimization": zero})


def test_buckets_are_not_larger_than_the_model() -> None:
    assert _complete(AUTO)["zero_optimization"]["reduce_bucket_size"] == 8
    own = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 100}}
    assert _complete(own)["zero_optimization"]["reduce_bucket_size"] == 100


def test_torch_optimizers_work_with_stages_and_offloading() -> None:
    config = _complete(AUTO, optimizer=ADAM)
    assert config["zero_allow_untested_optimizer"] is True
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert _complete(AUTO | {"zero_force_ds_cpu_optimizer": True}, optimizer=ADAM)[
        "zero_force_ds_cpu_optimizer"
    ]


def test_optimizer_and_scheduler_of_the_configuration() -> None:
    described = AUTO | {
        "optimizer": {
            "type": "AdamW",
            "params": dict.fromkeys(("lr", "weight_decay", "betas", "eps"), "auto"),
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(
                ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
            ),
        },
    }
    optimizer = DummyOptim(MODEL.parameters(), lr=0.5, weight_decay=0.1, betas=(0.8, 0.9))
    scheduler = DummyScheduler(optimizer, total_num_steps=101, warmup_num_steps=10)
    config = _complete(described, optimizer=optimizer, scheduler=scheduler, world_size=2)
    # eps is not set, so it gets the optimizer's default. On the CPU, nothing is compiled.
    assert config["optimizer"]["params"] == {
        "lr": 0.5, "weight_decay": 0.1, "betas": (0.8, 0.9), "torch_adam": True
    }  # fmt: skip
    assert config["scheduler"]["params"] == {
        "warmup_min_lr": 0, "warmup_max_lr": 0.5, "warmup_num_steps": 10, "total_num_steps": 51
    }  # fmt: skip


def test_torch_computes_adam_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    described = AUTO | {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
    optimizer = DummyOptim(MODEL.parameters())
    monkeypatch.setattr(deepspeed_config.shutil, "which", lambda name: f"/usr/bin/{name}")
    config = _complete(described, optimizer=optimizer, device_type="cuda")
    assert "torch_adam" not in config["optimizer"]["params"]
    monkeypatch.setattr(deepspeed_config.shutil, "which", lambda name: None)
    config = _complete(described, optimizer=optimizer, device_type="cuda")
    assert config["optimizer"]["params"]["torch_adam"] is True


def test_completing_does_not_change_the_plugin() -> None:
    plugin = DeepSpeedPlugin(AUTO)
    first = complete(plugin.deepspeed_config, EngineInputs(MODEL, batch_sizes=[8]))
    second = complete(plugin.deepspeed_config, EngineInputs(MODEL, batch_sizes=[4]))
    assert (first["train_batch_size"], second["train_batch_size"]) == (8, 4)
    assert math.isinf(first["steps_per_print"])


@pytest.mark.parametrize(
    ("config", "prepared", "message"),
    [
        ({"gradient_accumulation_steps": 4}, {"num_steps": 2}, "gradient_accumulation_steps=4, which contradicts"),
        ({"bf16": {"enabled": True}}, {}, "bf16.enabled=True, which contradicts mixed_precision='no'"),
        ({"train_micro_batch_size_per_gpu": 8}, {"batch_sizes": [4]}, "train_micro_batch_size_per_gpu=8, but"),
        ({"train_batch_size": 9}, {"batch_sizes": [4]}, "train_batch_size=9, which contradicts .* = 4"),
        ({"optimizer": {"type": "Adam"}}, {"optimizer": ADAM}, "has 'optimizer'"),
        ({}, {"optimizer": DummyOptim([])}, "has no 'optimizer'"),
        ({}, {"scheduler": DummyScheduler(ADAM)}, "has no 'scheduler'"),
        (
            {"scheduler": {"type": "WarmupLR"}},
            {"scheduler": torch.optim.lr_scheduler.StepLR(ADAM, 1)},
            "has 'scheduler'",
        ),
        (
            {"optimizer": {"type": "Adam"}},
            {"optimizer": DummyOptim([]), "scheduler": torch.optim.lr_scheduler.StepLR(ADAM, 1)},
            "DummyOptim",
        ),
        ({"zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}}, {}, "allgather_bucket_size"),
    ],
)  # fmt: skip
def test_contradictions_are_rejected_by_their_keys(
    config: dict[str, Any], prepared: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _complete(AUTO | config, **prepared)
