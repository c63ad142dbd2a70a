"""``nblaunch estimate-memory``: estimates the memory that a model needs on each device, by strategy.

Nothing is launched. The user passes the number of parameters, or the command counts them on the meta device, which
allocates no weights. The estimate is bytes per parameter times parameters per device.

The table shows the bytes that a training step needs on each device. Ψ is the number of parameters, Ψt the number of
trained parameters, N the number of devices, and k the number of optimizer states per trained parameter (2 for Adam).
``p`` is the size of a stored weight and ``g`` the size of a gradient, in bytes.

    strategy   parameters  gradients  optimizer     buffers                                precision
    single     pΨ          gΨt        4kΨt          -                                      p = g = 4, even in autocast
    ddp        pΨ          gΨt        4kΨt          gΨt  (buckets of the all-reduce)       p = g = 4
    fsdp2      pΨ/N        gΨt/N      4kΨt/N        c(root + 2 blocks) + g block, c: 4|2   p = g = 4
    zero1      pΨ          gΨt        (4k+4)Ψt/N    g min(Ψt, 5e8)                         p = g = 2 (fp32: 4)
    zero2      pΨ          gΨt/N      (4k+4)Ψt/N    g min(Ψt, 5e8)                         p = g = 2 (fp32: 4)
    zero3      pΨ/N        gΨt/N      (4k+4)Ψt/N    p min(Ψ, 1e9) + g min(Ψt, 5e8)         p = g = 2 (fp32: 4)
    xla        pΨ          gΨt        pkΨt          -                                      bf16: p = g = 2 (fp32: 4)

Autocast frees its 16-bit copies of weights before gradients are allocated, so they do not add to the peak. On GPUs the
default implementation of optimizers (foreach) needs another 4Ψt (fsdp2: 4Ψt/N) during a step. Activations, the Python
process and the device's runtime are not counted, because they depend on the batch, the code and the driver.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3
and figure 1, for the three stages; DeepSpeed's configuration reference for the sizes of its buffers
(``reduce_bucket_size`` 5e8, ``stage3_max_live_parameters`` 1e9, in elements); PyTorch's documentation for
DistributedDataParallel (``gradient_as_bucket_view`` saves the memory of all gradients, but is not the default),
``fully_shard`` (gathers the root, the unit that is computing, and the next unit) and ``torch.optim.Adam`` (``foreach``
needs about as much memory as the parameters). ``tests/cli/test_estimate.py`` (single, ddp, fsdp2) and
``tests/xla/test_estimate.py`` compare the estimates with real training on CPU cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nblaunch import formatting
from nblaunch.cli import UsageError, named_value
from nblaunch.packages import is_installed

if TYPE_CHECKING:
    from torch import nn

# --- bytes per device ------------------------------------------------------------------------------------------------

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}
PRECISIONS = ("no", "bf16", "fp16")
OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "momentum": 1, "sgd": 0}

_FP32 = 4
_HALF = 2
_REDUCE_BUCKET = 500_000_000
_MAX_LIVE = 1_000_000_000


@dataclass(frozen=True)
class ModelSize:
    """Size of a model, counted in elements.

    Args:
        parameters: number of parameters; shared ones count once.
        trainable: parameters with gradients.
        buffers: elements of buffers such as running means.
        block: parameters of the largest block; a sharded model gathers one block at a time.
        root: parameters outside all blocks, such as embeddings.
    """

    parameters: int
    trainable: int
    buffers: int = 0
    block: int = 0
    root: int = 0


@dataclass(frozen=True)
class Need:
    """Bytes on one device, by purpose."""

    parameters: int
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    @property
    def device(self) -> int:
        """All bytes on one device."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class JobSettings:
    """Devices and settings of a job.

    Args:
        num_devices: number of devices in the whole job.
        precision: ``mixed_precision`` for training.
        optimizer_states: number of values that the optimizer keeps per parameter.
        device: ``"gpu"``, ``"cpu"`` (devices are cores) or ``"tpu"``.
    """

    num_devices: int = 1
    precision: str = "no"
    optimizer_states: int = 2
    device: str = "gpu"


def _single(model: ModelSize, settings: JobSettings) -> Need:
    return Need(
        parameters=_FP32 * (model.parameters + model.buffers),
        gradients=_FP32 * model.trainable,
        optimizer=_FP32 * settings.optimizer_states * model.trainable,
        buffers=_foreach(model, settings),
    )


def _ddp(model: ModelSize, settings: JobSettings) -> Need:
    alone = _single(model, settings)
    return Need(alone.parameters, alone.gradients, alone.optimizer, alone.buffers + _FP32 * model.trainable)


def _fsdp2(model: ModelSize, settings: JobSettings) -> Need:
    count = settings.num_devices
    compute = _FP32 if settings.precision == "no" else _HALF
    whole = compute * (model.root + 2 * model.block) + _FP32 * model.block
    return Need(
        parameters=_share(_FP32 * model.parameters, count) + _FP32 * model.buffers,
        gradients=_share(_FP32 * model.trainable, count),
        optimizer=_share(_FP32 * settings.optimizer_states * model.trainable, count),
        buffers=_share(_foreach(model, settings), count) + (whole if count > 1 else 0),
    )


def _zero(stage: int) -> Callable[[ModelSize, JobSettings], Need]:
    def need(model: ModelSize, settings: JobSettings) -> Need:
        count = settings.num_devices
        stored = _FP32 if settings.precision == "no" else _HALF
        live = stored * min(model.parameters, _MAX_LIVE) if stage == 3 and count > 1 else 0
        return Need(
            parameters=_share(stored * model.parameters, count if stage == 3 else 1) + stored * model.buffers,
            gradients=_share(stored * model.trainable, count if stage >= 2 else 1),
            # The optimizer also keeps fp32 weights; the 16-bit weights are copies of them.
            optimizer=_share(_FP32 * (settings.optimizer_states + 1) * model.trainable, count),
            buffers=live + stored * min(model.trainable, _REDUCE_BUCKET),
        )

    return need


def _xla(model: ModelSize, settings: JobSettings) -> Need:
    stored = _FP32 if settings.precision == "no" else _HALF
    return Need(
        parameters=stored * (model.parameters + model.buffers),
        gradients=stored * model.trainable,
        optimizer=stored * settings.optimizer_states * model.trainable,
    )


TRAINING: dict[str, Callable[[ModelSize, JobSettings], Need]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero(3),
    "xla": _xla,
}
"""Strategy -> memory of a training step on each device."""

SHARDED = ("fsdp2", "zero3")
"""Strategies that shard the weights."""


def training_need(strategy: str, model: ModelSize, settings: JobSettings) -> Need:
    """Return how much memory training needs on each device."""
    return TRAINING[strategy](model, settings)


def inference_need(strategy: str, model: ModelSize, settings: JobSettings, dtype: str) -> Need:
    """Return how much memory the weights need for inference in ``dtype``, a key of :data:`DTYPE_BYTES`."""
    width = DTYPE_BYTES[dtype]
    weights = int(width * (model.parameters + model.buffers))
    if strategy in SHARDED and settings.num_devices > 1:
        whole = int(width * (model.root + 2 * model.block))
        return Need(parameters=_share(weights, settings.num_devices), buffers=whole)
    return Need(parameters=weights)


def _foreach(model: ModelSize, settings: JobSettings) -> int:
    has_temporaries = settings.device == "gpu" and settings.optimizer_states > 0
    return _FP32 * model.trainable if has_temporaries else 0


def _share(num_bytes: int, count: int) -> int:
    """Return the size in bytes of one of ``count`` shards, rounded up for padding."""
    return -(-num_bytes // count)


# --- the size of the model -------------------------------------------------------------------------------------------

_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_AMOUNT = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([KMBGT]?)")


def model_size(arguments: argparse.Namespace) -> ModelSize:
    """Count the parameters of the named model, or take the count from ``--parameters``; return the model's size.

    Raises:
        UsageError: no model is given, or the model can't be built.
    """
    if (arguments.model is None) == (arguments.parameters is None):
        raise UsageError("give either a model (package.module:Class) or --parameters COUNT")
    if arguments.parameters is not None:
        count = parse_count("--parameters", arguments.parameters)
        size = ModelSize(parameters=count, trainable=count)
    else:
        settings: dict[str, Any] = dict(named_value("--set", setting) for setting in arguments.set)
        name = arguments.model
        if arguments.library_name == "timm":
            name, settings = "timm:create_model", {"model_name": name, **settings}
        elif ":" not in name:  # if it were None, transformers would prompt the user
            settings.setdefault("trust_remote_code", arguments.trust_remote_code)
        size = measure(_load(name, settings))
    if arguments.trainable is None:
        return size
    trainable = parse_count("--trainable", arguments.trainable)
    if trainable > size.parameters:
        raise UsageError(
            f"--trainable {arguments.trainable} is more than the model's {size.parameters:,} parameters"
        )
    return replace(size, trainable=trainable)


def parse_count(option: str, text: str) -> int:
    """Return a number written as ``7e9``, ``7B``, ``350M`` or ``125_000_000``.

    Raises:
        UsageError: the text is not a number in one of these forms.
    """
    match = _AMOUNT.fullmatch(text.strip().upper().replace("E", "e"))
    amount = float(match[1].replace("_", "")) * _MULTIPLES[match[2]] if match else 0.0
    count = round(amount) if math.isfinite(amount) else 0
    if count < 1:
        raise UsageError(
            f"{option} {text!r} is not a number of parameters; write 7e9, 7B, 350M or 125_000_000"
        )
    return count


def measure(model: nn.Module) -> ModelSize:
    """Return the size of a model; shared parameters and buffers count once."""
    # Imported here, because it imports torch.
    units: Any = importlib.import_module("nblaunch.training.strategies.fsdp2.units")
    remaining = {id(parameter): parameter.numel() for parameter in model.parameters()}
    total, blocks = sum(remaining.values()), []
    for _, unit in units.choose(model):  # innermost first
        blocks.append(sum(remaining.pop(id(parameter), 0) for parameter in unit.parameters()))
    return ModelSize(
        parameters=total,
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        buffers=sum(buffer.numel() for buffer in model.buffers()),
        block=max(blocks, default=0),
        root=sum(remaining.values()),
    )


def _load(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build the model called ``name`` on the meta device.

    Raises:
        UsageError: the model does not exist or can't be built.
    """
    import torch

    try:
        with torch.device("meta"):
            model = _from_module(name, arguments) if ":" in name else _from_transformers(name, arguments)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # user code can raise anything
        first_line = (str(error).splitlines() or [""])[0]
        advice = "Pass arguments with --set name=value"
        if "trust_remote_code" in str(error):
            advice = "Pass --trust_remote_code to run the model's own code"
        raise UsageError(
            f"{name} can't be built on the meta device: {type(error).__name__}: {first_line}. {advice}; "
            "--parameters COUNT works without a model"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{name} returned an object of type {type(model).__name__}, not a torch.nn.Module")
    return model


def _from_module(name: str, arguments: dict[str, Any]) -> Any:
    import torch

    module_name, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        # As in `python -m`: the module is usually a file in the working folder.
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{name}: no module named {error.name!r}") from error
    for part in path.split("."):
        if not hasattr(target, part):
            raise UsageError(f"{name}: {getattr(target, '__name__', target)} has no {part!r}")
        target = getattr(target, part)
    is_built = isinstance(target, torch.nn.Module)
    return target(**arguments) if callable(target) and not is_built else target


def _from_transformers(name: str, arguments: dict[str, Any]) -> Any:
    if not is_installed("transformers"):
        raise UsageError(
            f"{name}: for a class or function, write package.module:Name; for a model on the Hugging Face hub, "
            "install transformers (pip install transformers)"
        )
    transformers: Any = importlib.import_module("transformers")
    if Path(name).suffix == ".py":
        raise UsageError(
            f"{name} is a file; write its module and a name in it, such as {Path(name).stem}:build_model"
        )
    if not Path(name).exists():
        # Without a network, transformers keeps trying for a minute.
        print(f"looking for {name} in transformers' cache and on the Hugging Face hub", file=sys.stderr)
    config = transformers.AutoConfig.from_pretrained(name, **arguments)
    trusts = bool(arguments["trust_remote_code"])
    named = (getattr(config, "auto_map", None) or {}) if trusts else {}
    wanted = (config.architectures or [""])[0]
    own_models = [kind for kind in named if kind.startswith("AutoModel")]
    # Prefer the class that the configuration names, then any class with a head.
    own_models.sort(key=lambda kind: (str(named[kind]).rpartition(".")[2] != wanted, kind == "AutoModel"))
    architecture = getattr(transformers, wanted, None)
    if architecture is not None and not own_models:
        return architecture(config)  # includes the head
    kind = own_models[0] if own_models else "AutoModel"
    return getattr(transformers, kind).from_config(config, trust_remote_code=trusts)


# --- the command -----------------------------------------------------------------------------------------------------


def set_up(parser: argparse.ArgumentParser) -> None:
    """Set up the command."""
    parser.description = (
        "Estimate the memory per device for training and inference of a model, by strategy and precision, without "
        "allocating weights. The estimate does not include activations or the processes themselves."
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model", nargs="?",
        help="package.module:Class or package.module:function (called without arguments), or the name or folder of a "
        "transformers model",
    )  # fmt: skip
    parser.add_argument(
        "--parameters", metavar="COUNT", help="number of parameters, instead of a model: 7e9, 7B, 350M"
    )
    parser.add_argument("--trainable", metavar="COUNT", help="number of trainable parameters; default: all")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="argument for the class or function"
    )
    parser.add_argument(
        "--library_name", "--library-name", choices=("transformers", "timm"), default="transformers",
        help="library that defines the model; default: transformers",
    )  # fmt: skip
    parser.add_argument(
        "--trust_remote_code", "--trust-remote-code", action="store_true",
        help="run the code in the model's repository; use it only for repositories that you trust",
    )  # fmt: skip
    parser.add_argument(
        "--num_devices",
        "--num-devices",
        type=int,
        default=8,
        help="number of devices in the whole job; default: 8",
    )
    parser.add_argument(
        "--device",
        choices=("gpu", "cpu", "tpu"),
        default="gpu",
        help="kind of device; default: gpu; with cpu, a device is a core",
    )
    parser.add_argument(
        "--mixed_precision", "--mixed-precision", nargs="+", choices=PRECISIONS, default=["no", "bf16"],
        help="mixed precisions to train with; default: no and bf16",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(DTYPE_BYTES), default=["float32", "bfloat16", "int8", "int4"],
        help="data types of the weights for inference; default: float32 bfloat16 int8 int4",
    )  # fmt: skip
    parser.add_argument(
        "--strategies", nargs="+", choices=list(TRAINING), default=list(TRAINING), metavar="STRATEGY",
        help=f"strategies to include, from {', '.join(TRAINING)}; default: all",
    )  # fmt: skip
    parser.add_argument("--optimizer", choices=list(OPTIMIZER_STATES), default="adam", help="default: adam")
    parser.add_argument("--json", action="store_true", help="print JSON with sizes in bytes")


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate and return the exit code."""
    model = model_size(arguments)
    if arguments.num_devices < 1:
        raise UsageError(f"--num_devices {arguments.num_devices} must be at least 1")
    settings = JobSettings(
        num_devices=arguments.num_devices,
        optimizer_states=OPTIMIZER_STATES[arguments.optimizer],
        device=arguments.device,
    )
    rows = [*_training_rows(arguments, model, settings), *_inference_rows(arguments, model, settings)]
    if arguments.json:
        print(json.dumps({"model": asdict(model), "rows": rows}, indent=2))
    else:
        print(_render(model, settings, arguments.optimizer, rows))
    return 0


def _training_rows(
    arguments: argparse.Namespace, model: ModelSize, settings: JobSettings
) -> list[dict[str, Any]]:
    rows = []
    for precision in arguments.mixed_precision:
        chosen = replace(settings, precision=precision)
        for strategy in arguments.strategies:
            if strategy == "xla" and precision == "fp16":
                continue  # not supported by XLA devices
            rows.append(_row("training", precision, strategy, training_need(strategy, model, chosen)))
    return rows


def _inference_rows(
    arguments: argparse.Namespace, model: ModelSize, settings: JobSettings
) -> list[dict[str, Any]]:
    """Return rows for inference; strategies with full copies of the weights need the same memory and share a row."""
    whole = [name for name in arguments.strategies if name not in SHARDED][:1]
    sharded = [name for name in arguments.strategies if name in SHARDED][:1]
    return [
        _row("inference", dtype, label, inference_need(strategy, model, settings, dtype))
        for dtype in arguments.dtypes
        for label, names in (("whole copies", whole), ("sharded", sharded))
        for strategy in names
    ]


def _row(purpose: str, precision: str, strategy: str, need: Need) -> dict[str, Any]:
    parts = {f"{name}_bytes": value for name, value in asdict(need).items()}
    return {
        "purpose": purpose, "precision": precision, "strategy": strategy, **parts, "device_bytes": need.device
    }  # fmt: skip


# --- the table -------------------------------------------------------------------------------------------------------

_MEANINGS = {
    "parameters": "weights that a device always holds, and the model's buffers, such as running means",
    "gradients": "gradients of the trained parameters",
    "optimizer": "states such as Adam's two moments; with ZeRO (zero1 to zero3) also the weights in fp32",
    "buffers": "temporary memory: buffers of collectives, gathered weights, the optimizer's working copy on GPUs",
    "device": "the sum of these four: the memory that each device needs, without activations",
}
"""Column -> what it counts, as shown below the table."""


def _render(model: ModelSize, settings: JobSettings, optimizer: str, rows: Sequence[dict[str, Any]]) -> str:
    trained = "all" if model.trainable == model.parameters else f"{model.trainable:,}"
    largest = f", largest block {model.block:,}" if model.block else ""
    lines = [
        f"{model.parameters:,} parameters ({trained} trained{largest}); {settings.num_devices} devices "
        f"({settings.device}); {optimizer}",
        "per device, without activations or the processes themselves",
    ]
    if not model.block:
        lines.append(
            "without a model, the size of the largest block is unknown; fsdp2 and sharded inference need more memory "
            "to gather it"
        )
    for purpose, label in (("training", "mixed precision"), ("inference", "weights")):
        chosen = [row for row in rows if row["purpose"] == purpose]
        if chosen:
            lines += ["", *_table(purpose, label, chosen)]
    lines += ["", *(f"{name:<10}  {meaning}" for name, meaning in _MEANINGS.items())]
    return "\n".join(lines)


def _table(purpose: str, label: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    grid = [[purpose, label, *_MEANINGS]]
    for row in rows:
        grid.append([row["strategy"], row["precision"], *(_cell(row[f"{name}_bytes"]) for name in _MEANINGS)])
    return formatting.columns(grid, num_left=2)


def _cell(num_bytes: int) -> str:
    return formatting.size(num_bytes) if num_bytes else "-"
