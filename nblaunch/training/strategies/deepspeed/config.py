"""Reads DeepSpeed's configuration, fills in "auto" values, and rejects contradictions.

Nothing here imports DeepSpeed, touches a device or communicates.

transformers and TRL see the configuration as an :class:`HfDeepSpeedConfig`.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nblaunch import formatting
from nblaunch.training.optimizer import OptimizerPlaceholder, SchedulerPlaceholder

AUTO = "auto"

_ZERO = "zero_optimization"
_ADAMS = ("adam", "adamw")
_MAX_BUCKET = 500_000_000  # elements; DeepSpeed's own default


class DummyOptim(OptimizerPlaceholder):
    """A placeholder for the optimizer that DeepSpeed's configuration describes; ``prepare`` returns the real one.

    Args:
        params: parameters to optimize, or dicts of parameter groups.
        lr: fills in ``optimizer.params.lr`` if that is "auto".
        weight_decay: fills in ``optimizer.params.weight_decay`` in the same way.
        **kwargs: fill in other entries of ``optimizer.params``, such as ``betas`` and ``eps``, by name in the same way.
    """

    needs = "Accelerator(deepspeed_plugin=...), whose configuration describes the optimizer"

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler(SchedulerPlaceholder):
    """A placeholder for the scheduler that DeepSpeed's configuration describes; ``prepare`` returns the real one.

    Args:
        optimizer: the ``DummyOptim`` or optimizer that it schedules.
        total_num_steps: number of steps for a single process; fills in ``scheduler.params.total_num_steps``.
        warmup_num_steps: fills in ``scheduler.params.warmup_num_steps``.
        lr_scheduler_callable: creates a scheduler for the real optimizer; replaces the configuration's scheduler.
        **kwargs: fill in ``scheduler.params`` by name.
    """

    needs = "Accelerator(deepspeed_plugin=...), whose configuration describes the scheduler"

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


@dataclass(frozen=True)
class EngineInputs:
    """The objects and settings that determine an engine's configuration. The objects are not prepared yet."""

    model: Any = None
    optimizer: Any = None  # a torch optimizer, or a DummyOptim
    scheduler: Any = None  # a torch scheduler, or a DummyScheduler
    batch_sizes: Sequence[int | None] = ()  # one per loader; None if the loader has no known batch size
    world_size: int = 1
    num_steps: int = 1  # micro-steps per optimizer step
    splits_batches: bool = (
        False  # a loader's batch is the global batch, which the ranks divide among themselves
    )
    is_train_batch_min: bool = True  # train on the loader with the smallest batches
    precision: str = "no"
    device_type: str = "cpu"


def complete(configured: Mapping[str, Any], prepared: EngineInputs) -> dict[str, Any]:
    """Return the plugin's configuration with its "auto" values filled in, for an engine that trains ``prepared``.

    Raises:
        ValueError: the configuration contradicts the objects, or no object determines an "auto" value. The message
            names the keys.
    """
    config = copy.deepcopy(dict(configured))
    for kind in ("fp16", "bf16"):
        asked = f"mixed_precision={prepared.precision!r}"
        set_or_check(config, f"{kind}.enabled", prepared.precision == kind, asked)
    _complete_batches(config, prepared)
    if get(config, "gradient_clipping") == AUTO:
        put(config, "gradient_clipping", 0.0)  # no clipping until clip_grad_norm_ sets a norm
    _complete_buckets(config, prepared.model)
    _complete_optimizer(config, prepared)
    _complete_scheduler(config, prepared)
    config.setdefault("steps_per_print", math.inf)  # the dashboard shows progress
    left = sorted(autos(config))
    if left:
        raise ValueError(
            f'the DeepSpeed configuration has "auto" for {", ".join(left)}, which no prepared object determines; '
            "write a value, or leave the key out to use DeepSpeed's default"
        )
    return config


# --- batches ----------------------------------------------------------------------------------------------------------


def _complete_batches(config: dict[str, Any], prepared: EngineInputs) -> None:
    accumulation = "gradient_accumulation_steps"
    set_or_check(
        config, accumulation, prepared.num_steps, f"Accelerator({accumulation}={prepared.num_steps})"
    )
    micro = "train_micro_batch_size_per_gpu"
    sizes = [size for size in prepared.batch_sizes if size is not None]
    if prepared.splits_batches:
        sizes = [max(1, size // prepared.world_size) for size in sizes]
    batch_size, total = get(config, micro), get(config, "train_batch_size")
    if batch_size is None or batch_size == AUTO:
        if sizes:
            batch_size = min(sizes) if prepared.is_train_batch_min else max(sizes)
        elif isinstance(total, int):
            batch_size = max(1, total // (prepared.num_steps * prepared.world_size))
        else:
            batch_size = 1  # without a loader, the engine uses the batch size only to count samples
        put(config, micro, batch_size)
    elif sizes and len(sizes) == len(prepared.batch_sizes) and batch_size not in sizes:
        raise ValueError(
            f"the DeepSpeed configuration has {micro}={batch_size}, but the loaders' batches have "
            f'{" and ".join(map(str, sizes))} rows per rank; write "auto"'
        )
    num_steps, num_ranks = get(config, accumulation), prepared.world_size
    product = batch_size * num_steps * num_ranks
    source = f"{micro}={batch_size} x {accumulation}={num_steps} x {num_ranks} ranks = {product}"
    set_or_check(config, "train_batch_size", product, source)


# --- buckets ----------------------------------------------------------------------------------------------------------


def _complete_buckets(config: dict[str, Any], model: torch.nn.Module) -> None:
    # Buffers larger than the model could never be filled.
    num_elements = sum(num_elements_of(parameter) for parameter in model.parameters())
    if get(config, f"{_ZERO}.reduce_bucket_size") is None:
        put(config, f"{_ZERO}.reduce_bucket_size", min(_MAX_BUCKET, max(1, num_elements)))
    hidden = _hidden_size(model)
    if hidden is None:
        return  # complete() rejects remaining "auto" values at the end, by name
    for name, value in (
        ("reduce_bucket_size", hidden * hidden),
        ("stage3_prefetch_bucket_size", int(0.9 * hidden * hidden)),
        ("stage3_param_persistence_threshold", 10 * hidden),
    ):
        if get(config, f"{_ZERO}.{name}") == AUTO:
            put(config, f"{_ZERO}.{name}", value)


def num_elements_of(parameter: Any) -> int:
    """Return the number of elements in a parameter, which stage 3 may have sharded already."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _hidden_size(model: torch.nn.Module) -> int | None:
    """Return the hidden size of a Hugging Face model from its configuration; None if unknown."""
    described: Any = getattr(model, "config", None)
    for settings in (described, getattr(described, "text_config", None)):
        sizes: Any = getattr(settings, "hidden_size", None) or getattr(settings, "hidden_sizes", None)
        if sizes:
            return max(sizes) if isinstance(sizes, (list, tuple)) else int(sizes)
    return None


# --- optimizer and scheduler ------------------------------------------------------------------------------------------


def _complete_optimizer(config: dict[str, Any], prepared: EngineInputs) -> None:
    optimizer = prepared.optimizer
    described = config.get("optimizer")
    if isinstance(optimizer, DummyOptim):
        if described is None:
            raise ValueError(
                "DummyOptim is a placeholder for the optimizer in the DeepSpeed configuration, which has no "
                "'optimizer'; add it, or pass a torch optimizer to prepare"
            )
        values = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        _fill_params(config, "optimizer", values)
        if _needs_torch_adam(config, prepared.device_type):
            described.setdefault("params", {}).setdefault("torch_adam", True)
    elif optimizer is not None:
        if described is not None:
            raise ValueError(
                f"the DeepSpeed configuration has 'optimizer' ({described.get('type')}), but prepare got a "
                f"{type(optimizer).__name__}; remove one of them, or pass a DummyOptim to prepare"
            )
        # Any torch optimizer works, even with offloading. DeepSpeed's own optimizer would have to be compiled first.
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)


def _needs_torch_adam(config: Mapping[str, Any], device_type: str) -> bool:
    """Return whether to use torch's Adam: DeepSpeed's needs a compiler on first use, and has no advantage on CPUs."""
    if str(get(config, "optimizer.type", "")).lower() not in _ADAMS:
        return False
    if device_type == "cpu":
        return True
    compiler = "c++" if get(config, f"{_ZERO}.offload_optimizer.device", "none") != "none" else "nvcc"
    return shutil.which(compiler) is None


def _complete_scheduler(config: dict[str, Any], prepared: EngineInputs) -> None:
    scheduler = prepared.scheduler
    described = config.get("scheduler")
    if isinstance(scheduler, DummyScheduler):
        if described is None and scheduler.lr_scheduler_callable is None:
            raise ValueError(
                "DummyScheduler is a placeholder for the scheduler in the DeepSpeed configuration, which has no "
                "'scheduler'; add it, or give DummyScheduler an lr_scheduler_callable"
            )
        _fill_params(config, "scheduler", dict(_schedule(scheduler, prepared)))
    elif scheduler is not None:
        if described is not None:
            raise ValueError(
                f"the DeepSpeed configuration has 'scheduler' ({described.get('type')}), but prepare got a "
                f"{type(scheduler).__name__}; remove one of them, or pass a DummyScheduler to prepare"
            )
        if isinstance(prepared.optimizer, DummyOptim):
            raise ValueError(
                f"{formatting.kind(scheduler)} can't be combined with a DummyOptim, whose optimizer does not exist "
                "yet; pass prepare DummyScheduler(optimizer, lr_scheduler_callable=...)"
            )


def _schedule(scheduler: DummyScheduler, prepared: EngineInputs) -> Iterator[tuple[str, Any]]:
    owner = scheduler.optimizer
    defaults = getattr(owner, "defaults", None) or {}
    lr = defaults.get("lr", getattr(owner, "lr", None))
    yield "warmup_min_lr", 0
    if lr is not None:
        yield "warmup_max_lr", lr
    yield "warmup_num_steps", max(1, scheduler.warmup_num_steps)  # DeepSpeed rejects 0 since 0.19.6
    if scheduler.total_num_steps is not None:
        ranks = 1 if prepared.splits_batches else prepared.world_size
        yield "total_num_steps", math.ceil(scheduler.total_num_steps / ranks)
    yield from scheduler.kwargs.items()


def _fill_params(config: dict[str, Any], section: str, values: Mapping[str, Any]) -> None:
    """Fill in "auto" values in ``section.params``. Remove keys without a value, so that defaults apply."""
    for key in list(autos(config.get(section, {}), f"{section}.")):
        name = key.rpartition(".")[2]
        if name in values:
            put(config, key, values[name])
        else:
            del get(config, key.rpartition(".")[0])[name]


# --- nested dicts, with keys such as "zero_optimization.stage" --------------------------------------------------------


def read_config(source: Any) -> dict[str, Any]:
    """Return a configuration as a new dict: see ``DeepSpeedPlugin(hf_ds_config)``, and :class:`HfDeepSpeedConfig`."""
    source = getattr(source, "config", source)
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, Path)):
        raise TypeError(
            "a DeepSpeed configuration must be a dict, the path to a JSON file, or JSON text, not "
            f"{source!r:.80}"
        )
    name = f"the DeepSpeed configuration {str(source)!r:.200}"
    try:
        text = _text_of(source)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text: {error}") from None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{name} is not JSON: {reason}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{name} must be a JSON object, but is {formatting.kind(config)}")
    return config


def _text_of(source: str | Path) -> str:
    if str(source).lstrip().startswith("{"):
        return str(source)
    path = Path(source).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    with suppress(binascii.Error, UnicodeError):
        text = base64.urlsafe_b64decode(str(source)).decode("utf-8")  # the form that launchers pass
        if text.startswith("{"):
            return text
    raise ValueError(f"there is no DeepSpeed configuration {str(path.absolute())!r}")


def get(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a key; ``default`` if the key or a parent dict is missing."""
    value: Any = config
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a key; create missing parent dicts."""
    *way, name = key.split(".")
    for step in way:
        inner = config.get(step)
        if not isinstance(inner, dict):
            inner = config[step] = {}
        config = inner
    config[name] = value


def set_or_check(config: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Set a key that is missing or "auto"; raise ValueError, naming ``source``, if it has another value."""
    present = get(config, key)
    if present is None or present == AUTO:
        put(config, key, value)
    elif value not in (present, AUTO):
        raise ValueError(
            f"the DeepSpeed configuration has {key}={present!r}, which contradicts {source}. Set it in one place, or "
            f'write "auto" for {key} in the configuration.'
        )


def autos(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys whose values are "auto"."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from autos(value, f"{prefix}{name}.")
        elif value == AUTO:
            yield prefix + name


class HfDeepSpeedConfig:
    """A configuration with methods to query it. Other libraries subclass it.

    Args:
        config_file_or_dict: a dict, the path to a JSON file, or JSON text, possibly in base64.

    Raises:
        ValueError: the file does not exist, or does not hold a JSON object.
        TypeError: the argument has another type.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = read_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Store the stage, and whether states or weights are offloaded from the devices."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = (
            self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")
        )
        self._offload = self._stage in (2, 3) and any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict that holds the last part of a key such as ``"zero_optimization.stage"``, and that part.

        The dict is None if a parent is missing.
        """
        way, _, name = ds_key_long.rpartition(".")
        node = get(self.config, way) if way else self.config
        return (node if isinstance(node, dict) else None), name

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key; ``default`` if it is missing."""
        return get(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key and everything below it.

        Raises:
            ValueError: the key is missing, and ``must_exist`` is set.
        """
        node, name = self.find_config_node(ds_key_long)
        if node is not None and name in node:
            del node[name]
        elif must_exist:
            raise ValueError(f"the DeepSpeed configuration has no {ds_key_long!r}: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a key is set to a true value."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a key is set to a false value."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether optimizer states and gradients are sharded, but not weights."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Return whether weights are also sharded."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Return whether states or weights are in host memory or on disk."""
        return self._offload
