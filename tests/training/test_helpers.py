"""Helpers for nested data and availability, and progress bars in several processes."""

from __future__ import annotations

import importlib.metadata
import pickle
import platform
import sys
from collections import OrderedDict, UserDict, namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import parse
from safetensors.torch import load_file
from torch.torch_version import TorchVersion

from nblaunch import Accelerator, utils
from nblaunch.state import is_initialized
from nblaunch.training.models import bare_module
from nblaunch.training.state import PartialState
from nblaunch.training.utilities import helpers
from nblaunch.training.utilities.log import MultiProcessAdapter, get_logger

Pair = namedtuple("Pair", "x y")


def test_batches_are_joined() -> None:
    one = {"a": torch.ones(2), "b": Pair(torch.zeros(2, 1), [torch.ones(2)]), "c": UserDict(k=torch.ones(2))}
    joined = utils.concatenate([one, one, one])
    assert joined["a"].shape == (6,)
    assert isinstance(joined["b"], Pair)
    assert joined["b"].x.shape == (6, 1)
    assert isinstance(joined["c"], UserDict)
    assert utils.concatenate([torch.ones(1, 2), torch.ones(1, 3)], dim=1).shape == (1, 5)
    assert utils.concatenate(["text"]) == "text"
    with pytest.raises(TypeError, match=r"tensors .*not a str"):
        utils.concatenate(["a", "b"])


def test_functions_are_applied_to_leaves() -> None:
    data = (torch.ones(1), {"k": [2, torch.zeros(1)]})
    result = utils.recursively_apply(lambda tensor, add: tensor + add, data, 1)
    assert (result[0].item(), result[1]["k"][0], result[1]["k"][1].item()) == (2, 2, 1)
    with pytest.raises(TypeError, match=r"int.*abs"):
        utils.recursively_apply(torch.abs, data, error_on_other_type=True)
    assert utils.recursively_apply(str, data, test_type=lambda leaf: leaf == 2)[1]["k"][0] == "2"
    assert utils.is_namedtuple(Pair(1, 2))
    assert not utils.is_namedtuple((1, 2))


def test_skipped_keys_are_not_moved() -> None:
    batch = OrderedDict(a=torch.ones(1), b={"a": torch.ones(1), "c": torch.ones(1)})
    moved = utils.send_to_device(batch, "meta", skip_keys=["a"])
    assert isinstance(moved, OrderedDict)
    assert [moved["a"].is_meta, moved["b"]["a"].is_meta, moved["b"]["c"].is_meta] == [False, False, True]
    assert utils.send_to_device(batch, torch.device("meta"), skip_keys="b")["a"].is_meta


def test_utilities_describe_data() -> None:
    batch = {"text": ["x"], "rows": torch.ones(3, 2), "flag": torch.ones(1)}
    assert utils.find_batch_size(batch) == 3
    assert utils.find_batch_size({"text": "x"}) is None
    assert utils.find_device(batch) == torch.device("cpu")
    assert utils.find_device([]) is None
    assert utils.listify({"x": torch.ones(2, dtype=torch.bfloat16)}) == {"x": [1.0, 1.0]}
    structure = utils.get_data_structure(batch)
    assert utils.is_tensor_information(structure["rows"])
    empty = utils.initialize_tensors(structure)
    assert (empty["rows"].shape, empty["text"]) == ((3, 2), ["x"])
    assert utils.slice_tensors(batch, slice(0, 1))["rows"].shape == (1, 2)


@given(st.integers(1, 20), st.integers(1, 6))
def test_inputs_are_padded_until_processes_divide_them(rows: int, num_processes: int) -> None:
    tensor, other = utils.pad_input_tensors((torch.ones(rows, 2), torch.ones(50)), rows, num_processes)
    assert tensor.shape[0] % num_processes == 0
    assert rows <= tensor.shape[0] < rows + num_processes
    assert tensor.sum() == 2 * rows
    assert other.shape == (50,)


@pytest.mark.parametrize("function", [utils.convert_to_fp32, lambda data: utils.send_to_device(data, "cpu")])
def test_conversions_compile_without_breaks(function: Any) -> None:
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    result = compiled({"x": torch.ones(2, dtype=torch.bfloat16), "y": [torch.ones(1)]})
    torch.testing.assert_close(result["x"].float(), torch.ones(2))


def test_features_are_detected() -> None:
    assert utils.is_transformers_available()
    assert utils.is_torchdata_stateful_dataloader_available()
    assert utils.is_tensorboard_available.__doc__ == "Return whether ``tensorboard`` is installed."
    assert utils.is_bf16_available()
    assert utils.is_fp16_available(), "on a CPU, where full precision takes its place"
    assert utils.is_cuda_available() == torch.cuda.is_available()
    assert not utils.is_torch_xla_available(check_is_gpu=True)
    assert isinstance(utils.is_mps_available(), bool)
    assert isinstance(utils.is_xpu_available(), bool)
    for name in ("hpu", "mlu", "musa", "npu", "sdaa"):  # nblaunch has no backend for these
        assert getattr(utils, f"is_{name}_available")() is False


def test_only_the_main_process_shows_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # without tqdm's monitor thread
    PartialState()
    assert list(utils.tqdm(range(3))) == [0, 1, 2]
    assert "3/3" in capsys.readouterr().err
    list(utils.tqdm(range(3), disable=True))
    assert capsys.readouterr().err == ""


def test_compiled_modules_are_recognised() -> None:
    module = torch.nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert utils.is_compiled_module(compiled)
    assert not utils.is_compiled_module(module)
    assert utils.extract_model_from_parallel(compiled, keep_torch_compile=False) is module
    outer = torch.nn.Sequential(compiled)
    assert utils.extract_model_from_parallel(outer, recursive=True)[0]._orig_mod is module


def test_wrappers_are_removed_in_any_order() -> None:
    """For example, an Accelerator that compiles prepares a model that is already compiled."""
    module = torch.nn.Linear(1, 1)
    inner = torch.compile(module, backend="eager")
    outer = torch.compile(torch.nn.DataParallel(inner), backend="eager")
    assert bare_module(outer) is module
    assert utils.extract_model_from_parallel(outer, keep_torch_compile=False) is module
    kept = utils.extract_model_from_parallel(outer)
    assert utils.is_compiled_module(kept)
    assert kept._orig_mod is module
    assert utils.extract_model_from_parallel(torch.nn.DataParallel(inner)) is inner


def test_kwargs_as_dictionaries() -> None:
    options = utils.GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    assert options.to_kwargs() == {"num_steps": 3, "sync_each_batch": True}
    assert options.to_dict()["adjust_scheduler"] is True
    assert [str(kind) for kind in utils.PrecisionType] == ["no", "fp8", "fp16", "bf16"]
    assert str(utils.RNGType.TORCH) == "torch"


def test_models_of_peft_are_distinguished_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class PeftModel(torch.nn.Linear):
        pass

    assert not utils.is_peft_model(
        PeftModel(1, 1)
    )  # the library was not imported, so no object can be one of its models
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=PeftModel))
    assert utils.is_peft_model(Accelerator().prepare(PeftModel(1, 1)))
    assert not utils.is_peft_model(torch.nn.Linear(1, 1))


def test_objects_are_saved_without_an_accelerator(tmp_path: Path) -> None:
    utils.save({"step": 3}, tmp_path / "object.bin")
    utils.save({"row": torch.ones(2)}, tmp_path / "row.safetensors", safe_serialization=True)
    assert torch.load(tmp_path / "object.bin") == {"step": 3}
    assert load_file(tmp_path / "row.safetensors")["row"].tolist() == [1.0, 1.0]


def test_saved_objects_load_without_running_code(tmp_path: Path) -> None:
    utils.save({"steps": 3}, tmp_path / "plain.bin")
    assert utils.load(tmp_path / "plain.bin") == {"steps": 3}
    utils.save({"path": SimpleNamespace(steps=3)}, tmp_path / "code.bin")
    with pytest.raises(pickle.UnpicklingError, match="SimpleNamespace"):
        utils.load(tmp_path / "code.bin")
    assert utils.load(tmp_path / "code.bin", weights_only=False)["path"].steps == 3


def test_checkpoints_have_the_expected_names(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.save_state(tmp_path)
    assert (tmp_path / utils.SAFE_WEIGHTS_NAME).is_file()
    assert (tmp_path / f"{utils.OPTIMIZER_NAME}.bin").is_file()
    assert (tmp_path / f"{utils.RNG_STATE_NAME}_0.pkl").is_file()
    accelerator.save_model(model, tmp_path / "model", max_shard_size=4, safe_serialization=False)
    assert (tmp_path / "model" / utils.WEIGHTS_INDEX_NAME).is_file()
    assert (tmp_path / "model" / utils.WEIGHTS_PATTERN_NAME.format(suffix="-00001-of-00002")).is_file()


def test_outputs_of_a_forward_in_half_precision_are_converted() -> None:
    def forward(x: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
        return {"logits": x * scale, "labels": torch.ones(1, dtype=torch.long)}

    converted = utils.convert_outputs_to_fp32(forward)
    output = converted(torch.ones(2, dtype=torch.bfloat16), scale=2.0)
    assert output["logits"].dtype is torch.float32
    assert output["labels"].dtype is torch.long
    assert converted.__name__ == "forward"


def test_words_in_variables_become_booleans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_FLAG", "Yes")
    monkeypatch.setenv("SOME_NUMBER", "3")
    monkeypatch.setenv("NEGATIVE", "-1")
    assert utils.parse_flag_from_env("SOME_FLAG") is True
    assert utils.parse_flag_from_env("ANOTHER_FLAG") is False
    assert utils.parse_flag_from_env("ANOTHER_FLAG", default=True) is True
    assert utils.parse_choice_from_env("SOME_FLAG") == "Yes"
    assert utils.parse_choice_from_env("ANOTHER_FLAG") == "no"
    assert utils.get_int_from_env(["NEGATIVE", "NOT_SET", "SOME_NUMBER"], 7) == 3
    assert utils.get_int_from_env(["NOT_SET"], 7) == 7
    assert (utils.str_to_bool("off"), utils.str_to_bool("T")) == (0, 1)
    assert utils.str_to_bool("n", to_bool=True) is False
    with pytest.raises(ValueError, match=r"'maybe' .*y, yes"):
        utils.str_to_bool("maybe")


def test_every_availability_function_answers() -> None:
    questions = [name for name in utils.__all__ if name.startswith("is_") and name.endswith("_available")]
    assert len(questions) > 50
    assert {type(getattr(utils, name)()) for name in questions} == {bool}
    with pytest.raises(AttributeError, match="is_nothing_available"):
        _ = helpers.is_nothing_available
    assert utils.is_tqdm_available()
    assert utils.is_numpy_available()
    assert not utils.is_numpy_available(min_version="99")


def test_a_state_is_initialised_by_an_accelerator() -> None:
    PartialState._reset_state()
    assert not is_initialized()
    PartialState()
    assert not is_initialized()
    Accelerator()
    assert is_initialized()


class _Loud(MultiProcessAdapter):
    def process(self, msg: Any, kwargs: Any) -> Any:
        msg, kwargs = super().process(msg, kwargs)
        return f"{msg}!", kwargs


def test_a_logger_passes_messages_through_process(caplog: pytest.LogCaptureFixture) -> None:
    PartialState()
    logger = get_logger("nblaunch.test")
    assert logger.process("Test", {})[0] == "[RANK 0] Test"
    logger.warning("Test")
    _Loud(logger.logger, {}).warning("Test %s", "a")
    assert [record.message for record in caplog.records] == ["[RANK 0] Test", "[RANK 0] Test a!"]


# --- availability: versions are compared in the order of PEP 440 ------------------------------------------------------


def test_torch_is_new_enough() -> None:
    assert utils.is_torch_version(">=", "2.5")
    assert not utils.is_torch_version("<", "2.5.0")


def test_torch_version_comes_from_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version("torch")
    monkeypatch.setattr(torch, "__version__", TorchVersion(f"{installed.partition('+')[0]}+cu999"))
    assert utils.is_torch_version("==", installed)
    assert utils.is_torch_version("<=", installed)
    assert not utils.is_torch_version(">", installed)


def test_versions_are_compared_numerically() -> None:
    assert utils.compare_versions(parse("2.10.1"), ">", "2.9")
    assert utils.compare_versions(parse("2.10"), "==", "2.10.0")
    assert utils.compare_versions(parse("2.10rc1"), "<", "2.10")


def test_availability_takes_library_names() -> None:
    assert utils.compare_versions("numpy", "==", importlib.metadata.version("numpy"))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        utils.compare_versions("no-such-library", ">", "1.0")


def test_unknown_comparisons_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"operation='=>'.*'<', '<=', '==', '!=', '>=', '>'"):
        utils.is_torch_version("=>", "2.5")


def test_old_linux_kernels_get_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    uname = platform.uname()
    monkeypatch.setattr(platform, "uname", lambda: uname._replace(release="6.1.0-9-amd64"))
    utils.check_os_kernel()
    monkeypatch.setattr(platform, "uname", lambda: uname._replace(release="5.4.0-9-generic"))
    with pytest.warns(UserWarning, match=r"5\.4\.0-9-generic.*5\.5\.0"):
        utils.check_os_kernel()
