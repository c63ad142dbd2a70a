"""Configuration files: our own, and files written by ``accelerate config``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.config.default import write_basic_config
from accelerate.utils.constants import FSDP_SHARDING_STRATEGY
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nblaunch.config import files
from nblaunch.config.launching import accelerator_settings
from nblaunch.config.settings import SECTIONS, SETTINGS, ConfigError, resolve


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def of_accelerate(folder: Path, **values: Any) -> Path:
    """Return a file that Accelerate itself has written."""
    path = folder / "accelerate.yaml"
    base = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no", "use_cpu": False, "debug": False}
    ClusterConfig(**(base | values)).to_yaml_file(str(path))
    return path


def test_written_settings_read_back_with_comments(tmp_path: Path) -> None:
    values = {"num_processes": 4, "mixed_precision": "no", "strategy": "fsdp", "fsdp_offload_params": True,
              "num_machines": "1:2", "rdzv_conf": {"timeout": 30}, "log_line_prefix_template": "[$rank]"}  # fmt: skip
    path = tmp_path / "new" / "folder" / "config.yaml"
    files.write(path, values)
    assert dict(files.read(path).values) == values
    lines = path.read_text().splitlines()
    keys = [place for place, line in enumerate(lines) if line.strip() and not line.strip().startswith("#")]
    assert all(
        lines[place - 1].strip().startswith("#") for place in keys if not lines[place].endswith("_config:")
    )
    assert os.listdir(path.parent) == ["config.yaml"], "the file that it was written as is gone"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "num_processes: 1\n")

    def reject(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", reject)
    with pytest.raises(ConfigError, match="No space left"):
        files.write(path, {"num_processes": 2})
    assert path.read_text() == "num_processes: 1\n"
    assert os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: " + "[" * 600, "YAML: RecursionError: "),
        ("num_processes: " + "9" * 400, "num_processes: '9999"),
        ('deepspeed_config_file: "a\\0"\n', "must be a string"),
        ("fsdp_config: [" + "1, " * 5000 + "1]\n", "must contain keys and values, but is ['1', '1', "),
        ("? [a, b]\n: 1\n", "found unhashable key"),
        ("? |\n  a\n  b\n: 1\n", "'a\\nb\\n' is unknown"),
    ],
)
def test_malformed_values_are_named_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        files.read(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert "\n" not in message
    assert len(message) < 1000


_KEYS = st.sampled_from(
    [*SETTINGS, *SECTIONS, "distributed_type", "compute_environment", "use_cpu", "<<", "~", "x"]
)
_VALUES = st.sampled_from(
    [
        "2024-13-45", "2024-01-01T00:00:00+99:99", "!!int x", "!!int _", "!!float y", "!!bool z", "!!binary '?'",
        "!!set {a}", "!!omap [a]", "!!map [1]", "!!seq {a: 1}", "!!python/object:os.system x", "&a [*a]", "*nope",
        "{<<: 3}", "{[1]: 2}", "0x", "1e999", ".nan", "9" * 400, '"\\0"', '"\\ud800"', "1:99", "[", "'", "|\n  x",
        "", "-1", "1.5", "yes", "[1, {a: b}]", "{a: 1}", "!!null z", "=", "\t", "\x07", "? a", "---",
    ]
)  # fmt: skip


@hypothesis_settings(max_examples=30)
@given(
    st.lists(st.tuples(_KEYS, st.sampled_from([": ", ":\n  x: ", ", ", ":"]), _VALUES), max_size=3),
    st.binary(max_size=3),
)
def test_any_file_is_read_or_rejected_in_one_line(lines: list[tuple[str, str, str]], more: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_bytes("\n".join(map("".join, lines)).encode() + more)
        problem = ""
        try:
            resolve([files.read(path)])
        except ConfigError as error:
            problem = str(error)
        assert "\n" not in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_proceses: 2\n", ["num_proceses is unknown", "did you mean num_processes"]),
        ("bogus: 2\nother: 3\n", ["bogus is unknown", "other is unknown"]),
        ("num_processes: two\n", ["num_processes: 'two' must be a whole number"]),
        ("num_processes: [1]\n", ["num_processes: ['1'] must be a whole number"]),
        ('a: 1\nb: "\\UFFFFFFFF"\n', ["YAML: "]),
        ("num_processes: {\n", ["YAML: line 2, column 1: expected"]),
        ("use_cpu: maybe\n", ["use_cpu: 'maybe' must be true or false"]),
        ("- 1\n", ["must contain keys and values, but is a list"]),
        ("fsdp_config: 3\n", ["fsdp_config: must contain keys and values"]),
        ("fsdp_config:\n  num_processes: 2\n", ["num_processes belongs at the top level"]),
        ("distributed_type: MEGATRON_LM\n", ["MEGATRON_LM is not available"]),
        ("compute_environment: AMAZON_SAGEMAKER\n", ["AMAZON_SAGEMAKER is not available"]),
        ("fp8_config:\n  backend: TE\n", ["fp8_backend", "TE", "AO"]),
        ("fp8_config:\n  backend: TE\n  margin: 0\n", ["fp8_margin", "Transformer Engine"]),
        ("tpu_name: pod\n", ["on every machine"]),
        ("use_megatron_lm: 1\n", ["Megatron-LM is not available"]),
    ],
)
def test_mistakes_are_reported_in_one_line_with_the_file(tmp_path: Path, text: str, words: list[str]) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        files.read(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        files.read(tmp_path / "none.yaml")


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert not files.read(written(tmp_path, "# nothing\nlog_dir: Null\nhang_timeout_s: ~\n")).values


@pytest.mark.parametrize("machines", ["1:4", "2:16"])
def test_a_range_of_machines_needs_no_quotes(tmp_path: Path, machines: str) -> None:
    """YAML 1.1 would read such a range as a number in base 60."""
    layer = files.read(written(tmp_path, f"num_machines: {machines}\nhang_timeout_s: 1.5\n"))
    assert (layer.values["num_machines"], layer.values["hang_timeout_s"]) == (machines, 1.5)


def test_paths_may_start_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path, "num_processes: 3\n").rename(tmp_path / "mine.yaml")
    assert files.find_layers("~/mine.yaml")[0].values == {"num_processes": 3}


def test_torchao_recipes_are_read(tmp_path: Path) -> None:
    recipe = {"backend": "AO", "enable_fsdp_float8_all_gather": False, "pad_inner_dim": True}
    resolved = resolve(
        [files.read(of_accelerate(tmp_path, distributed_type="NO", mixed_precision="fp8", fp8_config=recipe))]
    )
    assert resolved["mixed_precision"] == "fp8"
    assert accelerator_settings(resolved)["fp8_recipe"] == {
        "enable_fsdp_float8_all_gather": False,
        "pad_inner_dim": True,
    }


def test_accelerate_gpu_files_are_read(tmp_path: Path) -> None:
    path = of_accelerate(tmp_path, distributed_type="MULTI_GPU", num_processes=8, num_machines=2, machine_rank=1,
                         main_process_ip="10.0.0.1", main_process_port=29511, same_network=True, gpu_ids="0,1,2,3",
                         mixed_precision="fp16", rdzv_backend="static", main_training_function="train",
                         dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_mode": "reduce-overhead"})  # fmt: skip
    layer = files.read(path)
    resolved = resolve([layer])
    assert resolved["backend"] == "cuda"
    assert [resolved[name] for name in ("num_processes", "num_machines", "machine_rank")] == [8, 2, 1]
    assert (resolved["main_process_ip"], resolved["main_process_port"]) == ("10.0.0.1", 29511)
    assert (resolved["gpu_ids"], resolved["mixed_precision"]) == ("0,1,2,3", "fp16")
    assert accelerator_settings(resolved)["dynamo_plugin"] == {
        "backend": "inductor",
        "mode": "reduce-overhead",
    }


def test_accelerate_fsdp_files_are_read(tmp_path: Path) -> None:
    fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Block,Head",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_activation_checkpointing": False}  # fmt: skip
    resolved = resolve(
        [files.read(of_accelerate(tmp_path, distributed_type="FSDP", num_processes=2, fsdp_config=fsdp))]
    )
    assert resolved["strategy"] == "fsdp"
    assert accelerator_settings(resolved)["fsdp_plugin"] == {
        "reshard_after_forward": True,
        "cpu_offload": False,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_cls_names_to_wrap": ["Block", "Head"],
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": True,
        "activation_checkpointing": False,
    }


def test_accelerate_parallelism_files_are_read(tmp_path: Path) -> None:
    text = """
num_processes: 4
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 2
  parallelism_config_cp_comm_strategy: alltoall
  parallelism_config_sp_seq_length_is_variable: true
"""
    settings = accelerator_settings(resolve([files.read(written(tmp_path, text))]))
    assert settings["parallelism_config"] == {
        "dp_replicate_size": 1, "dp_shard_size": 2, "tp_size": 1, "cp_size": 2, "cp_comm_strategy": "alltoall",
    }  # fmt: skip


def test_accelerate_deepspeed_files_are_read(tmp_path: Path) -> None:
    deepspeed = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none",
                 "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "zero3_init_flag": True,
                 "zero3_save_16bit_model": True}  # fmt: skip
    path = of_accelerate(tmp_path, distributed_type="DEEPSPEED", num_processes=2, deepspeed_config=deepspeed)
    settings = accelerator_settings(resolve([files.read(path)]))
    elsewhere = {"gradient_accumulation_steps", "zero3_init_flag"}
    assert settings["deepspeed_plugin"] == {name: deepspeed[name] for name in deepspeed.keys() - elsewhere}
    assert settings["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"distributed_type": "NO", "use_cpu": True}, {"backend": "cpu", "num_processes": 1}),
        ({"distributed_type": "MULTI_CPU", "num_processes": 3}, {"backend": "cpu", "num_processes": 3}),
        ({"distributed_type": "XLA", "downcast_bf16": True}, {"backend": "xla", "downcast_bf16": True}),
        ({"distributed_type": "MULTI_GPU", "num_processes": -1}, {"backend": "cuda", "num_processes": None}),
    ],
)  # fmt: skip
def test_accelerate_device_names_are_read(
    tmp_path: Path, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    resolved = resolve([files.read(of_accelerate(tmp_path, **values))])
    assert {name: resolved[name] for name in expected} == expected


def test_old_accelerate_files_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nfp16: true\n"
                             "dynamo_backend: 'NO'\nfsdp_config: {}\ndeepspeed_config: {}\n")  # fmt: skip
    resolved = resolve([files.read(path)])
    assert (resolved["mixed_precision"], resolved["dynamo_backend"]) == ("fp16", "no")


@pytest.mark.parametrize("ipex", ["{}", "{ipex: false, use_xpu: false}", "{ipex: true}"])
def test_old_cpu_config_files_are_read(tmp_path: Path, ipex: str) -> None:
    layer = files.read(
        written(tmp_path, f"distributed_type: MULTI_CPU\nnum_processes: 2\nipex_config: {ipex}\n")
    )
    assert layer.values == {"backend": "cpu", "num_processes": 2}


def test_deepspeed_config_file_may_be_none(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: none, zero_stage: 3}\n"
    layer = files.read(written(tmp_path, text))
    assert resolve([layer])["zero_stage"] == 3
    assert "deepspeed_config_file" not in layer.values


def test_a_symlink_is_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "dotfiles.yaml", tmp_path / "config.yaml"
    link.symlink_to(target)
    for num_processes in (1, 2):  # the file does not exist the first time
        files.write(link, {"num_processes": num_processes})
        assert link.is_symlink()
        assert files.read(target).values == {"num_processes": num_processes}


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"distributed_type": "MULTI_CPU", "num_processes": 2}')
    assert files.read(path).values["num_processes"] == 2


def test_the_default_file_is_in_the_platforms_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBLAUNCH_CONFIG_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert files.default_path() == tmp_path / "nblaunch" / "default.yaml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.default_path() == tmp_path / ".config" / "nblaunch" / "default.yaml"
    monkeypatch.setenv("NBLAUNCH_CONFIG_FILE", str(tmp_path / "mine.yaml"))
    assert files.default_path() == tmp_path / "mine.yaml"
    assert files.find_layers(None) == []


def test_written_yaml_is_yaml(tmp_path: Path) -> None:
    content = yaml.safe_load(
        files.render({"strategy": "fsdp", "fsdp_offload_params": True, "mixed_precision": "no"})
    )
    assert content == {
        "strategy": "fsdp",
        "mixed_precision": "no",
        "fsdp_config": {"fsdp_offload_params": True},
    }


def test_unused_features_in_accelerate_files_are_accepted(tmp_path: Path) -> None:
    text = "tpu_env: []\ntpu_use_cluster: false\ncommands: null\nmegatron_lm_config: {}\nvm: [~]\n"
    assert not files.read(written(tmp_path, text)).values


def test_settings_without_effect_are_left_out_and_named_if_they_are_missed(tmp_path: Path) -> None:
    text = "same_network: true\nenable_cpu_affinity: true\ndeepspeed_hostfile: hosts\n"
    of_fsdp_1 = "fsdp_config: {fsdp_use_orig_params: false, fsdp_forward_prefetch: true}\n"
    path = written(tmp_path, text + of_fsdp_1)
    layer = files.read(path)
    assert not layer.values
    (note,) = layer.notes
    assert note == (
        "enable_cpu_affinity, deepspeed_hostfile and fsdp_forward_prefetch "
        f"(file {path}) have no effect in nblaunch"
    )
    assert resolve([layer]).notes == layer.notes


def test_what_accelerate_writes_by_default_is_not_named(tmp_path: Path) -> None:
    fsdp = {
        "fsdp_version": 1, "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_use_orig_params": True,
        "fsdp_forward_prefetch": False, "fsdp_sync_module_states": True,
    }  # fmt: skip
    path = of_accelerate(tmp_path, distributed_type="FSDP", fsdp_config=fsdp, same_network=True)
    assert "main_training_function" in path.read_text()
    assert not files.read(path).notes


@pytest.fixture
def accelerate_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of Accelerate's default file in a home without any file of nblaunch."""
    monkeypatch.delenv("NBLAUNCH_CONFIG_FILE", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "cache" / "huggingface" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    return path


def test_the_default_file_of_accelerate_is_read_if_there_is_no_other(
    tmp_path: Path, accelerate_default: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.find_layers(None) == []
    write_basic_config("bf16", str(accelerate_default))
    (layer,) = files.find_layers(None)
    assert layer.values["mixed_precision"] == "bf16"
    assert layer.source == f"file {accelerate_default}"
    assert "the default file of `accelerate launch`" in layer.notes[0]

    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    assert files.find_layers(None) == []
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("NBLAUNCH_CONFIG_FILE", str(tmp_path / "none.yaml"))
    assert files.find_layers(None) == [], "the user names another file, which does not exist yet"
    monkeypatch.delenv("NBLAUNCH_CONFIG_FILE")
    files.write(files.default_path(), {"mixed_precision": "no"})
    assert files.find_layers(None)[0].values == {"mixed_precision": "no"}


def test_a_default_file_of_accelerate_that_does_not_fit_is_rejected_with_advice(
    accelerate_default: Path,
) -> None:
    accelerate_default.write_text("distributed_type: MEGATRON_LM\n")
    with pytest.raises(ConfigError, match=r"MEGATRON_LM is not available.*`nblaunch config` writes a file"):
        files.find_layers(None)


def test_every_sharding_strategy_of_accelerate_is_read(tmp_path: Path) -> None:
    for name in FSDP_SHARDING_STRATEGY:
        text = f"distributed_type: FSDP\nfsdp_config: {{fsdp_reshard_after_forward: {name}}}\n"
        assert files.read(written(tmp_path, text)).values["fsdp_reshard_after_forward"] == name


def test_a_deepspeed_file_may_be_combined_with_classes_of_experts(tmp_path: Path) -> None:
    """DeepSpeed's file has no entry for them."""
    deepspeed = {"deepspeed_config_file": "zero.json", "deepspeed_moe_layer_cls_names": "Block"}
    path = of_accelerate(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=deepspeed)
    arguments = accelerator_settings(resolve([files.read(path)]))["deepspeed_plugin"]
    assert arguments == {"hf_ds_config": "zero.json", "transformer_moe_cls_names": "Block"}
