"""Environment variables that pass a launch's settings to Accelerate's own ``Accelerator`` in the ranks.

``accelerate launch`` sets the same variables. transformers and other libraries that build on Accelerate read them, too.
nblaunch's ``Accelerator`` gets the settings with the launch, and needs no variables.

Source: accelerate 1.15, ``utils/launch.py``.
"""

from __future__ import annotations

from typing import Any

from nblaunch.config.settings import SETTINGS, Resolved

_NAMES = {
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "debug": "ACCELERATE_DEBUG_MODE",
    "use_parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    **{
        name: f"ACCELERATE_DEEPSPEED_{name.upper()}"
        for name in ("zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model",
                     "offload_optimizer_nvme_path", "offload_param_nvme_path")
    },
}  # fmt: skip
"""Setting -> variable, if it differs from the prefix in ``_PREFIXES`` and the setting's name."""

_PREFIXES = {
    "dynamo_config": "ACCELERATE_",
    "fp8_config": "ACCELERATE_",
    "fsdp_config": "",
    "deepspeed_config": "ACCELERATE_",
    "parallelism_config": "",
}
"""Group -> start of the names of its variables."""

_FSDP_1 = {"FSDP_USE_ORIG_PARAMS": "true", "FSDP_SYNC_MODULE_STATES": "true"}
"""What ``accelerate launch`` sets by default for FSDP version 1."""


def accelerate_variables(resolved: Resolved) -> dict[str, str]:
    """Return variable -> value for the settings that the user has chosen."""
    variables = _of_group(resolved, "training")
    if resolved["dynamo_backend"] != "no":
        variables |= _of_group(resolved, "dynamo_config")
        variables["ACCELERATE_DYNAMO_BACKEND"] = resolved["dynamo_backend"].upper()
    variables |= _of_group(resolved, "fp8_config")
    if resolved["strategy"] == "fsdp":
        variables |= _of_group(resolved, "fsdp_config")
        variables |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": resolved["fsdp_version"]}
        if resolved["fsdp_version"] == "1":
            variables |= _FSDP_1
    if resolved["strategy"] == "deepspeed":
        variables |= _of_group(resolved, "deepspeed_config") | {"ACCELERATE_USE_DEEPSPEED": "true"}
    if resolved.group("parallelism_config"):
        variables |= _of_group(resolved, "parallelism_config") | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    return variables


def _of_group(resolved: Resolved, group: str) -> dict[str, str]:
    return {
        variable: _text(value)
        for name, value in resolved.group(group).items()
        if value is not None
        and (variable := _variable(name)) is not None
        and (name, value) != ("debug", False)
    }


def _variable(setting: str) -> str | None:
    """Return the variable for a setting; None if Accelerate has none."""
    prefix = _PREFIXES.get(SETTINGS[setting].group)
    return _NAMES.get(setting) or (None if prefix is None else f"{prefix}{setting.upper()}")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
