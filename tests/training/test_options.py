"""The option classes are plain dataclasses that scripts assign to, subclass and compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import accelerate.utils
import numpy as np
import pytest

from nblaunch import (
    Accelerator,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    context,
    utils,
)
from nblaunch.training.options import DistributedDataParallelKwargs, KwargsHandler, TorchDynamoPlugin


@dataclass
class Own(KwargsHandler):
    a: int = 0
    b: bool = False


@dataclass
class OwnDdp(DistributedDataParallelKwargs):
    note: str = ""


def test_subclasses_are_ordinary_dataclasses() -> None:
    assert Own(a=2).to_kwargs() == {"a": 2}
    assert OwnDdp(find_unused_parameters=True).to_kwargs() == {"find_unused_parameters": True}


def test_a_handler_of_a_subclass_takes_effect() -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[OwnDdp(find_unused_parameters=True)])
    assert accelerator.ddp_handler is not None
    assert accelerator.ddp_handler.find_unused_parameters
    with pytest.raises(ValueError, match="more than one DistributedDataParallelKwargs"):
        Accelerator(kwargs_handlers=[OwnDdp(), DistributedDataParallelKwargs()])


def test_assigned_fields_are_checked_on_use() -> None:
    config = DataLoaderConfiguration()
    config.data_seed = 42
    assert Accelerator(cpu=True, dataloader_config=config).dataloader_config.data_seed == 42
    config.data_seed = -1
    with pytest.raises(ValueError, match="data_seed=-1"):
        Accelerator(cpu=True, dataloader_config=config)
    assert type(GradientAccumulationPlugin(np.int64(4)).num_steps) is int
    plugin = GradientAccumulationPlugin()
    plugin.num_steps = 0
    with pytest.raises(ValueError, match="num_steps=0"):
        Accelerator(cpu=True, gradient_accumulation_plugin=plugin)


def test_the_dynamo_backend_may_be_none() -> None:
    assert not TorchDynamoPlugin(backend=None).is_on


@pytest.mark.parametrize("name", ["DistributedType", "PrecisionType", "RNGType", "DynamoBackend"])
def test_enum_members_can_be_compared(name: str) -> None:
    own, theirs = getattr(utils, name), getattr(accelerate.utils, name)
    assert {member.name: member.value for member in theirs}.items() <= {m.name: m.value for m in own}.items()
    assert DistributedType.NO != DistributedType.MULTI_XPU


def test_a_dynamo_plugin_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_ts_nvfuser")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    plugin = TorchDynamoPlugin()
    assert plugin.to_kwargs() == {"backend": "aot_ts_nvfuser", "mode": "reduce-overhead"}
    assert TorchDynamoPlugin(backend="eager", mode="default").to_kwargs() == {
        "backend": "eager",
        "mode": "default",
    }
    unknown = TorchDynamoPlugin(backend="nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        Accelerator(dynamo_plugin=unknown)


@pytest.fixture
def launch_sets(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets what the launch sets in arguments of ``Accelerator``."""

    def set_fields(**plugins: Any) -> None:
        monkeypatch.setattr(context.current(), "accelerator_defaults", plugins)

    return set_fields


def test_a_plugin_of_the_script_completes_its_fields_from_the_launch(
    launch_sets: Callable[..., None],
) -> None:
    """As in Accelerate, a script passes a plugin for the fields that the configuration file does not have."""
    launch_sets(
        fsdp_plugin={
            "state_dict_type": "FULL_STATE_DICT", "transformer_cls_names_to_wrap": ["Block"], "cpu_offload": True,
            "reshard_after_forward": False,
        },
        deepspeed_plugin={"zero_stage": 1, "gradient_clipping": 0.5},
        dynamo_plugin={"backend": "eager", "mode": "max-autotune", "fullgraph": True},
        parallelism_config={"tp_size": 2, "dp_shard_size": 2},
    )  # fmt: skip
    sharding = FullyShardedDataParallelPlugin(
        activation_checkpointing=True, state_dict_type="SHARDED_STATE_DICT"
    )
    assert (sharding.activation_checkpointing, sharding.state_dict_type) == (True, "SHARDED_STATE_DICT")
    assert (sharding.transformer_cls_names_to_wrap, sharding.cpu_offload) == (["Block"], True)
    assert sharding.reshard_after_forward is False
    assert FullyShardedDataParallelPlugin(sharding_strategy="FULL_SHARD").reshard_after_forward is True
    assert FullyShardedDataParallelPlugin(cpu_offload=False).cpu_offload is False

    deepspeed = DeepSpeedPlugin(gradient_clipping=1.0)
    assert (deepspeed.zero_stage, deepspeed.gradient_clipping) == (1, 1.0)
    of_script = DeepSpeedPlugin({"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"})
    assert (of_script.zero_stage, of_script.gradient_clipping) == (3, 0.5)

    compiler = TorchDynamoPlugin(backend="inductor")
    assert (compiler.backend, compiler.mode, compiler.fullgraph) == ("inductor", "max-autotune", True)
    assert TorchDynamoPlugin(fullgraph=False).to_kwargs() == {"backend": "eager", "mode": "max-autotune"}

    sizes = ParallelismConfig(tp_size=4)
    assert (sizes.tp_size, sizes.dp_shard_size, sizes.cp_size) == (4, 2, 1)


def test_a_deepspeed_file_of_the_launch_gives_way_to_a_configuration_of_the_script(
    launch_sets: Callable[..., None],
) -> None:
    launch_sets(
        deepspeed_plugin={"hf_ds_config": {"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}}
    )
    of_launch = DeepSpeedPlugin(gradient_clipping=0.7)
    assert (of_launch.zero_stage, of_launch.gradient_clipping) == (1, 0.7)
    assert DeepSpeedPlugin({"zero_optimization": {"stage": 3}}).zero_stage == 3


def test_plugins_made_in_a_kernel_need_no_context() -> None:
    context.take()
    FullyShardedDataParallelPlugin()
    DeepSpeedPlugin()
    assert context.take() is None
