"""Choosing the modules to gather as units, and rejected options."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

import nblaunch
import nblaunch.utils
from nblaunch import Accelerator, FullyShardedDataParallelPlugin, backends, context
from nblaunch.events import Note
from nblaunch.training.strategies.base import report_shards
from nblaunch.training.strategies.fsdp2 import units as fsdp2_units
from nblaunch.training.strategies.fsdp2.units import return_no_views
from tests.training import ranks
from tests.training.strategies.test_fsdp2 import Block, Network, Tied, network


def _units(model: nn.Module, **settings: Any) -> list[str]:
    plugin = FullyShardedDataParallelPlugin(**settings)
    wanted = (plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap, plugin.min_num_params)
    return [name for name, _ in fsdp2_units.choose(model, *wanted)]


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
LINEARS = [f"{name}.linear" for name in BLOCKS]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, BLOCKS),
        ({"transformer_cls_names_to_wrap": ["Block"]}, BLOCKS),
        ({"transformer_cls_names_to_wrap": "Block, LayerNorm"}, [f"{b}.norm" for b in BLOCKS] + BLOCKS),
        (
            {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Linear"]},
            [*LINEARS, "entry", "exit"],
        ),
        ({"auto_wrap_policy": "no_wrap"}, []),
        ({"auto_wrap_policy": "size_based_wrap"}, []),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 300}, LINEARS),
        ({"min_num_params": 320}, BLOCKS),
        ({"auto_wrap_policy": lambda module: isinstance(module, Block)}, BLOCKS),
        ({"auto_wrap_policy": ModuleWrapPolicy({Block})}, BLOCKS),
        (
            {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=306)},
            [*LINEARS, *BLOCKS],
        ),
    ],
)
def test_units(settings: dict[str, Any], expected: list[str]) -> None:
    assert _units(network(), **settings) == expected


def test_a_model_may_name_its_layers_itself() -> None:
    model = network()
    model._no_split_modules = ["LayerNorm", "of another variant"]
    assert _units(model) == [f"{name}.norm" for name in BLOCKS]
    assert _units(model, auto_wrap_policy="transformer_based_wrap") == [f"{name}.norm" for name in BLOCKS]


def test_tied_weights_share_a_unit() -> None:
    assert _units(Tied(), transformer_cls_names_to_wrap=["Linear", "Block"]) == ["middle.linear", "middle"]


def test_uncalled_modules_are_not_units() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.ModuleList([nn.Linear(8, 8)]))
    assert _units(model, auto_wrap_policy=lambda module: True) == ["1.0", "0"]


def test_unknown_classes_list_the_existing_ones() -> None:
    with pytest.raises(ValueError) as caught:
        _units(network(), transformer_cls_names_to_wrap=["Block", "LlamaLayer"])
    assert str(caught.value) == (
        "transformer_cls_names_to_wrap has 'LlamaLayer', but the Network has no such modules. Its classes: "
        "Linear (5), Block (3), LayerNorm (3)"
    )
    with pytest.raises(ValueError, match=r"needs transformer_cls_names_to_wrap.*Network.*Block \(3\)"):
        _units(network(), auto_wrap_policy="transformer_based_wrap")


def test_ignored_modules() -> None:
    model = network()
    assert fsdp2_units.ignored_parameters(model, None) == set()
    assert fsdp2_units.ignored_parameters(model, [model.exit]) == set(model.exit.parameters())
    assert len(fsdp2_units.ignored_parameters(model, r"blocks\.\d\.norm")) == 6
    with pytest.raises(ValueError, match=r"ignored_modules='norm' .*entry"):
        fsdp2_units.ignored_parameters(model, "norm")


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp_version": 1}, "nblaunch shards with torch's fully_shard, which is version 2"),
        ({"sharding_strategy": "NO_SHARD"}, "leave fsdp_plugin out"),
        ({"sharding_strategy": "HALF"}, "sharding_strategy='HALF' is unknown; valid values are 'FULL_SHARD'"),
        (
            {"auto_wrap_policy": "by_hand"},
            "auto_wrap_policy='by_hand'",
        ),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "FSDP version 1; use 'SHARDED_STATE_DICT'"),
        ({"state_dict_type": "half"}, "state_dict_type='half' is unknown"),
        ({"activation_checkpointing_offload": True}, "needs activation_checkpointing=True"),
        ({"activation_checkpointing": "maybe"}, "activation_checkpointing='maybe' must be True or False"),
        (
            {"reshard_after_forward": -1},
            "reshard_after_forward=-1",
        ),
        ({"reshard_after_forward": 3.5}, "reshard_after_forward=3.5"),
        ({"cpu_offload": "cpu"}, "cpu_offload='cpu' must be True, False or torch's CPUOffloadPolicy"),
        ({"min_num_params": "many"}, "min_num_params='many' is not a number"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        FullyShardedDataParallelPlugin(**settings)
    assert message in str(caught.value)


def test_an_unknown_field_is_rejected_by_name() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'fsdp_layers'"):
        FullyShardedDataParallelPlugin(fsdp_layers=3)  # type: ignore[call-arg]


def test_fsdp1_fields_warn_that_they_have_no_effect() -> None:
    with pytest.warns(UserWarning, match=r"use_orig_params=True\)"):
        FullyShardedDataParallelPlugin(use_orig_params=True)
    FullyShardedDataParallelPlugin(use_orig_params=False, backward_prefetch=None, limit_all_gathers=False)


@pytest.mark.parametrize(
    ("settings", "reshards", "is_hybrid"),
    [
        ({}, True, False),
        ({"reshard_after_forward": False}, False, False),
        ({"reshard_after_forward": 2}, 2, False),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, False, False),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, True, True),
        ({"sharding_strategy": 2}, False, False),
        ({"sharding_strategy": "hybrid_shard_zero2"}, False, True),
        ({"reshard_after_forward": "false"}, False, False),
        ({"reshard_after_forward": "True"}, True, False),
    ],
)
def test_version_1_names_for_resharding_are_accepted(
    settings: dict[str, Any], reshards: Any, is_hybrid: bool
) -> None:
    plugin = FullyShardedDataParallelPlugin(**settings)
    assert plugin.reshard_after_forward is reshards
    assert plugin.is_hybrid == is_hybrid


def test_torch_policies_are_accepted() -> None:
    def policy(mixed: Any, dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
        return FullyShardedDataParallelPlugin(mixed_precision_policy=mixed).precision_policy(dtype)

    bf16, fp32 = torch.bfloat16, torch.float32
    assert policy(None) == MixedPrecisionPolicy()
    all_in_bf16 = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, output_dtype=bf16)
    assert policy(None, bf16) == policy("bf16") == all_in_bf16
    given = {"param_dtype": bf16, "buffer_dtype": bf16, "output_dtype": fp32}
    assert policy(given) == MixedPrecisionPolicy(param_dtype=bf16, output_dtype=fp32)
    own = MixedPrecisionPolicy(reduce_dtype=bf16)
    assert policy(own) is own
    with pytest.raises(ValueError, match=r"field='dtype' .*'param_dtype'"):
        policy({"dtype": bf16})
    with pytest.raises(ValueError, match="must be torch's MixedPrecisionPolicy"):
        policy(3)
    own_offload = CPUOffloadPolicy(pin_memory=False)
    assert FullyShardedDataParallelPlugin(cpu_offload=own_offload).offload_policy() is own_offload
    assert isinstance(FullyShardedDataParallelPlugin(cpu_offload=True).offload_policy(), CPUOffloadPolicy)


def test_returned_views_get_no_warning() -> None:
    class Handing(nn.Linear):
        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> Any:
            return super().forward(x), bias[:]

    unit, bias = Handing(4, 4), torch.ones(4, requires_grad=True)
    return_no_views(unit)
    with warnings.catch_warnings():
        x, handed_on = unit(torch.ones(2, 3, 4), bias)
        warnings.warn("FSDP2-wrapped module (Handing) returned a view tensor. And so on.", stacklevel=2)
    assert x._base is None
    assert handed_on._base is bias


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        (None, False),
        (True, True),
        ("false", False),
        (CPUOffload(offload_params=False), False),
        (CPUOffload(offload_params=True), True),
        (OffloadPolicy(), False),
    ],
)
def test_forms_of_cpu_offload(offload: Any, expected: bool) -> None:
    plugin = FullyShardedDataParallelPlugin(cpu_offload=offload)
    assert plugin.cpu_offload is expected
    assert isinstance(plugin.offload_policy(), CPUOffloadPolicy) == expected


def test_fields_accept_accelerates_forms() -> None:
    plugin = FullyShardedDataParallelPlugin(min_num_params="1000", transformer_cls_names_to_wrap=[Block])  # type: ignore[arg-type, list-item]
    assert plugin.min_num_params == 1000
    assert plugin.transformer_cls_names_to_wrap == ["Block"]
    of_version_1 = MixedPrecision(param_dtype=torch.bfloat16)
    policy = FullyShardedDataParallelPlugin(mixed_precision_policy=of_version_1).precision_policy(None)
    assert policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16", "bfloat16", "torch.bfloat16"])
def test_policy_numbers_can_be_keywords(dtype: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(
        mixed_precision_policy={"param_dtype": dtype, "reduce_dtype": None}
    )
    assert plugin.precision_policy(None) == MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    wrong = FullyShardedDataParallelPlugin(mixed_precision_policy={"reduce_dtype": "bf8"})
    with pytest.raises(ValueError, match=r"\['reduce_dtype'\]='bf8' .*'fp32'"):
        wrong.precision_policy(None)


def test_units_return_no_views_of_unshared_memory() -> None:
    class Layer(nn.Module):
        def __init__(self, is_shared: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.is_shared = is_shared

        def forward(self, x: torch.Tensor) -> Any:
            x = self.linear(x)
            return (x, x[:, 0]) if self.is_shared else {"x": x, "again": x, "name": "layer"}

    alone, shared = Layer(False), Layer(True)
    for layer in (alone, shared):
        return_no_views(layer)
    returned = alone(torch.ones(2, 3, 4))
    assert returned["x"]._base is None
    assert returned["again"] is returned["x"]
    assert all(tensor._base is not None for tensor in shared(torch.ones(2, 3, 4)))
    with torch.no_grad():
        assert alone(torch.ones(2, 3, 4))["name"] == "layer"
    returned["x"] *= 2
    returned["x"].sum().backward()
    assert torch.equal(alone.linear.bias.grad, torch.full((4,), 12.0))


def test_settings_may_change_until_they_are_used() -> None:
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.saves_shards
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert not plugin.saves_shards
    plugin.set_state_dict_type()
    assert plugin.saves_shards
    plugin.set_mixed_precision("bf16")
    plugin.set_mixed_precision("fp32")
    assert plugin.precision_policy(None).param_dtype == torch.bfloat16
    plugin.set_mixed_precision("fp32", override=True)
    assert plugin.precision_policy(None).param_dtype == torch.float32
    with pytest.raises(ValueError, match="mixed_precision='fp8' is unknown"):
        plugin.set_mixed_precision("fp8")


def test_the_plugin_is_also_in_utils() -> None:
    assert nblaunch.utils.FullyShardedDataParallelPlugin is nblaunch.FullyShardedDataParallelPlugin


def test_a_lone_process_keeps_its_model() -> None:
    model = network()
    plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(fsdp_plugin=plugin)
    assert accelerator.prepare(model) is model
    assert type(model) is Network
    assert accelerator.distributed_type == "NO"
    assert accelerator.state.fsdp_plugin is plugin


def test_fp16_on_the_cpu_is_full_precision() -> None:
    with pytest.warns(UserWarning, match="full precision"):
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), mixed_precision="fp16")
    assert accelerator.prepare(torch.nn.Linear(2, 2))(torch.ones(1, 2)).dtype == torch.float32


def test_a_device_without_sharding_is_rejected() -> None:
    class Unsharded(type(backends.choose("cpu"))):  # type: ignore[misc]
        name = "lazy"
        reduces_gradients_at_step = True

    context.install(context.ProcessContext(context.Topology(), Unsharded()))
    with pytest.raises(ValueError, match="fsdp_plugin can't be used on lazy"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())


def test_another_librarys_plugin_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"dict.* nblaunch\.FullyShardedDataParallelPlugin"):
        Accelerator(fsdp_plugin={"fsdp_version": 2})  # type: ignore[arg-type]


def _report() -> list[str]:
    emitted: list[Any] = []
    worker = context.current()
    worker.emit = emitted.append
    report_shards("Net", 5_000, [4_000, 1_000][worker.topology.rank], "; and more")
    return [event.text for event in emitted if isinstance(event, Note)]


def test_a_note_shows_the_size_of_each_ranks_shards() -> None:
    line = "Net: 5.00 kB of weights sharded over 2 ranks, 1.00 kB to 4.00 kB each; and more"
    assert ranks.run(_report, 2) == [[line], []]


def _report_of_bf16_weights() -> list[str]:
    emitted: list[Any] = []
    context.current().emit = emitted.append
    model = torch.nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.prepare(model)
    return [event.text for event in emitted if isinstance(event, Note) and "sharded over" in event.text]


def test_weights_trained_in_fp32_are_counted_as_fp32() -> None:
    first, other = ranks.run(_report_of_bf16_weights, 2)
    assert "4.10 kB of weights sharded over 2 ranks, 2.05 kB each" in first[0]
    assert other == []
