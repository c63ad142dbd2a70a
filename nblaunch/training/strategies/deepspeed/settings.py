"""Settings for DeepSpeed: :class:`DeepSpeedSettings`.

The dataclass checks its own values. Nothing here imports DeepSpeed or touches a device. ``config`` fills in "auto"
values.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from nblaunch import context
from nblaunch.backends.base import Backend
from nblaunch.spec import MIXED_PRECISIONS
from nblaunch.training.options import GradientAccumulationPlugin, check_choice
from nblaunch.training.strategies.deepspeed.config import AUTO, HfDeepSpeedConfig, get, put, set_or_check

_OFFLOAD_DEVICES = ("none", "cpu", "nvme")
_ZERO = "zero_optimization"
# Fields that correspond to keys in DeepSpeed's configuration.
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
_BATCHES = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO}  # keys that trainers fill in
_DEFAULTS: dict[str, Any] = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_save_16bit_model": True,  # DeepSpeed's default is False, which makes saving a model impossible
}


@dataclass
class DeepSpeedSettings:
    """Training with DeepSpeed's engine: ``Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))``.

    A field that is None comes from the launch (``nblaunch launch``, ``nblaunch.launch``) if it sets the field and the
    configuration does not.

    Needs ``pip install deepspeed``. Pass a DeepSpeed configuration, or set the fields below. If both set the same field
    to different values, the plugin raises an error. ``deepspeed_config`` is the combined configuration. ``prepare``
    fills in "auto" values from the objects that it prepares.

    With stage 3, the tensors of ``model.state_dict()`` are empty, because the ranks keep the shards elsewhere. Call
    ``accelerator.get_state_dict(model)`` on all ranks to get full weights, or save them with
    ``accelerator.save_model``.

    Args:
        hf_ds_config: DeepSpeed's configuration: a dict, the path to a JSON file, JSON text, or an object with a dict
            ``.config``. The plugin copies it into an ``HfDeepSpeedConfig``. An ``HfDeepSpeedConfig``, such as one that
            transformers creates, is not copied, so a ``Trainer``'s later changes take effect.
        gradient_accumulation_steps: micro-steps per optimizer step; None: as in the ``Accelerator``.
        gradient_clipping: maximum norm of a step's gradients; None: the ``max_norm`` passed to ``clip_grad_norm_``, or
            no clipping if that is not called.
        zero_stage: what ranks shard: 0: nothing; 1: optimizer states; 2: also gradients (the default); 3: also
            weights.
        is_train_batch_min: with several loaders, train on the one with the smallest batches. False: the largest.
        offload_optimizer_device: where to keep optimizer states: ``"none"`` (the device), ``"cpu"`` or ``"nvme"``.
        offload_param_device: where to keep weights with stage 3; takes the same values.
        offload_optimizer_nvme_path: folder for ``"nvme"``.
        offload_param_nvme_path: folder for ``"nvme"``.
        zero3_init_flag: not supported; build the model in ``with deepspeed.zero.Init():`` instead.
        zero3_save_16bit_model: with stage 3, ``get_state_dict`` and ``save_model`` gather full weights (the default).
        transformer_moe_cls_names: class names, separated by commas, of layers that stage 3 gathers as a whole, such as
            mixtures of experts.
        enable_msamp: not supported.
        msamp_opt_level: not supported.

    Raises:
        ValueError: a field has an invalid value, or contradicts the configuration. The message names the field's key.
        TypeError: the configuration has an unsupported type.
        NotImplementedError: an unsupported field was set.
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
    dschf: Any = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._reject_unsupported()
        fields = {name: getattr(self, name) for name in _KEYS if getattr(self, name) is not None}
        context.complete_from_launch(self, "deepspeed_plugin")
        is_configured = self.hf_ds_config is not None
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config if is_configured else _BATCHES)
        self.deepspeed_config = self.hf_ds_config.config
        for name, value in fields.items():
            set_or_check(self.deepspeed_config, _KEYS[name], value, f"DeepSpeedPlugin({name}={value!r})")
        for name, value in context.launched_fields("deepspeed_plugin").items():
            if name in _KEYS and get(self.deepspeed_config, _KEYS[name]) in (None, AUTO):
                put(self.deepspeed_config, _KEYS[name], value)
        if is_configured and _ZERO not in self.deepspeed_config:
            raise ValueError(
                f"the DeepSpeed configuration has no {_ZERO!r}; set the stage: {{{_ZERO!r}: {{'stage': 2}}}}"
            )
        # If a configuration has no stage, DeepSpeed's default applies.
        defaults = {**_DEFAULTS, "zero_stage": 0} if is_configured else _DEFAULTS
        for name, value in defaults.items():
            if get(self.deepspeed_config, _KEYS[name]) is None:
                put(self.deepspeed_config, _KEYS[name], value)
        for name, key in _KEYS.items():
            setattr(self, name, get(self.deepspeed_config, key))
        self.hf_ds_config.set_stage_and_offload()
        self._check()

    def _reject_unsupported(self) -> None:
        if self.zero3_init_flag:
            raise NotImplementedError(
                "DeepSpeedPlugin(zero3_init_flag=True) is not supported; build the model in a block "
                "`with deepspeed.zero.Init(config_dict_or_path=plugin.deepspeed_config):`"
            )
        if self.enable_msamp or self.msamp_opt_level:
            raise NotImplementedError(
                "DeepSpeedPlugin(enable_msamp=..., msamp_opt_level=...) is for fp8, which is not supported"
            )

    def _check(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"{_ZERO}.stage={self.zero_stage!r} is unknown; valid values are 0, 1, 2, 3")
        for what in ("optimizer", "param"):
            device = getattr(self, f"offload_{what}_device")
            check_choice(f"{_ZERO}.offload_{what}.device", device, _OFFLOAD_DEVICES)
            if device == "nvme" and not getattr(self, f"offload_{what}_nvme_path"):
                raise ValueError(
                    f"{_ZERO}.offload_{what}.device='nvme' needs {_ZERO}.offload_{what}.nvme_path"
                )
        if self.offload_param_device != "none" and self.zero_stage != 3:
            raise ValueError(
                f"{_ZERO}.offload_param.device={self.offload_param_device!r} needs stage 3, but "
                f"{_ZERO}.stage={self.zero_stage}"
            )
        if self.offload_optimizer_device != "none" and not self.zero_stage:
            raise ValueError(
                f"{_ZERO}.offload_optimizer.device={self.offload_optimizer_device!r} needs stages 1 to 3, but "
                f"{_ZERO}.stage=0"
            )

    def precision_name(self, asked: str | None, backend: Backend) -> str | None:
        """Return the precision that models compute in: see ``StrategyPlugin``."""
        for name in ("fp16", "bf16"):
            if self.get_value(f"{name}.enabled") is not True:
                continue
            setting = f"the DeepSpeed configuration has {name}.enabled=True, which"
            reason = backend.precision_problem(name)
            if reason is not None:
                raise ValueError(f"{setting} can't be used on {backend.name}: {reason}")
            if asked is not None and str(getattr(asked, "value", asked)).lower() != name:
                raise ValueError(f"{setting} contradicts mixed_precision={str(asked)!r}; set it in one place")
            return name
        name = str(getattr(asked, "value", asked)).lower()
        if name == "fp16" and (reason := backend.precision_problem(name)) is not None:
            raise ValueError(
                f"mixed_precision={name!r} can't be used with DeepSpeed on {backend.name}: {reason}"
            )
        if name == "fp8":
            raise ValueError(
                "mixed_precision='fp8' can't be used with DeepSpeed; torchao converts only models that DDP "
                "or FSDP2 trains"
            )
        return asked

    def accumulation_settings(self, asked: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        """Return the accumulation settings: see ``StrategyPlugin``."""
        if asked.divide_by_actual:
            raise ValueError(
                "divide_by_actual=True can't be used with DeepSpeed, whose engine keeps the gradients of a window. "
                "Choose a num_steps that divides the number of batches in an epoch, or leave divide_by_actual out"
            )
        asked = dataclasses.replace(asked, divide_by_actual=False)
        key = "gradient_accumulation_steps"
        steps: Any = self.get_value(key)
        if steps in (AUTO, asked.num_steps):
            return asked
        if asked.num_steps != 1:
            raise ValueError(
                f"the DeepSpeed configuration has {key}={steps}, which contradicts Accelerator({key}="
                f'{asked.num_steps}). Set it in one place, or write "auto" in the configuration.'
            )
        return dataclasses.replace(asked, num_steps=steps)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key in the configuration, such as ``"zero_optimization.stage"``."""
        return get(self.deepspeed_config, ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a key in the configuration is still "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write a precision into the configuration, unless it already sets one.

        Args:
            mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"``, or ``"fp8"``, for which DeepSpeed uses bf16.

        Raises:
            ValueError: the precision is unknown, or the configuration enables the other 16-bit format.
        """
        check_choice("mixed_precision", mixed_precision, MIXED_PRECISIONS)
        asked = {"fp8": "bf16"}.get(mixed_precision, mixed_precision)
        for name in ("fp16", "bf16"):
            if asked not in ("no", name) and str(self.get_value(f"{name}.enabled")).lower() == "true":
                raise ValueError(
                    f"`--mixed_precision` arg cannot be set to `{mixed_precision}` when `{name}` is set in the "
                    f"DeepSpeed config file; set {name}.enabled there to false or auto"
                )
        if asked == "fp16" and "fp16" not in self.deepspeed_config:
            put(self.deepspeed_config, "fp16.auto_cast", True)
        for name in ("fp16", "bf16"):
            if self.get_value(f"{name}.enabled") in (None, AUTO):
                put(self.deepspeed_config, f"{name}.enabled", name == asked)

    def set_deepspeed_weakref(self) -> None:
        """Pass this configuration to transformers: with stage 3, ``from_pretrained`` then shards models while loading.

        transformers keeps only a weak reference, so the plugin keeps the object in ``dschf``.

        Raises:
            ImportError: transformers or DeepSpeed is not installed.
        """
        from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

        config = copy.deepcopy(self.deepspeed_config)
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(key, AUTO) == AUTO:  # these values are checked, but not used, when a model is built
                config[key] = 1
        if config.get("train_batch_size") == AUTO:
            del config["train_batch_size"]
        unset_hf_deepspeed_config()
        self.dschf = HfDeepSpeedConfig(config)

    def is_zero3_init_enabled(self) -> bool:
        """Return False: this plugin never shards models while they are being built."""
        return False


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedSettings:
    """Return the selected DeepSpeed plugin.

    Args:
        state: an ``AcceleratorState``, or an Accelerator.

    Raises:
        ValueError: the job does not use DeepSpeed.
    """
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise ValueError(
            "there is no DeepSpeed plugin; pass one to the Accelerator: "
            "Accelerator(deepspeed_plugin=DeepSpeedPlugin())"
        )
    active: DeepSpeedSettings = plugin
    return active
