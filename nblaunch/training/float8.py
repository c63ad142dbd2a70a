"""Training in fp8: linear layers that compute in 8-bit numbers, by torchao; :class:`AORecipeKwargs` says which and how.

The rest of a model computes in bf16, see ``Fp8Precision``. Which devices can do it is decided by their backends.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nblaunch import context, env
from nblaunch.training.options import KwargsHandler

_MULTIPLE = 16
"""Sizes of layers that the GPU's 8-bit multiplication takes are multiples of it; see ``torch._scaled_mm``."""


@dataclass
class AORecipeKwargs(KwargsHandler):
    """How ``Accelerator(mixed_precision="fp8")`` trains, by torchao.

    Args:
        config: torchao's ``Float8LinearConfig``; None: it is made of the last two fields. With ``emulate=True`` any
            device computes the same numbers, slowly: for tests.
        module_filter_func: ``function(module, name)`` that returns whether a linear layer is converted. None: all are
            but the first and the last one, and those whose sizes are no multiples of 16.
        pad_inner_dim: pad matrices of other sizes. None: as launched (``--fp8_pad_inner_dim``), or the variable
            ``ACCELERATE_FP8_PAD_INNER_DIM``, else True.
        enable_fsdp_float8_all_gather: FSDP2 gathers weights in 8 bits. None: as launched, or the variable
            ``ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER``, else True. Without FSDP2 it has no effect.

    Raises:
        ImportError: torchao is not installed.
    """

    config: Any = None
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        float8 = _library()
        if self.config is None:
            launched = context.current().accelerator_defaults.get("fp8_recipe", {})
            for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
                if getattr(self, name) is None:
                    setattr(self, name, launched.get(name, env.read(f"ACCELERATE_FP8_{name.upper()}")))
            self.config = float8.Float8LinearConfig(
                pad_inner_dim=self.pad_inner_dim,
                enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather,
            )
        super().__post_init__()

    @property
    def is_emulated(self) -> bool:
        """Whether any device can do it."""
        return bool(self.config.emulate)

    def convert(self, model: torch.nn.Module, is_sharded: bool) -> None:
        """Convert the layers of ``model`` in place; their parameters stay, or are wrapped to be gathered in 8 bits.

        Args:
            model: the user's own module.
            is_sharded: FSDP2 will shard it.
        """
        config = self.config
        if not is_sharded and config.enable_fsdp_float8_all_gather:
            config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
        chosen = self.module_filter_func or _inner_layers(model)
        _library().convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def _library() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise ImportError(
            "training in fp8 needs torchao, which is not installed: pip install torchao", name="torchao"
        ) from error


def _inner_layers(model: torch.nn.Module) -> Callable[[torch.nn.Module, str], bool]:
    """Return a filter for all linear layers but the first and the last: in 8 bits these make training unstable."""
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    kept = {*linear[:1], *linear[-1:]}

    def is_converted(module: torch.nn.Module, name: str) -> bool:
        if not isinstance(module, torch.nn.Linear) or name in kept:
            return False
        return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0

    return is_converted
