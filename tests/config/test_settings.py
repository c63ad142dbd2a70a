"""The table of settings: reading, merging and checking values."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nblaunch
from nblaunch.config import files
from nblaunch.config.launching import (
    accelerator_settings,
    device_choice,
    resolved_settings,
    spec_of,
)
from nblaunch.config.settings import FIELDS, GROUPS, SETTINGS, ConfigError, Layer, convert, resolve
from nblaunch.spec import LaunchSpec


@pytest.fixture(autouse=True)
def no_default_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("NBLAUNCH_CONFIG_FILE", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("num_processes", "4", 4),
        ("num_processes", 4.0, 4),
        ("fsdp_min_num_params", "1e8", 100_000_000),
        ("mixed_precision", "BF16", "bf16"),
        ("mixed_precision", "off", "no"),  # YAML 1.1 also writes it this way
        ("dynamo_backend", False, "no"),
        ("dynamo_backend", "INDUCTOR", "inductor"),
        ("dynamo_backend", "openxla", "openxla"),  # strategies of a device family
        ("dynamo_backend", "ONNXRT", "onnxrt"),  # exists once its library is imported
        ("dynamo_mode", "max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
        ("fsdp_auto_wrap_policy", "transformer_based_wrap", "TRANSFORMER_BASED_WRAP"),
        ("fsdp_reshard_after_forward", "true", True),
        ("fsdp_reshard_after_forward", "full_shard", "FULL_SHARD"),
        ("fsdp_offload_params", "false", False),
        ("gpu_ids", 0, "0"),
        ("hang_timeout_s", "none", None),
        ("hang_timeout_s", "2.5", 2.5),
        ("num_machines", "1:4", "1:4"),
        ("num_machines", 2, 2),
        ("rdzv_conf", "timeout=30,is_host=true", {"timeout": 30, "is_host": True}),
        ("rdzv_conf", {"timeout": 30}, {"timeout": 30}),
    ],
)
def test_values_are_read_from_text_and_from_yaml(name: str, given: Any, value: Any) -> None:
    assert convert(name, given) == value


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("num_processes", "four", "whole number"),
        ("num_processes", 0, "at least 1"),
        ("num_processes", True, "whole number"),
        ("num_processes", 2.5, "whole number"),
        ("main_process_port", 70000, "at most 65535"),
        ("mixed_precision", "fp4", "one of no, fp16, bf16, fp8"),
        ("debug", "perhaps", "true or false"),
        ("stop_grace_s", -1, "at least 0"),
        ("stop_grace_s", "nan", "number"),
        ("rdzv_conf", "timeout", "pairs"),
        ("num_machines", "4:1", "min:max"),
        ("log_dir", "", "string"),
        ("zero_stage", 4, "at most 3"),
        ("dynamo_backend", "nosuch", "must be one of no, eager, aot_eager, inductor"),
    ],
)
def test_wrong_values_are_rejected_with_their_name(name: str, given: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        convert(name, given)
    message = str(raised.value)
    assert message.startswith(f"{name}: ")
    assert reason in message
    assert "\n" not in message


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean num_processes"):
        convert("num_proceses", 2)


def test_every_setting_is_in_a_group_and_takes_its_own_default() -> None:
    for setting in SETTINGS.values():
        assert setting.group in GROUPS
        if setting.default is not None:
            assert setting.converter.convert(setting.default) == setting.default


def test_defaults_match_a_launch() -> None:
    spec = LaunchSpec(function=print)
    assert all(
        SETTINGS[name].default in (None, getattr(spec, field))
        for name, field in FIELDS.items()
        if name != "start_method"  # scripts start with spawn
    )


def test_earlier_layers_win_and_sources_are_recorded() -> None:
    resolved = resolve(
        [Layer("command line", {"num_processes": 2}), Layer("file", {"num_processes": 8, "debug": True})]
    )
    assert (resolved["num_processes"], resolved.sources["num_processes"]) == (2, "command line")
    assert (resolved["debug"], resolved.sources["debug"]) == (True, "file")
    assert (resolved["mixed_precision"], resolved.sources["mixed_precision"]) == ("no", "default")


def test_optional_settings_accept_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    files.write(path, {"hang_timeout_s": None})
    for resolved in (
        resolve([Layer("command line", {"hang_timeout_s": convert("hang_timeout_s", "none")})]),
        resolved_settings(None, {"hang_timeout_s": "none"}),
        resolved_settings(path, {}),
    ):
        assert resolved.is_set("hang_timeout_s")
        assert spec_of(resolved, print).hang_timeout_s is None
    path.write_text("hang_timeout_s: null\n")
    assert not resolved_settings(path, {}).is_set("hang_timeout_s")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"machine_rank": 2, "num_machines": 2, "main_process_ip": "a"}, "less than"),
        (
            {"machine_rank": 4, "num_machines": "1:4", "rdzv_backend": "c10d", "rdzv_endpoint": "a:1"},
            "less than",
        ),
        ({"machine_rank": 1}, "less than"),
        ({"num_machines": 2}, "main_process_ip"),
        ({"num_machines": 2, "main_process_ip": "a", "num_processes": 3}, "multiple"),
        ({"zero_stage": 2}, "strategy deepspeed"),
        ({"zero_stage": 0}, "strategy deepspeed"),
        ({"fsdp_offload_params": True, "strategy": "deepspeed"}, "strategy fsdp"),
        ({"dynamo_mode": "default"}, "dynamo_backend"),
        ({"downcast_bf16": True, "backend": "cpu"}, "TPU"),
        ({"gpu_ids": "0,1", "backend": "cpu"}, "GPU"),
        ({"strategy": "spmd", "backend": "cuda"}, "TPU"),
        ({"strategy": "deepspeed", "deepspeed_config_file": "a.json", "zero_stage": 2}, "zero_stage"),
    ],
)
def test_contradictions_are_rejected(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve([Layer("command line", values)])


def test_command_line_strategy_overrides_the_file() -> None:
    file = Layer("file", {"strategy": "deepspeed", "zero_stage": 3})
    resolved = resolve([Layer("command line", {"strategy": "fsdp"}), file])
    assert "deepspeed_plugin" not in accelerator_settings(resolved)
    with pytest.raises(ConfigError, match="zero_stage"):
        resolve([Layer("command line", {"zero_stage": 3}), Layer("file", {"strategy": "fsdp"})])


def test_command_line_device_overrides_the_file() -> None:
    for values in ({"backend": "xla", "downcast_bf16": True}, {"backend": "cuda", "gpu_ids": "0,1"}):
        resolved = resolve([Layer("command line", {"backend": "cpu"}), Layer("file", values)])
        assert accelerator_settings(resolved) == {}
        assert device_choice(resolved) == {}


def test_messages_have_the_names_of_settings() -> None:
    with pytest.raises(ConfigError, match=r"^num_machines='1:2' .*rdzv_backend='c10d'"):
        spec_of(resolve([Layer("x", {"num_machines": "1:2", "main_process_ip": "127.0.0.1"})]), print)


def test_settings_become_accelerator_arguments() -> None:
    settings = accelerator_settings(
        resolve(
            [
                Layer(
                    "x",
                    {
                        "strategy": "fsdp",
                        "fsdp_version": "1",
                        "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
                        "fsdp_min_num_params": 0,
                        "dynamo_backend": "inductor",
                        "dynamo_use_regional_compilation": True,
                        "gradient_accumulation_steps": 4,
                        "debug": True,
                    },
                )
            ]
        )
    )
    assert settings == {
        "gradient_accumulation_steps": 4,
        "debug": True,
        "dynamo_plugin": {"backend": "inductor", "use_regional_compilation": True},
        "fsdp_plugin": {"reshard_after_forward": "SHARD_GRAD_OP"},
    }


def test_processes_are_divided_among_machines() -> None:
    resolved = resolve(
        [
            Layer(
                "x", {"num_processes": 8, "num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1"}
            )
        ]
    )
    spec = spec_of(resolved, print)
    assert (spec.num_processes, spec.num_nodes, spec.node_rank, spec.master_addr) == (4, 2, 1, "10.0.0.1")


def test_c10d_meets_at_machine_0_unless_set_otherwise() -> None:
    values = {"num_machines": "1:2", "rdzv_backend": "c10d", "main_process_ip": "10.0.0.1"}
    assert spec_of(resolve([Layer("x", values)]), print).rdzv_endpoint == "10.0.0.1:29400"


def test_none_arguments_defer_to_the_file(tmp_path: Any) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("num_processes: 3\nmixed_precision: bf16\n")
    resolved = resolved_settings(file, {"num_processes": None, "mixed_precision": "no"})
    assert (resolved["num_processes"], resolved["mixed_precision"]) == (3, "no")
    spec = spec_of(resolved_settings(file, {}), print, ("x",))
    assert (spec.num_processes, spec.mixed_precision, spec.args) == (3, "bf16", ("x",))


_A_NEW_SETTING = """    patience_s: float = _set(
        1.0, Number(0.5), "seconds of patience", group="running", option="patience", needs_workers=True,
        not_detached="patience_s: it is short",
    )
    has_breakpoints: bool = False
"""

_WHAT_IT_DOES = """
import contextlib, io
import nblaunch
from nblaunch import cli, notebook
from nblaunch.config import files, launching
from nblaunch.spec import LaunchSpec

with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    cli.main(["launch", "--help"])
assert "--patience X" in shown.getvalue() and "seconds of patience" in shown.getvalue(), shown.getvalue()
files.write("settings.yaml", {"patience": 3.0})
assert launching.spec_of(launching.resolved_settings("settings.yaml", {}), print).patience_s == 3.0

def problem(call, **arguments):
    try:
        call(**arguments)
    except ValueError as error:
        return str(error)

assert problem(LaunchSpec, function=print, patience_s=0.1) == "patience_s=0.1 must be at least 0.5"
inline = LaunchSpec(function=print, engine="inline", patience_s=2.0)
assert "patience_s=2.0" in problem(notebook.run_spec, spec=inline, dashboard="none")
assert "it is short" in problem(LaunchSpec, function=print, is_detached=True, patience_s=2.0)
with nblaunch.Session(num_processes=1, backend="cpu") as session:
    from nblaunch.session.session import run_in_session
    assert "patience_s=2.0" in problem(run_in_session, session=session, spec=LaunchSpec(function=print, patience_s=2.0))
"""


def test_a_new_setting_is_declared_in_one_file(tmp_path: Path) -> None:
    copy = shutil.copytree(
        Path(nblaunch.__file__).parent, tmp_path / "nblaunch", ignore=shutil.ignore_patterns("__pycache__")
    )
    spec = copy / "spec.py"
    text = spec.read_text(encoding="utf-8")
    before = "    has_breakpoints: bool = False\n"
    assert text.count(before) == 1
    spec.write_text(text.replace(before, _A_NEW_SETTING), encoding="utf-8")
    (tmp_path / "check.py").write_text(_WHAT_IT_DOES)
    done = subprocess.run(
        [sys.executable, "check.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
