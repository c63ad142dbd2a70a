"""Whether saved weights and optimizer states fit the objects that they are to be loaded into, before anything is.

Of weights, names and shapes are read, not values. Modules that load in a way of their own are left to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from nblaunch.errors import CheckpointError
from nblaunch.training.checkpoints.loading import view_of
from nblaunch.training.models import bare_module
from nblaunch.wire import quantised

_MAX_NAMED = 8  # names in one message


def check_weights(model: nn.Module, path: Path, strict: bool) -> None:
    """Raise CheckpointError where names or shapes in a file of weights are others than the model's.

    Args:
        model: wrapped or not.
        path: the file, in safetensors' format or torch's.
        strict: names must be the same.
    """
    module = bare_module(model)
    saved = _saved_shapes(path)
    state = module.state_dict()
    own = {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) else None for name, value in state.items()
    }
    if saved and all(name.startswith("module.") for name in saved) and not own.keys() & saved.keys():
        saved = {name.removeprefix("module."): shape for name, shape in saved.items()}
    views = {name: view_of(value)[0] for name, value in state.items() if isinstance(value, torch.Tensor)}
    held = {views.get(name) for name in saved} - {None}  # what is tied to these may be left out
    frozen = quantised.entries(module, state).keys()
    left_out = {name for name in own if views.get(name) in held} | frozen
    special = tuple(_special_prefixes(module))
    wrong = [
        f"size mismatch for {name}: {saved[name]} in the file, {shape} in the model"
        for name, shape in own.items()
        if None not in (shape, saved.get(name)) and saved[name] != shape and name not in frozen
    ]
    if strict:
        wrong += [
            f"{name} is missing in the file" for name in own if name not in saved and name not in left_out
        ]
        wrong += [f"{name} is not in the model" for name in saved if name not in own]
    wrong = [text for text in wrong if not text.removeprefix("size mismatch for ").startswith(special)]
    if wrong:
        more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise CheckpointError(f"{path} does not fit the model. {'; '.join(wrong[:_MAX_NAMED])}{more}")


def _saved_shapes(path: Path) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes in a file by name; None where a value is no tensor. Nothing is read of what is damaged."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                aliases = file.metadata() or {}
            return {**shapes, **{alias: shapes[name] for alias, name in aliases.items() if name in shapes}}
        weights = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} can't be read; is it damaged? ({error})") from error
    return {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) else None
        for name, value in weights.items()
    }


def _special_prefixes(module: nn.Module) -> Iterator[str]:
    """Yield the names of submodules that rename or reshape what they load."""
    for name, child in module.named_modules():
        loads = type(child)._load_from_state_dict is not nn.Module._load_from_state_dict
        if (
            loads
            or any(
                not getattr(hook, "keeps_names_and_shapes", False)
                for hook in child._load_state_dict_pre_hooks.values()
            )
            or type(child).load_state_dict is not nn.Module.load_state_dict
        ):
            yield f"{name}." if name else ""


def check_optimizer(optimizer: Any, state: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError where an optimizer's state is of other groups of parameters than it has."""
    saved, own = state.get("param_groups"), getattr(optimizer, "param_groups", None)
    if not isinstance(saved, list) or not isinstance(own, list):
        return  # its strategy knows what it is
    sizes = [[len(group.get("params", ())) for group in groups] for groups in (saved, own)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{path} does not fit the optimizer: it is of groups of {sizes[0]} parameters, and the optimizer has "
            f"groups of {sizes[1]}"
        )
