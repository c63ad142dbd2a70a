"""What torch has no public way to ask of ``fully_shard``. No other module looks inside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

# The collectives of a unit, as profiles name them.
_COLLECTIVES = {
    "unshard": "all_gather",
    "wait_for_unshard": "all_gather",
    "post_backward": "reduce_scatter",
    "finalize_backward": "reduce_scatter",
}


def _groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters of one sharded unit."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):  # torch >= 2.12 allows several
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def register_new_parameters(module: nn.Module) -> None:
    """Register parameters that took the place of those that ``fully_shard`` made, so that torch goes on with them."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()  # as after ``load_state_dict(assign=True)``
            parameter._setattr_on_modules(parameter.sharded_param)


def is_reducing(module: nn.Module) -> bool:
    """Return whether ``backward`` through a unit, and those inside it, reduces gradients: see ``no_sync``."""
    return all(
        group.reduce_grads
        for unit in module.modules()
        if hasattr(unit, "_get_fsdp_state")
        for group in _groups(unit)
    )


def unsharded_gradients(module: nn.Module) -> Iterator[Any]:
    """Yield gradients that a unit has accumulated unreduced: of unsharded parameters, on this rank alone."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            if parameter.unsharded_accumulated_grad is not None:
                yield parameter.unsharded_accumulated_grad
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None and unsharded.grad is not None:
                yield unsharded.grad


def name_in_errors(name: str, module: nn.Module) -> None:
    """Have errors of a unit's collectives say which unit it was, and which collective."""
    kind = type(module).__mro__[2].__name__ if len(type(module).__mro__) > 2 else type(module).__name__
    unit = f"{name} ({kind})" if name else f"the model itself ({kind})"
    for group in _groups(module):
        for method, collective in _COLLECTIVES.items():
            setattr(group, method, _named(getattr(group, method), f"in {collective} of {unit}"))


def _ordinary_tensors() -> AbstractContextManager[Any]:
    """Leave ``torch.inference_mode``: gathered weights are kept, and training can't use its tensors."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _named(method: Callable[..., Any], where: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with _ordinary_tensors():
                return method(*args, **kwargs)
        except Exception as error:
            # In the message, because notes are not shown before Python 3.11; the type stays what it is.
            if error.args and isinstance(error.args[0], str) and where not in error.args[0]:
                error.args = (f"{where}: {error.args[0]}", *error.args[1:])
            raise

    return call
