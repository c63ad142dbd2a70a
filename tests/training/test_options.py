"""The option classes are plain dataclasses that scripts assign to, subclass and compare."""

from __future__ import annotations

from dataclasses import dataclass

import accelerate.utils
import numpy as np
import pytest

from nblaunch import Accelerator, DataLoaderConfiguration, DistributedType, GradientAccumulationPlugin, utils
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
