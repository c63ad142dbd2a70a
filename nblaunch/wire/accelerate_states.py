"""Hugging Face Accelerate's state objects from a notebook cell: how they are sent, and how a worker rebuilds them.

``PartialState``, ``AcceleratorState`` and ``GradientState`` describe the process that created them; all instances of a
class share one dict. A worker empties these dicts. If the function uses an instance from the notebook, directly or
through an ``Accelerator`` or ``TrainingArguments``, the state is rebuilt for the worker from the settings that it had
in the notebook.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nblaunch import env

_MODULE = "accelerate.state"
_NAMES = ("PartialState", "AcceleratorState", "GradientState")
_PLUGINS = (
    "dynamo_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "parallelism_config",
)  # fmt: skip


@dataclass(frozen=True)
class _Settings:
    """The settings with which a process's states were created.

    Args:
        cpu: whether to compute on the CPU.
        accelerator: arguments of ``AcceleratorState``; None if there was no Accelerator.
        accumulation: keyword arguments for gradient accumulation.
    """

    cpu: bool
    accelerator: dict[str, Any] | None
    accumulation: dict[str, Any]


_settings: _Settings | None = None
"""The settings with which the notebook built its states, in a process that has received these settings."""


def reset_in_worker() -> None:
    """Empty the states that this forked worker has inherited, and attach the notebook's instances to it."""
    module: Any = sys.modules.get(_MODULE)
    if module is None:
        return
    settings = _settings_of(module) or _settings
    module.AcceleratorState._reset_state(True)
    module.GradientState._reset_state()
    if settings is not None:
        _let_instances_join(module, settings)


def reduction(obj: Any) -> tuple[Any, ...] | None:
    """Return how to pickle ``obj`` if it is one of the states; None otherwise."""
    module: Any = sys.modules.get(_MODULE)
    name = type(obj).__name__
    if module is None or name not in _NAMES or type(obj) is not getattr(module, name, None):
        return None
    return _instance, (name, _settings_of(module) or _settings)


def _instance(name: str, settings: _Settings | None) -> Any:
    """Return an instance that describes the process that uses it."""
    module: Any = importlib.import_module(_MODULE)
    if settings is not None and not module.PartialState._shared_state:
        _let_instances_join(module, settings)
    cls = getattr(module, name)
    instance = cls.__new__(cls)
    instance.__dict__ = cls._shared_state
    return instance


def _settings_of(module: Any) -> _Settings | None:
    """Return the settings of this process's states; None if there are none."""
    partial, state = module.PartialState._shared_state, module.AcceleratorState._shared_state
    if not partial:
        return None
    accelerator = None
    if "_mixed_precision" in state:
        accelerator = {name: state.get(name) for name in _PLUGINS}
        accelerator["mixed_precision"] = state["_mixed_precision"]
        accelerator["deepspeed_plugin"] = state.get("deepspeed_plugins")
    accumulation = module.GradientState._shared_state.get("plugin_kwargs", {})
    return _Settings(bool(partial.get("_cpu")), accelerator, dict(accumulation))


def _let_instances_join(module: Any, settings: _Settings) -> None:
    global _settings
    _settings = settings
    gradients = module.GradientState()
    gradients.plugin_kwargs = dict(settings.accumulation)
    _build_at_first_use(module.PartialState, lambda: module.PartialState(settings.cpu))
    if settings.accelerator is not None:
        arguments = settings.accelerator
        _build_at_first_use(
            module.AcceleratorState, lambda: _build_accelerator_state(module, settings.cpu, arguments)
        )


def _build_accelerator_state(module: Any, cpu: bool, arguments: dict[str, Any]) -> None:
    if arguments["fsdp_plugin"] is None and env.as_flag(env.snapshot().get("ACCELERATE_USE_FSDP", "")):
        raise RuntimeError(
            "the notebook's accelerate.Accelerator shards models over one process, and its state does not contain the "
            "plugin. Create the Accelerator inside the function: Accelerator(fsdp_plugin=...)"
        )
    module.AcceleratorState(cpu=cpu, _from_accelerator=True, **arguments)


def _build_at_first_use(cls: Any, build: Callable[[], Any]) -> None:
    """Build the state if an attribute of an instance is missing because there is no state yet."""
    original = getattr(cls.__getattr__, "original", cls.__getattr__)

    def get(self: Any, name: str) -> Any:
        if name.startswith("__") or cls._shared_state:
            return original(self, name)
        build()
        return getattr(self, name)

    get.original = original  # type: ignore[attr-defined]
    cls.__getattr__ = get
