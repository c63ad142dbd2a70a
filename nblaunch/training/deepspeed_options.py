"""Settings of DeepSpeed: :class:`DeepSpeedPlugin`, and stand-ins for what its configuration describes.

Plain data, as ``options.py``: nothing here imports DeepSpeed or touches a device. How "auto" values are filled in is
``strategies/deepspeed/config.py``'s business.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nblaunch.training.options import check_choice

AUTO = "auto"

_OFFLOAD_DEVICES = ("none", "cpu", "nvme")
_ZERO = "zero_optimization"
# Fields that are keys of DeepSpeed's configuration, too.
_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": f"{_ZERO}.stage",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}
_DEFAULTS: dict[str, Any] = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_save_16bit_model": True,  # DeepSpeed's own default is False, with which a model can't be saved
}


@dataclass
class DeepSpeedPlugin:
    """Train with DeepSpeed's engine: ``Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))``.

    Needs ``pip install deepspeed``. Either a configuration of DeepSpeed's own is given, or the fields below make one;
    where both say the same thing differently, that is refused. ``deepspeed_config`` is the result. Values that say
    "auto" are filled in by ``prepare``, from what it is given.

    Args:
        hf_ds_config: DeepSpeed's configuration: a dict, the path of a JSON file, JSON text, or an object with a dict
            ``.config``. A dict is copied.
        gradient_accumulation_steps: micro-steps per optimizer step; None: as in the ``Accelerator``.
        gradient_clipping: largest norm of the gradients of a step; None: what ``clip_grad_norm_`` is called with, and
            no clipping where it is not called.
        zero_stage: what is cut into parts, one per rank: 0 nothing, 1 optimizer states, 2 gradients, too (the default),
            3 weights, too.
        is_train_batch_min: of several loaders, the one with the smallest batches is trained on. False: the largest.
        offload_optimizer_device: where optimizer states lie: ``"none"`` (the device), ``"cpu"`` or ``"nvme"``.
        offload_param_device: where weights lie, with stage 3: the same.
        offload_optimizer_nvme_path: folder for ``"nvme"``.
        offload_param_nvme_path: folder for ``"nvme"``.
        zero3_init_flag: not supported; build the model in ``with deepspeed.zero.Init():`` instead.
        zero3_save_16bit_model: with stage 3, ``get_state_dict`` and ``save_model`` put weights together (the default).
        transformer_moe_cls_names: names of layer classes, separated by commas, that stage 3 keeps in one piece, as
            mixtures of experts need.
        enable_msamp: not supported.
        msamp_opt_level: not supported.

    Raises:
        ValueError: a field has an invalid value, or contradicts the configuration; names its key.
        TypeError: the configuration is of none of these kinds.
        NotImplementedError: a field that is not supported was set.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    deepspeed_config: dict[str, Any] = field(init=False, default_factory=dict)
    selected: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._refuse_unsupported()
        given = {name: getattr(self, name) for name in _KEYS if getattr(self, name) is not None}
        self.deepspeed_config = {} if self.hf_ds_config is None else read_config(self.hf_ds_config)
        for name, value in given.items():
            settle(self.deepspeed_config, _KEYS[name], value, f"DeepSpeedPlugin({name}={value!r})")
        if self.hf_ds_config is not None and _ZERO not in self.deepspeed_config:
            raise ValueError(
                f"the DeepSpeed configuration has no {_ZERO!r}; say which stage: {{{_ZERO!r}: {{'stage': 2}}}}"
            )
        # A configuration without a stage means what DeepSpeed takes it for.
        defaults = _DEFAULTS if self.hf_ds_config is None else {**_DEFAULTS, "zero_stage": 0}
        for name, value in defaults.items():
            if get(self.deepspeed_config, _KEYS[name]) is None:
                put(self.deepspeed_config, _KEYS[name], value)
        for name, key in _KEYS.items():
            setattr(self, name, get(self.deepspeed_config, key))
        self._check()

    def _refuse_unsupported(self) -> None:
        if self.zero3_init_flag:
            raise NotImplementedError(
                "DeepSpeedPlugin(zero3_init_flag=True) is not supported; build the model in a block "
                "`with deepspeed.zero.Init(config_dict_or_path=plugin.deepspeed_config):`"
            )
        if self.enable_msamp or self.msamp_opt_level:
            raise NotImplementedError(
                "DeepSpeedPlugin(enable_msamp=..., msamp_opt_level=...) is for fp8, which is not offered"
            )

    def _check(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"{_ZERO}.stage={self.zero_stage!r} is unknown; valid are 0, 1, 2, 3")
        for what in ("optimizer", "param"):
            device = getattr(self, f"offload_{what}_device")
            check_choice(f"{_ZERO}.offload_{what}.device", device, _OFFLOAD_DEVICES)
            if device == "nvme" and not getattr(self, f"offload_{what}_nvme_path"):
                raise ValueError(
                    f"{_ZERO}.offload_{what}.device='nvme' needs {_ZERO}.offload_{what}.nvme_path"
                )
        if self.offload_param_device != "none" and self.zero_stage != 3:
            raise ValueError(
                f"{_ZERO}.offload_param.device={self.offload_param_device!r} is for stage 3, and "
                f"{_ZERO}.stage={self.zero_stage}"
            )
        if self.offload_optimizer_device != "none" and not self.zero_stage:
            raise ValueError(
                f"{_ZERO}.offload_optimizer.device={self.offload_optimizer_device!r} is for stages 1 to 3, and "
                f"{_ZERO}.stage=0"
            )

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a key of the configuration, as ``"zero_optimization.stage"``."""
        return get(self.deepspeed_config, ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a key of the configuration is still "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are cut into parts while they are built: never by this plugin."""
        return False


@dataclass
class DeepSpeedPlugins:
    """The plugins of a process by name, one of them selected: the one that ``prepare`` uses.

    Raises:
        ValueError: there is none.
        TypeError: one of them is no plugin.
    """

    by_name: dict[str, DeepSpeedPlugin]

    def __post_init__(self) -> None:
        if not self.by_name:
            raise ValueError("deepspeed_plugins={} has no plugin")
        for name, plugin in self.by_name.items():
            if not isinstance(plugin, DeepSpeedPlugin):
                raise TypeError(
                    f"the DeepSpeed plugin {name!r} is a {type(plugin).__module__}.{type(plugin).__name__}; pass a "
                    "nblaunch.DeepSpeedPlugin, which has the same fields"
                )
        self.select(next(iter(self.by_name)))

    @property
    def active(self) -> DeepSpeedPlugin:
        """The selected one."""
        return next(plugin for plugin in self.by_name.values() if plugin.selected)

    def get(self, name: str) -> DeepSpeedPlugin:
        """One of them; ValueError where there is none of that name."""
        if name not in self.by_name:
            raise ValueError(
                f"there is no DeepSpeed plugin {name!r}; valid are {', '.join(map(repr, self.by_name))}"
            )
        return self.by_name[name]

    def select(self, name: str) -> None:
        """Use this one from now on."""
        chosen = self.get(name)
        for plugin in self.by_name.values():
            plugin.selected = plugin is chosen


class DummyOptim:
    """Stands for the optimizer that DeepSpeed's configuration describes; ``prepare`` returns the real one.

    Args:
        params: parameters to optimize, or dicts of parameter groups.
        lr: fills in ``optimizer.params.lr`` where that is "auto".
        weight_decay: likewise.
        **kwargs: likewise, by name, as ``betas`` and ``eps``.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stands for the scheduler that DeepSpeed's configuration describes; ``prepare`` returns the real one.

    Args:
        optimizer: the ``DummyOptim`` or optimizer that it goes with.
        total_num_steps: steps of one process that trains alone; fills in ``scheduler.params.total_num_steps``.
        warmup_num_steps: fills in ``scheduler.params.warmup_num_steps``.
        lr_scheduler_callable: makes a scheduler from the real optimizer, instead of the configuration.
        **kwargs: fill in ``scheduler.params`` by name.
    """

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


# --- nested dicts, with keys as "zero_optimization.stage" -------------------------------------------------------------


def read_config(source: Any) -> dict[str, Any]:
    """A configuration as a dict of one's own.

    Args:
        source: see ``DeepSpeedPlugin(hf_ds_config)``; also JSON text in base64, as launchers pass it.

    Raises:
        ValueError: there is no such file, or it holds no JSON object.
        TypeError: it is none of these.
    """
    source = getattr(source, "config", source)
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, Path)):
        raise TypeError(
            f"a DeepSpeed configuration is a dict, the path of a JSON file or JSON text, not {source!r:.80}"
        )
    try:
        text = _text_of(source)
    except UnicodeDecodeError as error:
        raise ValueError(f"the DeepSpeed configuration {str(source)!r:.200} is not text: {error}") from None
    try:
        config = json.loads(text)
    except RecursionError:
        raise ValueError(
            f"the DeepSpeed configuration {str(source)!r:.200} is not JSON: nested too deeply"
        ) from None
    except ValueError as error:
        raise ValueError(f"the DeepSpeed configuration {str(source)!r:.200} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(
            f"the DeepSpeed configuration {str(source)!r:.200} is a {type(config).__name__}, not an object"
        )
    return config


def _text_of(source: str | Path) -> str:
    if str(source).lstrip().startswith("{"):
        return str(source)
    path = Path(source)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    try:
        text = base64.urlsafe_b64decode(str(source)).decode("utf-8")
    except (binascii.Error, UnicodeError):
        text = ""
    if not text.startswith("{"):
        raise ValueError(f"there is no DeepSpeed configuration {str(path.absolute())!r}")
    return text


def get(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of a key; ``default`` where it, or anything on the way, is missing."""
    value: Any = config
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a key, with the dicts on the way."""
    *way, name = key.split(".")
    for step in way:
        inner = config.get(step)
        if not isinstance(inner, dict):
            inner = config[step] = {}
        config = inner
    config[name] = value


def drop(config: dict[str, Any], key: str) -> None:
    """Remove a key, if it is there."""
    way, _, name = key.rpartition(".")
    inner = get(config, way) if way else config
    if isinstance(inner, dict):
        inner.pop(name, None)


def settle(config: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Set a key that is missing or "auto"; what it says otherwise must be the same.

    Raises:
        ValueError: it says something else; names the key and ``source``, where ``value`` comes from.
    """
    there = get(config, key)
    if there is None or there == AUTO:
        put(config, key, value)
    elif value not in (there, AUTO):
        raise ValueError(
            f"the DeepSpeed configuration has {key}={there!r}, which contradicts {source}. Say it in one place, or "
            f'write "auto" for {key} in the configuration.'
        )


def autos(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys that are "auto"."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from autos(value, f"{prefix}{name}.")
        elif value == AUTO:
            yield prefix + name


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """The plugin that DeepSpeed trains by, of several the one that is selected.

    Args:
        state: an ``AcceleratorState``, or an Accelerator.

    Raises:
        ValueError: DeepSpeed does not train here.
    """
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise ValueError(
            "DeepSpeed has no plugin here; give the Accelerator one: Accelerator(deepspeed_plugin=DeepSpeedPlugin())"
        )
    active: DeepSpeedPlugin = plugin
    return active
