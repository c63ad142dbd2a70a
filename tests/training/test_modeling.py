"""What libraries ask about models, files and configurations: the answers are Accelerate's."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import accelerate.utils as reference
import pytest
import torch
from accelerate.utils.dataclasses import get_module_class_from_name as reference_class_from_name
from safetensors.torch import save_file
from torch import nn

from nblaunch import CheckpointError, utils
from nblaunch.utils.dataclasses import get_module_class_from_name
from nblaunch.utils.fsdp_utils import get_parameters_from_modules

BOTH = pytest.mark.parametrize("kit", [utils, reference], ids=["nblaunch", "accelerate"])


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(16, dtype=torch.bool))


@BOTH
@pytest.mark.parametrize("dtype", [None, torch.float16, "int8"])
def test_sizes_of_modules(kit: Any, dtype: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2, bias=False)))
    element = 4 if dtype is None else 2 if dtype is torch.float16 else 1
    sizes = kit.compute_module_sizes(model, dtype=dtype)
    assert sizes == {
        "": 24 * element, "0": 16 * element, "0.weight": 12 * element, "0.bias": 4 * element,
        "1": 8 * element, "1.0": 8 * element, "1.0.weight": 8 * element,
    }  # fmt: skip
    special = kit.compute_module_sizes(model, special_dtypes={"0.bias": torch.float64})
    assert special["0"] == 12 * 4 + 4 * 8


@BOTH
def test_tied_parameters_have_their_names_in_groups(kit: Any) -> None:
    assert kit.find_tied_parameters(_Tied()) == [["embedding.weight", "head.weight"]]
    assert kit.find_tied_parameters(nn.Linear(1, 1)) == []


@BOTH
def test_small_helpers(kit: Any) -> None:
    assert kit.convert_bytes(1536) == "1.5 KB"
    assert kit.convert_bytes(3) == "3 bytes"
    assert kit.convert_file_size_to_int("2GB") == 2 * 10**9
    assert kit.dtype_byte_size(torch.bfloat16) == 2
    assert kit.merge_dicts({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}}) == {"a": {"b": 1, "d": 3}, "c": 2}
    assert kit.honor_type((1, 2), (str(i) for i in (3, 4))) == ("3", "4")
    assert kit.get_pretty_name(nn.Linear(1, 1)) == "Linear"
    assert kit.get_pretty_name(nn.Linear) == "Linear"
    assert kit.recursive_getattr(nn.Sequential(nn.Linear(2, 3)), "0.out_features") == 3
    model = _Tied()
    order = kit.get_module_children_bottom_up(model)
    assert order[-1] is model
    assert order.index(model.body[0]) < order.index(model.body)


def test_modules_by_name() -> None:
    model = _Tied()
    for find in (get_module_class_from_name, reference_class_from_name):
        assert find(model, "BatchNorm1d") is nn.BatchNorm1d
        assert find(model, "Conv2d") is None
    assert get_parameters_from_modules("body\\..*", model) == set(model.body.parameters())
    assert get_parameters_from_modules([model.head], model) == {model.head.weight}
    assert get_parameters_from_modules(None, model) == set()


@BOTH
def test_a_file_of_weights_is_read_to_its_devices(kit: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weights = {"a.weight": torch.arange(3.0), "b.weight": torch.ones(2)}
    save_file(weights, path, metadata={"format": "pt"})
    maps: list[Any] = [None, {"": "cpu"}]
    if kit is utils:  # the reference draws a bar, whose thread stays
        maps.append({"a": "cpu", "b": "disk"})
    for device_map in maps:
        loaded = kit.load_state_dict(str(path), device_map)
        assert {name: value.tolist() for name, value in loaded.items()} == {
            name: value.tolist() for name, value in weights.items()
        }


def test_an_old_kernel_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = importlib.import_module("nblaunch.training.utilities.environment")
    monkeypatch.setattr(environment.platform, "system", lambda: "Linux")
    uname = environment.platform.uname()
    monkeypatch.setattr(environment.platform, "uname", lambda: uname._replace(release="6.1.0-9-amd64"))
    utils.check_os_kernel()
    monkeypatch.setattr(environment.platform, "uname", lambda: uname._replace(release="5.4.0-9-generic"))
    with pytest.warns(UserWarning, match=r"5\.4\.0-9-generic.*5\.5\.0"):
        utils.check_os_kernel()


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


def test_shards_to_merge_are_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no shards"):
        utils.merge_fsdp_weights(tmp_path, tmp_path / "out")
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    (tmp_path / "pytorch_model_fsdp_0" / ".metadata").touch()
    with pytest.raises(CheckpointError, match=r"do you mean .*pytorch_model_fsdp_0"):
        utils.merge_fsdp_weights(tmp_path, tmp_path / "out")
