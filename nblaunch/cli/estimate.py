"""``nblaunch estimate-memory``: what a model takes on each device and host, by strategy, before anything is launched.

How a model is named and measured is in ``model_size.py``, the arithmetic with its sources in ``memory_needs.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from nblaunch import in_words
from nblaunch.cli import memory_needs as needs
from nblaunch.cli.model_size import model_size
from nblaunch.cli.usage import UsageError

_SIZE = re.compile(r"([\d.]+)\s*([KMGT]i?)?B?", re.IGNORECASE)


def add_parser(subparsers: Any) -> None:
    """The command and its options."""
    parser = subparsers.add_parser(
        "estimate-memory",
        help="tell how much memory a model takes, by strategy",
        description="Tell how much memory training and inference of a model take on each device and host, by strategy "
        "and precision, without making a single weight. Not counted: activations, the processes themselves.",
    )
    parser.add_argument(
        "model", nargs="?",
        help="package.module:Class or package.module:function (called without arguments), or the name or folder of a "
        "transformers model",
    )  # fmt: skip
    parser.add_argument("--parameters", metavar="COUNT", help="instead of a model: 7e9, 7B, 350M")
    parser.add_argument("--trainable", metavar="COUNT", help="how many of them are trained; default: all")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="argument for the class or function"
    )
    parser.add_argument(
        "--num_devices", "--num-devices", type=int, default=8, help="of the whole job; default: 8"
    )
    parser.add_argument(
        "--devices_per_host", "--devices-per-host", type=int, help="default: up to 8 of them on each"
    )
    parser.add_argument(
        "--device",
        choices=("gpu", "cpu", "tpu"),
        default="gpu",
        help="default: gpu; with cpu a device is a core",
    )
    parser.add_argument(
        "--mixed_precision", "--mixed-precision", nargs="+", choices=needs.PRECISIONS, default=["no", "bf16"],
        help="of training; default: no bf16",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(needs.DTYPE_BYTES), default=["float32", "bfloat16", "int8", "int4"],
        help="of weights in inference; default: float32 bfloat16 int8 int4",
    )  # fmt: skip
    parser.add_argument(
        "--strategies", nargs="+", choices=list(needs.TRAINING), default=list(needs.TRAINING), metavar="STRATEGY",
        help=f"of {', '.join(needs.TRAINING)}; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer", choices=list(needs.OPTIMIZER_STATES), default="adam", help="default: adam"
    )
    parser.add_argument(
        "--fits", metavar="SIZE", help="tell what fits into a device of this size: 80GB, 16GiB"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, in bytes")


def run(arguments: argparse.Namespace) -> int:
    """Print what training takes; returns the exit code."""
    model = model_size(arguments)
    setting = _setting(arguments)
    capacity = None if arguments.fits is None else _parse_size(arguments.fits)
    rows = [*_training_rows(arguments, model, setting), *_inference_rows(arguments, model, setting)]
    if arguments.json:
        print(json.dumps({"model": dataclasses.asdict(model), "rows": rows}, indent=2))
    else:
        print(_render(model, setting, arguments.optimizer, rows, capacity))
    return 0


def _training_rows(
    arguments: argparse.Namespace, model: needs.ModelSize, setting: needs.Setting
) -> list[dict[str, Any]]:
    rows = []
    for precision in arguments.mixed_precision:
        chosen = dataclasses.replace(setting, precision=precision)
        for strategy in arguments.strategies:
            if strategy == "xla" and precision == "fp16":
                continue  # XLA devices have none
            rows.append(_row("training", precision, strategy, needs.training_need(strategy, model, chosen)))
    return rows


def _inference_rows(
    arguments: argparse.Namespace, model: needs.ModelSize, setting: needs.Setting
) -> list[dict[str, Any]]:
    """Strategies that hold whole copies of the weights are all alike here, and told once."""
    whole = [name for name in arguments.strategies if name not in needs.SHARDED][:1]
    sharded = [name for name in arguments.strategies if name in needs.SHARDED][:1]
    return [
        _row("inference", dtype, label, needs.inference_need(strategy, model, setting, dtype))
        for dtype in arguments.dtypes
        for label, names in (("whole copies", whole), ("sharded", sharded))
        for strategy in names
    ]


def _row(purpose: str, precision: str, strategy: str, need: needs.Need) -> dict[str, Any]:
    parts = {f"{name}_bytes": value for name, value in dataclasses.asdict(need).items()}
    return {
        "purpose": purpose, "precision": precision, "strategy": strategy, **parts, "device_bytes": need.device
    }  # fmt: skip


# --- the setting -----------------------------------------------------------------------------------------------------


def _setting(arguments: argparse.Namespace) -> needs.Setting:
    per_host = arguments.devices_per_host or min(arguments.num_devices, 8)
    for option, count in (("--num_devices", arguments.num_devices), ("--devices_per_host", per_host)):
        if count < 1:
            raise UsageError(f"{option} {count} must be at least 1")
    if arguments.num_devices % per_host:
        raise UsageError(
            f"--num_devices {arguments.num_devices} is not a multiple of --devices_per_host {per_host}"
        )
    return needs.Setting(
        num_devices=arguments.num_devices,
        devices_per_host=per_host,
        optimizer_states=needs.OPTIMIZER_STATES[arguments.optimizer],
        device=arguments.device,
    )


def _parse_size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--fits {text!r} is not a size of memory; valid are 80GB, 16GiB")
    unit = (found[2] or "").upper()
    power = "KMGT".index(unit[0]) + 1 if unit else 0
    return int(float(found[1]) * (1024 if unit.endswith("I") else 1000) ** power)


# --- the table -------------------------------------------------------------------------------------------------------

_COLUMNS = ("parameters", "gradients", "optimizer", "buffers", "device", "host")


def _render(
    model: needs.ModelSize,
    setting: needs.Setting,
    optimizer: str,
    rows: Sequence[dict[str, Any]],
    capacity: int | None,
) -> str:
    trained = "all" if model.trainable == model.parameters else f"{model.trainable:,}"
    largest = f", largest block {model.block:,}" if model.block else ""
    lines = [
        f"{model.parameters:,} parameters ({trained} trained{largest}); {setting.num_devices} devices "
        f"({setting.device}), {setting.devices_per_host} on a host; {optimizer}",
        "per device, and in the last column per host; without activations and the processes themselves",
    ]
    if not model.block:
        lines.append(
            "not told by a count: the largest block, which fsdp2 and sharded inference also hold whole"
        )
    for purpose, label in (("training", "mixed precision"), ("inference", "weights")):
        chosen = [row for row in rows if row["purpose"] == purpose]
        if chosen:
            lines += ["", *_table(purpose, label, chosen, capacity)]
    return "\n".join(lines)


def _table(purpose: str, label: str, rows: Sequence[dict[str, Any]], capacity: int | None) -> list[str]:
    grid = [[purpose, label, *_COLUMNS, *(["fits"] if capacity is not None else [])]]
    for row in rows:
        cells = [row["strategy"], row["precision"], *(_cell(row[f"{name}_bytes"]) for name in _COLUMNS)]
        if capacity is not None:
            cells.append("yes" if row["device_bytes"] <= capacity else "no")
        grid.append(cells)
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in grid
    ]


def _cell(num_bytes: int) -> str:
    return in_words.size(num_bytes) if num_bytes else "-"
