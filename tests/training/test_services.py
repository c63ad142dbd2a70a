"""Trackers of services whose libraries are not installed here: their calls; names from Accelerate 1.15."""

from __future__ import annotations

import enum
import os
import socket
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from nblaunch import Accelerator, utils
from nblaunch.compat import DELEGATED
from nblaunch.tracking import GeneralTracker, register_tracker_class
from nblaunch.training import tracking
from nblaunch.training.utilities.helpers import purge_accelerate_environment


class DType(enum.Enum):
    FLOAT = "float"


@pytest.mark.parametrize("name", ["trackio", "swanlab", "comet_ml"])
def test_a_service_gets_settings_and_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = mock.MagicMock(spec=ModuleType)
    library.init = library.start = mock.MagicMock()
    library.config, library.Text = mock.MagicMock(), mock.MagicMock()
    monkeypatch.setitem(__import__("sys").modules, name, library)
    monkeypatch.setattr(tracking, "is_installed", lambda _: True)
    accelerator = Accelerator(log_with=name)
    accelerator.init_trackers(
        "project", config={"rate": 0.5, "layer": DType.FLOAT}, init_kwargs={name: {"mode": "offline"}}
    )
    run = accelerator.get_tracker(name, unwrap=True)
    accelerator.log({"loss": torch.tensor(2.0), "note": "good"}, step=3)
    accelerator.end_training()
    project = "project_name" if name == "comet_ml" else "project"
    library.init.assert_called_once_with(**{project: "project", "mode": "offline"})
    if name == "comet_ml":
        run.log_parameters.assert_called_once_with({"rate": 0.5, "layer": DType.FLOAT})
        run.log_metric.assert_called_once_with("loss", 2.0, step=3)
        run.end.assert_called_once_with()
    else:
        library.config.update.assert_called_once_with({"rate": 0.5, "layer": "DType.FLOAT"})
        text = library.Text.return_value if name == "swanlab" else "good"
        run.log.assert_called_once_with({"loss": 2.0, "note": text}, step=3)
        run.finish.assert_called_once_with()


@pytest.mark.parametrize("name", ["TRACKIO", "SWANLAB", "COMETML"])
def test_a_library_that_is_missing_is_named_with_its_command(name: str) -> None:
    kind = utils.LoggerType[name]
    with pytest.warns(UserWarning, match=rf"pip install {kind.value}"):
        Accelerator(log_with=kind)


@pytest.mark.parametrize("name", ["AIM", "CLEARML", "DVCLIVE"])
def test_trackers_of_accelerate_must_be_registered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = utils.LoggerType[name]
    for given in (kind, kind.value, [kind.value.upper()]):
        with pytest.raises(
            ValueError, match=rf"log_with='{kind.value}'.*GeneralTracker.*pip install {kind.value}"
        ):
            Accelerator(log_with=given)
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", dict(tracking.LOGGER_TYPE_TO_CLASS))
    own = type("Own", (GeneralTracker,), {"name": kind.value, "requires_logging_directory": False})
    register_tracker_class(own)
    assert Accelerator(log_with=kind).log_with == [own]


@pytest.mark.parametrize("name", ["megatron_lm_plugin", "torch_tp_plugin"])
def test_plugins_that_are_not_supported_are_rejected_by_name(name: str) -> None:
    Accelerator(**{name: None})
    with pytest.raises(NotImplementedError, match=rf"{name}=.*parallelism_config=ParallelismConfig\("):
        Accelerator(**{name: object()})


def test_variables_set_by_a_function_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "before")
    monkeypatch.setenv("ACCELERATE_REMOVED", "before")

    def change(value: str = "after") -> str:
        os.environ["ACCELERATE_KEPT"] = os.environ["ACCELERATE_ADDED"] = os.environ["OTHER"] = value
        del os.environ["ACCELERATE_REMOVED"]
        return value

    monkeypatch.setenv("OTHER", "before")
    assert purge_accelerate_environment(change)() == "after"
    changed = {
        name: os.environ.get(name) for name in ("ACCELERATE_KEPT", "ACCELERATE_REMOVED", "ACCELERATE_ADDED")
    }
    assert changed == {"ACCELERATE_KEPT": "before", "ACCELERATE_REMOVED": "before", "ACCELERATE_ADDED": None}
    assert os.environ["OTHER"] == "after"

    @purge_accelerate_environment
    class Base:
        def test_one(self) -> None:
            change()

    class Derived(Base):
        def test_two(self) -> None:
            change()

    for test in (Base().test_one, Derived().test_one, Derived().test_two):
        test()
        assert "ACCELERATE_ADDED" not in os.environ


def test_small_helpers_need_no_accelerate() -> None:
    names = ("convert_bytes", "get_pretty_name", "merge_dicts", "model_has_dtensor", "recursive_getattr")
    assert not {*names, "purge_accelerate_environment"} & DELEGATED.keys()
    assert [utils.convert_bytes(size) for size in (10, 2048, 3 * 2**30)] == ["10 bytes", "2.0 KB", "3.0 GB"]
    assert utils.get_pretty_name(Path) == "Path"
    assert utils.get_pretty_name(torch.nn.Linear(1, 1)) == "Linear"
    assert utils.merge_dicts({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}}) == {"a": {"d": 3, "b": 1}, "c": 2}
    assert utils.recursive_getattr(torch.nn.Sequential(torch.nn.Linear(2, 1)), "0.weight").shape == (1, 2)
    assert not utils.model_has_dtensor(torch.nn.Linear(1, 1))
    model = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Tanh(), torch.nn.Tanh()]))
    assert not utils.has_compiled_regions(model)
    assert utils.compile_regions_fsdp2(model, backend="eager") is model
    assert utils.has_compiled_regions(model)


def test_helpers_answer_like_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = pytest.importorskip("accelerate.utils")
    modeling = pytest.importorskip("accelerate.utils.modeling")
    other = pytest.importorskip("accelerate.utils.other")
    dtypes = [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
    for dtype in (*dtypes, *theirs.CustomDtype):
        assert utils.dtype_byte_size(dtype) == modeling.dtype_byte_size(dtype)
    with pytest.raises(ValueError, match="'int3' is not a dtype"):
        utils.dtype_byte_size("int3")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[1].bias = model[0].bias
    assert sorted(utils.find_tied_parameters(model)) == sorted(modeling.find_tied_parameters(model))
    weight = model[0].weight
    assert (
        utils.id_tensor_storage(weight)
        == utils.id_tensor_storage(weight[1])
        == modeling.id_tensor_storage(weight)
    )
    for data in ({"a": torch.ones(3, 1)}, ["text"], [], 3):
        assert utils.ignorant_find_batch_size(data) == theirs.ignorant_find_batch_size(data)
    assert utils.are_libraries_initialized("torch", "not_there") == ["torch"]
    assert utils.check_cuda_fp8_capability() == (
        torch.cuda.is_available() and theirs.check_cuda_fp8_capability()
    )
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
        assert utils.is_port_in_use(port)
    assert not utils.is_port_in_use(port)
    good = {"ACCELERATE_DEBUG_MODE": "1", "OTHER": "2"}
    with pytest.warns(UserWarning, match="left out.*'BAD=<text'.*'EMPTY='"):
        lines = utils.convert_dict_to_env_variables({**good, "BAD": "<text", "EMPTY": ""})
    assert lines == theirs.convert_dict_to_env_variables(good)
    for name in (name for name in dir(utils) if name.endswith("_VERSION")):
        assert getattr(utils, name) == getattr(pytest.importorskip("accelerate.utils.constants"), name)
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "before")
    for change in ("enable_fsdp_ram_efficient_loading", "disable_fsdp_ram_efficient_loading"):
        getattr(utils, change)()
        ours = os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]
        getattr(other, change, getattr(theirs, change))()
        assert ours == (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"])


def test_shards_are_written_by_torch_alone() -> None:
    with pytest.raises(ValueError, match="use_dcp=False"):
        utils.save_fsdp_model(None, None, torch.nn.Linear(1, 1), "folder", use_dcp=False)
