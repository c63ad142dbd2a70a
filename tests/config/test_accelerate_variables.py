"""Variables that pass settings to Accelerate's own Accelerator: the same as with ``accelerate launch``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import launch as reference

from nblaunch.config import files
from nblaunch.config.launching import spec_of
from nblaunch.config.settings import resolve
from tests.cli.conftest import launch, own_folders, script  # noqa: F401  own_folders is a fixture

FSDP_2 = {
    "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "A,B",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_reshard_after_forward": False, "fsdp_offload_params": True,
    "fsdp_activation_checkpointing": True, "fsdp_cpu_ram_efficient_loading": True,
}  # fmt: skip
FSDP_1 = {
    "fsdp_version": 1,
    "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
    "fsdp_auto_wrap_policy": "NO_WRAP",
}
DEEPSPEED = {
    "zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "offload_param_device": "cpu",
    "offload_optimizer_device": "none", "zero3_save_16bit_model": True, "deepspeed_moe_layer_cls_names": "Block",
}  # fmt: skip
DYNAMO = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "reduce-overhead", "dynamo_use_fullgraph": True}
PARALLELISM = {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2}


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"distributed_type": "FSDP", "fsdp_config": FSDP_2}, {"ACCELERATE_USE_FSDP", "FSDP_OFFLOAD_PARAMS"}),
        ({"distributed_type": "FSDP", "fsdp_config": FSDP_1}, {"FSDP_VERSION", "FSDP_USE_ORIG_PARAMS"}),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": DEEPSPEED},
            {"ACCELERATE_DEEPSPEED_ZERO_STAGE"},
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "zero.json"}},
            {"ACCELERATE_DEEPSPEED_CONFIG_FILE"},
        ),
        ({"dynamo_config": DYNAMO, "debug": True}, {"ACCELERATE_DYNAMO_MODE", "ACCELERATE_DEBUG_MODE"}),
        (
            {"distributed_type": "FSDP", "fsdp_config": FSDP_2, "parallelism_config": PARALLELISM},
            {"ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_TP_SIZE"},
        ),
    ],
)
def test_variables_are_those_of_accelerate_launch(
    values: dict[str, Any], names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    base = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "mixed_precision": "bf16",
            "use_cpu": False, "debug": False, "num_processes": 4, "main_process_port": 0}  # fmt: skip
    ClusterConfig(**(base | values)).to_yaml_file("accelerate.yaml")
    arguments = launch_command_parser().parse_args(["--config_file", "accelerate.yaml", "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ""
    prepared = (
        reference.prepare_deepspeed_cmd_env(arguments)[1]
        if arguments.use_deepspeed
        else reference.prepare_multi_gpu_env(arguments)
    )
    resolved = resolve([files.read(Path("accelerate.yaml"))])
    passed = spec_of(resolved, print).environment
    assert names <= passed.keys()
    expected = {name: prepared.get(name, "missing") for name in passed}
    assert {name: value.lower() for name, value in passed.items()} == {
        name: value.lower() for name, value in expected.items()
    }


def test_the_accelerator_of_accelerate_gets_the_settings() -> None:
    name = script("""
        import accelerate
        from nblaunch import Accelerator

        theirs = accelerate.Accelerator(cpu=True)
        ours = Accelerator()
        for one in (theirs, ours):
            print(one.gradient_accumulation_steps, one.mixed_precision, one.state.dynamo_plugin.backend.lower())
    """)
    options = ["--num_processes", "1", "--gradient_accumulation_steps", "4", "--dynamo_backend", "eager"]
    ended = launch(*options, "--mixed_precision", "bf16", name)
    assert ended.code == 0, ended.err
    assert ended.lines == ["4 bf16 eager"] * 2
