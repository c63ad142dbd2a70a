"""Options of ``nblaunch launch``, made from the table of settings, and the layer of settings that was given by them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from nblaunch.cli.usage import UsageError
from nblaunch.config.kinds import Switch
from nblaunch.config.resolving import ConfigError, Layer, convert, unknown
from nblaunch.config.settings import GROUPS, SETTINGS, Setting

COMMAND_LINE = "command line"

SHORTHANDS: dict[str, tuple[str, str, str]] = {
    "cpu": ("backend", "cpu", "compute on the CPU: --backend cpu"),
    "multi_gpu": ("backend", "cuda", "compute on GPUs: --backend cuda"),
    "tpu": ("backend", "xla", "compute on TPUs: --backend xla"),
    "use_fsdp": ("strategy", "fsdp", "shard models over the processes: --strategy fsdp"),
    "use_deepspeed": ("strategy", "deepspeed", "train with DeepSpeed: --strategy deepspeed"),
}
"""Option -> the setting and value that it stands for, and its help."""

WITHOUT_MEANING = {"same_network": 0, "quiet": 0, "enable_cpu_affinity": 0, "tee": 1, "role": 1}
"""Options of the reference that change nothing here, and how many values they take."""

REFUSED = {
    "no_python": "only Python scripts and modules can be launched",
    "use_megatron_lm": "Megatron-LM is not available in nblaunch",
    "megatron_lm_": "Megatron-LM is not available in nblaunch",
    "use_parallelism_config": "combined parallelism is not available in nblaunch",
    "parallelism_config_": "combined parallelism is not available in nblaunch",
    "fp8_": "training in fp8 is not available in nblaunch",
    "mpirun_hostfile": "run `nblaunch launch` on every machine instead, with --num_machines and --machine_rank",
    "tpu_cluster": "run `nblaunch launch` on every machine instead, with --num_machines and --machine_rank",
    "deepspeed_hostfile": "run `nblaunch launch` on every machine instead, with --num_machines and --machine_rank",
    "aws_": "launching on Amazon SageMaker is not available in nblaunch",
}
"""Options of the reference, or what they begin with, that ask for what is not there."""


class Formatter(argparse.HelpFormatter):
    """Shows the form with underscores only; both are understood."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=40, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        before = action.option_strings
        action.option_strings = [option for option in before if "-" not in option.lstrip("-")]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = before


def spellings(name: str) -> list[str]:
    """``--a_b`` and ``--a-b``."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def add_settings(parser: argparse.ArgumentParser) -> None:
    """An option for every setting and shorthand, in the groups of the table."""
    groups = {group: parser.add_argument_group(title) for group, title in GROUPS.items()}
    for name, (setting, _, text) in SHORTHANDS.items():
        groups[SETTINGS[setting].group].add_argument(
            *spellings(name), dest=name, action="store_true", help=text
        )
    for setting_ in SETTINGS.values():
        _add_setting(groups[setting_.group], setting_)
    for name, num_values in WITHOUT_MEANING.items():
        options: dict[str, Any] = {"action": "store_true"} if num_values == 0 else {}
        parser.add_argument(*spellings(name), dest=f"unused_{name}", help=argparse.SUPPRESS, **options)


def _add_setting(group: Any, setting: Setting) -> None:
    default = "" if setting.default in (None, False) else f" (default: {setting.default})"
    text = f"{setting.meaning}{default}".replace("%", "%%")
    if isinstance(setting.kind, Switch):
        group.add_argument(
            *spellings(setting.name), dest=setting.name, action="store_true", default=None, help=text
        )
    else:
        group.add_argument(
            *spellings(setting.name), dest=setting.name, metavar=setting.kind.metavar, help=text
        )


def given_layer(arguments: argparse.Namespace) -> Layer:
    """What the options say.

    Raises:
        UsageError: an option has a wrong value, or two of them contradict each other.
    """
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    try:
        for name in SETTINGS:
            if (value := getattr(arguments, name)) is not None:
                values[name] = convert(name, value, f"--{name}")
                said[name] = f"--{name} {value}"
    except ConfigError as error:
        raise UsageError(str(error)) from None
    for name, (setting, value, _) in SHORTHANDS.items():
        if not getattr(arguments, name):
            continue
        if setting in values and values[setting] != value:
            raise UsageError(f"{said[setting]} and --{name} contradict each other; give one of them")
        values[setting], said[setting] = value, f"--{name}"
    notes = tuple(
        f"--{name} changes nothing" for name in WITHOUT_MEANING if getattr(arguments, f"unused_{name}")
    )
    return Layer(COMMAND_LINE, values, notes)


def explain_unknown(options: Iterable[str]) -> str:
    """Why options are not understood: a slip, or something that is not there; one line for all."""
    known = {*SETTINGS, *SHORTHANDS, "config_file", "module", "print_plan"}
    sentences = []
    for option in options:
        name = option.lstrip("-").partition("=")[0].replace("-", "_")
        reason = next((why for start, why in REFUSED.items() if name.startswith(start)), None)
        if not option.startswith("-"):
            continue
        sentences.append(
            f"--{name}: {reason}" if reason else unknown(f"--{name}", [f"--{one}" for one in known])
        )
    return "; ".join(sentences)
