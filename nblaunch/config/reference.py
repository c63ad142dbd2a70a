"""Files that ``accelerate config`` wrote, read as they are: its keys in ours, and those that have no meaning here.

Source: accelerate 0.20, 1.0 and 1.15, ``commands/config/config_args.py`` (``ClusterConfig``) and the keys of its
questionnaire in ``commands/config/cluster.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nblaunch.config.kinds import Flag
from nblaunch.config.resolving import ConfigError, named, shown

_DISTRIBUTED_TYPES: dict[str, dict[str, Any]] = {
    "NO": {},
    "MULTI_CPU": {"backend": "cpu"},
    "MULTI_GPU": {"backend": "cuda"},
    "XLA": {"backend": "xla"},
    "TPU": {"backend": "xla"},
    "FSDP": {"strategy": "fsdp"},
    "DEEPSPEED": {"strategy": "deepspeed"},
}

_WITHOUT_MEANING = {
    "main_training_function": "the whole script runs in every process",
    "same_network": "rdzv_backend says how machines find each other",
    "enable_cpu_affinity": "processes are not bound to cores",
    "ipex_config": "what Intel's extension brought is part of PyTorch",
    "zero3_init_flag": "build the model in `with deepspeed.zero.Init():` instead",
    "deepspeed_multinode_launcher": "every machine runs nblaunch launch",
    "deepspeed_hostfile": "every machine runs nblaunch launch",
    "deepspeed_exclusion_filter": "every machine runs nblaunch launch",
    "deepspeed_inclusion_filter": "every machine runs nblaunch launch",
}
"""Keys that are read and change nothing, with why."""

_REFUSED = {
    "fp8_config": "training in fp8",
    "megatron_lm_config": "Megatron-LM",
    "mpirun_config": "launching through mpirun",
    "parallelism_config": "combined parallelism",
    "tpu_use_cluster": "starting the machines of a TPU pod from one of them",
    "tpu_name": "starting the machines of a TPU pod from one of them",
    "tpu_zone": "starting the machines of a TPU pod from one of them",
    "tpu_use_sudo": "starting the machines of a TPU pod from one of them",
    "tpu_vm": "starting the machines of a TPU pod from one of them",
    "tpu_env": "starting the machines of a TPU pod from one of them",
    "command_file": "starting the machines of a TPU pod from one of them",
    "commands": "starting the machines of a TPU pod from one of them",
}
"""Keys that ask for what nblaunch does not have, unless they are empty."""

_OLD_NAMES = {
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
}


def translated(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Keys of the reference in ours; what is neither is left for the caller to judge.

    Args:
        raw: the file's keys, those of nested mappings among them.

    Returns:
        The keys that are left, and notes about those that change nothing.

    Raises:
        ConfigError: the file asks for something that nblaunch does not have.
    """
    ours: dict[str, Any] = {}
    notes = []
    for key, value in raw.items():
        if key == "num_processes" and value == -1:
            continue  # its way to write that nothing is set
        if key == "deepspeed_config_file" and value == "none":
            continue  # likewise: what its questionnaire offers as the answer
        if key in _REFUSED:
            _refuse_unless_empty(key, value)
        elif key in _WITHOUT_MEANING:
            if _asks_for_something(key, value):
                notes.append(f"{key} changes nothing: {_WITHOUT_MEANING[key]}")
        elif key not in ("compute_environment", "distributed_type", "use_cpu", "fp16"):
            ours[_OLD_NAMES.get(key, key)] = value
    _translate_environment(raw)
    return _translated_device(raw) | ours, notes


def _asks_for_something(key: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(value.values())
    return value not in (None, False, "main", True) or (key == "zero3_init_flag" and value is True)


def _refuse_unless_empty(key: str, value: Any) -> None:
    is_empty = value is None or value is False or value in ("", "no", [], [""], {})
    if not is_empty:
        raise ConfigError(f"{key}: {_REFUSED[key]} is not available in nblaunch")


def _translate_environment(raw: Mapping[str, Any]) -> None:
    environment = raw.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise ConfigError(
            f"compute_environment: {named(environment)} is not available in nblaunch, only LOCAL_MACHINE"
        )


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    try:
        return value is not None and Flag().convert(value)
    except ValueError as error:
        raise ConfigError(f"{key}: {shown(value)} {error}") from None


def _translated_device(raw: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kind = raw.get("distributed_type")
    if kind is not None:
        # YAML reads the word NO, where it is not quoted, as a truth value.
        name = "NO" if kind is False else str(kind)
        if name not in _DISTRIBUTED_TYPES:
            valid = ", ".join(_DISTRIBUTED_TYPES)
            raise ConfigError(
                f"distributed_type: {named(kind)} is not available in nblaunch; valid are {valid}"
            )
        found |= _DISTRIBUTED_TYPES[name]
        if name == "NO":
            found["num_processes"] = 1
    if _flag(raw, "use_cpu"):
        found["backend"] = "cpu"
    if _flag(raw, "fp16") and "mixed_precision" not in raw:
        found["mixed_precision"] = "fp16"
    return found
