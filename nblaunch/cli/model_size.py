"""The size of a model that a command names: counted, or measured on the meta device, where no weights are made."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nblaunch.cli.memory_needs import ModelSize
from nblaunch.cli.usage import UsageError
from nblaunch.packages import is_installed

if TYPE_CHECKING:
    from torch import nn

_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_AMOUNT = re.compile(r"([\d_]+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([KMBGT]?)")


def model_size(arguments: argparse.Namespace) -> ModelSize:
    """The size of the model that a command names: by ``model`` and ``set``, or by ``parameters``; and ``trainable``.

    Raises:
        UsageError: it names none, or one that can't be built.
    """
    if (arguments.model is None) == (arguments.parameters is None):
        raise UsageError("name a model (package.module:Class) or give --parameters COUNT, one of the two")
    if arguments.parameters is not None:
        count = parse_count("--parameters", arguments.parameters)
        size = ModelSize(parameters=count, trainable=count)
    else:
        size = measure(_load(arguments.model, arguments.set))
    if arguments.trainable is None:
        return size
    trainable = parse_count("--trainable", arguments.trainable)
    if trainable > size.parameters:
        raise UsageError(
            f"--trainable {arguments.trainable} is more than the model's {size.parameters:,} parameters"
        )
    return dataclasses.replace(size, trainable=trainable)


def parse_count(option: str, text: str) -> int:
    """``7e9``, ``7B``, ``350M``, ``125_000_000`` as a number.

    Raises:
        UsageError: it is none.
    """
    found = _AMOUNT.fullmatch(text.strip().upper().replace("E", "e"))
    amount = float(found[1].replace("_", "")) * _MULTIPLES[found[2]] if found else 0.0
    count = round(amount) if math.isfinite(amount) else 0
    if count < 1:
        raise UsageError(
            f"{option} {text!r} is not a number of parameters; valid are 7e9, 7B, 350M, 125_000_000"
        )
    return count


def measure(model: nn.Module) -> ModelSize:
    """Count parameters and buffers of a model, on whichever device it is; shared ones once."""
    units: Any = importlib.import_module(
        "nblaunch.training.strategies.fsdp2.units"
    )  # not before: it imports torch
    options: Any = importlib.import_module("nblaunch.training.fsdp_options")
    left = {id(parameter): parameter.numel() for parameter in model.parameters()}
    total, blocks = sum(left.values()), []
    for _, unit in units.choose(model, options.FullyShardedDataParallelPlugin()):  # innermost first
        blocks.append(sum(left.pop(id(parameter), 0) for parameter in unit.parameters()))
    return ModelSize(
        parameters=total,
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        buffers=sum(buffer.numel() for buffer in model.buffers()),
        block=max(blocks, default=0),
        root=sum(left.values()),
    )


def _load(name: str, settings: Sequence[str]) -> nn.Module:
    """Build the model that ``name`` stands for on the meta device.

    Raises:
        UsageError: there is no such thing, or it can't be built so; says why.
    """
    import torch

    arguments = dict(_parse_setting(setting) for setting in settings)
    try:
        with torch.device("meta"):
            model = _from_module(name, arguments) if ":" in name else _from_transformers(name, arguments)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # the person's own code, and whatever it raises
        raise UsageError(
            f"{name} can't be built on the meta device: {type(error).__name__}: {_first_line(error)}. Arguments are "
            "given by --set name=value; --parameters COUNT works without a model"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{name} gives an object of type {type(model).__name__}, and not a torch.nn.Module")
    return model


def _from_module(name: str, arguments: dict[str, Any]) -> Any:
    module_name, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `python -m`: the module is mostly a file beside the person
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{name}: there is no module {error.name!r} here") from error
    for part in path.split("."):
        if not hasattr(target, part):
            raise UsageError(f"{name}: {getattr(target, '__name__', target)} has no {part!r}")
        target = getattr(target, part)
    return target(**arguments) if callable(target) and not _is_module(target) else target


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _from_transformers(name: str, arguments: dict[str, Any]) -> Any:
    if not is_installed("transformers"):
        raise UsageError(
            f"{name}: for a class or function write package.module:Name; for the name of a model on the Hugging Face "
            "hub transformers is needed (pip install transformers)"
        )
    transformers: Any = importlib.import_module("transformers")
    if Path(name).suffix == ".py":
        raise UsageError(
            f"{name} is a file; write its module and a name in it, as {Path(name).stem}:build_model"
        )
    config = transformers.AutoConfig.from_pretrained(name, **arguments)
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is not None:
        return architecture(config)  # with its head, as the checkpoint has it
    return transformers.AutoModel.from_config(config)


def _parse_setting(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise UsageError(f"--set {text!r} is not of the form name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
