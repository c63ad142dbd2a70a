"""Wrong uses of ``nblaunch launch`` give one clear line and exit code 2, and start nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ended, script

Command = Callable[..., Ended]


def assert_rejected(ended: Ended, *words: str) -> None:
    assert ended.code == 2
    assert ended.out == ""
    (line,) = ended.err.splitlines()
    assert line.startswith("nblaunch launch: error: ")
    assert all(word in line for word in words), line
    assert not Path("logs").exists() or not list(Path("logs").iterdir()), "a job was begun"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", ["no script"]),
        ("none.py", ["none.py", "no such file"]),
        (".", ["no __main__.py", "-m"]),
        ("python train.py", ["python: ", "leave out the interpreter"]),
        ("python3.12 -m train", ["python3.12: ", "leave out the interpreter"]),
        ("-m none.at.all", ["none.at.all", "no such module"]),
        ("-m train.py", ["train.py", "without -m"]),
        ("--num_proceses 2 train.py", ["--num_proceses is unknown", "did you mean --num_processes"]),
        ("--num-proceses=2 train.py", ["did you mean --num_processes"]),
        ("--num_processes train.py", ["whole number"]),
        ("--num_processes 0 train.py", ["--num_processes", "at least 1"]),
        ("--num_processes", ["--num_processes", "expected one argument"]),
        ("--num_processes 99999999999999999999 train.py", ["num_processes", "at most 4096 on one machine"]),
        ("--mixed_precision fp4 train.py", ["no, fp16, bf16, fp8"]),
        ("--cpu --mixed_precision fp8 train.py", ["fp8", "cpu"]),
        ("--fp8_margin 1 train.py", ["fp8_margin", "Transformer Engine"]),
        ("--fp8_backend te train.py", ["fp8_backend", "AO"]),
        ("--cpu --multi_gpu train.py", ["--cpu", "--multi_gpu", "contradict"]),
        ("--backend cuda --cpu train.py", ["--backend cuda", "--cpu", "contradict"]),
        ("--use_fsdp --use-deepspeed train.py", ["--use_fsdp", "--use_deepspeed", "contradict"]),
        ("--zero_stage 2 train.py", ["zero_stage", "strategy deepspeed"]),
        ("--use_fsdp --zero_stage 2 train.py", ["zero_stage", "strategy deepspeed"]),
        (
            "--num_machines 2 --machine_rank 2 --main_process_ip 127.0.0.1 train.py",
            ["machine_rank=2", "num_machines=2"],
        ),
        ("--machine_rank 1 train.py", ["machine_rank=1", "num_machines=1"]),
        ("--num_machines 2 train.py", ["main_process_ip"]),
        (
            "--num_processes 2 --parallelism_config_dp_shard_size 2 --parallelism-config-tp-size 2 train.py",
            ["num_processes=2", "parallelism_config_tp_size=2", "is 4"],
        ),
        (
            "--parallelism_config_sp_size 2 train.py",
            ["sequence parallelism is not available", "parallelism_config_cp_size"],
        ),
        ("--deepspeed_inclusion_filter a train.py", ["on every machine"]),
        ("--megatron_lm_tp_degree 2 train.py", ["Megatron-LM is not available"]),
        ("--no_python train.py", ["only Python"]),
        ("--config_file none.yaml train.py", ["none.yaml", "no such file"]),
        ("--config_file wrong.yaml train.py", ["wrong.yaml", "bogus is unknown"]),
        ("--config_file type.yaml train.py", ["type.yaml", "num_processes: 'many'"]),
        ("--config_file rank.yaml train.py", ["machine_rank=3", "file rank.yaml"]),
        ("--strategy spmd --cpu train.py", ["spmd", "command line"]),
        ("--gpu_ids 0 --cpu train.py", ["gpu_ids", "backend is cpu"]),
        ("--cpu --log_dir train.py/logs train.py", ["train.py/logs", "can't create"]),
        ("--cpu --use_deepspeed --deepspeed_config_file no.json train.py", ["no.json", "no such file"]),
    ],
)
def test_a_wrong_use_is_rejected(command: Command, options: str, words: list[str]) -> None:
    script("raise AssertionError('the script must not run')\n")
    Path("wrong.yaml").write_text("bogus: 1\n")
    Path("type.yaml").write_text("num_processes: many\n")
    Path("rank.yaml").write_text("machine_rank: 3\n")
    assert_rejected(command("launch", *options.split()), *words)


def test_a_taken_port_is_rejected(command: Command) -> None:
    name = script("raise AssertionError('the script must not run')\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = command("launch", "--cpu", "--num_processes", "2", "--main_process_port", str(port), name)
    assert_rejected(ended, str(port), "in use", "leave main_process_port out")


def test_another_machines_address_is_rejected_by_option_name(command: Command) -> None:
    options = "--cpu --num_machines 2 --main_process_ip 192.0.2.200"
    ended = command("launch", *options.split(), script("raise AssertionError('the script must not run')\n"))
    (line,) = ended.err.splitlines()
    assert ended.code == 2
    assert "192.0.2.200" in line
    assert "main_process_ip or rdzv_endpoint" in line


def test_options_of_the_script_are_not_options_of_the_launch(command: Command) -> None:
    """``--print_plan`` after the script is the script's."""
    name = script("")
    ended = command("launch", "--print_plan", name, "--num_processes", "x", "--bogus")
    assert ended.code == 0, ended.err


def test_options_without_effect_are_accepted(command: Command) -> None:
    ended = command(
        "launch",
        "--cpu",
        "--same_network",
        "-t",
        "3",
        "--fsdp-use-orig-params",
        "true",
        "--print_plan",
        script(""),
    )
    assert ended.code == 0, ended.err
    assert "no effect" not in ended.out


def test_options_that_the_user_misses_are_named(command: Command) -> None:
    ended = command(
        "launch", "--cpu", "--enable_cpu_affinity", "--zero3_init_flag", "true", "--print_plan", script("")
    )
    assert (
        "note: enable_cpu_affinity and zero3_init_flag (command line) have no effect in nblaunch" in ended.out
    )
