"""Loads weights from disk into a module: :func:`load_weights`, after :func:`check_weights`. If the module's tensor

has memory        the module's ``load_state_dict`` copies the file's tensor into it
is on meta        the file's tensor, converted and moved if necessary, replaces it without a second copy
is quantised      the two are only compared, because quantised tensors are frozen and may not be loadable

:func:`load_checkpoint_in_model` and :func:`load_checkpoint_and_dispatch` load whole models, and have the same names as
in Hugging Face Accelerate. Device maps that split a model need Accelerate to be installed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from nblaunch import formatting
from nblaunch.compat import from_accelerate
from nblaunch.errors import CheckpointError
from nblaunch.training.checkpoints import model_files
from nblaunch.training.checkpoints.model_files import view_of
from nblaunch.training.collectives import dtensor
from nblaunch.training.models import plain_module
from nblaunch.weights import (
    give_own_memory,
    is_sharded,
    plain_name,
    quantised_entries,
    shape_mismatches,
    special_prefixes,
    versions_of,
    with_versions,
)

_SPLIT_ARGUMENTS = (
    "max_memory", "no_split_module_classes", "offload_folder", "offload_buffers", "offload_state_dict", "skip_keys",
    "preload_module_classes", "force_hooks", "full_state_dict", "broadcast_from_rank0",
)  # fmt: skip
"""Arguments for a model that is split over devices."""
_LOADING_ARGUMENTS = ("keep_in_fp32_modules", "offload_8bit_bnb")
"""Arguments that only load_checkpoint_in_model has. With the first, Accelerate may load a model that is not split."""
_MAX_NAMED = 8  # names in one message
_MAX_NAMES_SHOWN = 3  # example names, if a file and a model have none in common


# --- whole models -----------------------------------------------------------------------------------------------------


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    strict: bool = False,
    **others: Any,
) -> None:
    """Load weights written by :meth:`Accelerator.save_model` into ``model``.

    On the CPU, tensors without memory (``init_empty_weights``) are mapped to the file instead of copied, unless they
    are converted. The system reads the file when they are used. A program that overwrites the file's contents would
    change these tensors. nblaunch never does so: it creates a new file when it saves to the same path.

    Args:
        model: a module, wrapped or not, which is filled in place.
        checkpoint: a weight file, an index, or a folder with one of them.
        device_map: None: tensors without memory go to the CPU; ``{"": device}``: they go to this device. Any other map
            needs Accelerate to be installed; nblaunch passes all arguments on to it.
        offload_folder: Accelerate's argument for a map with ``"disk"``.
        dtype: the dtype for floating point tensors without memory; None: keep the model's.
        strict: raise an error if names in the files and the model differ.
        **others: Accelerate's other arguments. They have no effect on a model that is not split, except for
            ``keep_in_fp32_modules``: if it is set and a tensor has no memory yet, Accelerate loads the model, and must
            be installed.

    Raises:
        CheckpointError: the weights are missing or damaged, or don't fit.
        ImportError: Accelerate is needed, but not installed.
        TypeError: an argument is unknown.
        ValueError: ``dtype`` is not a floating point type.
    """
    target = _dtype(dtype)
    is_mixed = bool(others.get("keep_in_fp32_modules"))
    if is_mixed and device_map is None and any(tensor.is_meta for *_, tensor in _tensors(model)):
        # The CPU is the default, but Accelerate converts dtypes only if a map is given.
        device_map = {"": "cpu"}
    _check_arguments("load_checkpoint_in_model", others, (*_SPLIT_ARGUMENTS, *_LOADING_ARGUMENTS))
    if _is_cut(device_map) or (is_mixed and device_map is not None):
        others |= {"offload_folder": offload_folder, "dtype": target, "strict": strict}
        from_accelerate("load_checkpoint_in_model")(plain_module(model), checkpoint, device_map, **others)
        return
    place = torch.device(device_map[""]) if isinstance(device_map, Mapping) else None
    load_weights(model, _read(Path(checkpoint)), Path(checkpoint), strict, place, target)


def load_checkpoint_and_dispatch(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | str | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    *,
    dtype: str | torch.dtype | None = None,
    strict: bool = False,
    **others: Any,
) -> torch.nn.Module:
    """Load weights into ``model``, which may come from ``init_empty_weights``, and move it to its devices.

    Args:
        model: a module, which is filled in place.
        checkpoint: a weight file, an index, or a folder with one of them.
        device_map: None: the model stays where it is; ``{"": device}``: the whole model goes there. Any other map, such
            as ``"auto"``, splits the model and needs Accelerate to be installed.
        max_memory: Accelerate's argument for ``device_map="auto"``.
        no_split_module_classes: Accelerate's argument for ``device_map="auto"``.
        dtype: convert floating point weights in the files to this type, such as ``torch.bfloat16`` or ``"bfloat16"``.
            Tensors that only the model has, such as a buffer that is not saved, keep their dtypes.
        strict: raise an error if names in the file and the model differ.
        **others: as for :func:`load_checkpoint_in_model`, except for ``keep_in_fp32_modules`` and ``offload_8bit_bnb``,
            which Accelerate's function of the same name also lacks.

    Returns:
        ``model``.

    Raises:
        CheckpointError: the weights are missing or damaged, or don't fit.
        ImportError: Accelerate is needed, but not installed.
        TypeError: an argument is unknown.
        ValueError: ``dtype`` is not a floating point type.
    """
    target = _dtype(dtype)
    _check_arguments("load_checkpoint_and_dispatch", others, _SPLIT_ARGUMENTS)
    if _is_cut(device_map):
        others |= {"max_memory": max_memory, "no_split_module_classes": no_split_module_classes}
        others |= {"dtype": target, "strict": strict}
        dispatched = from_accelerate("load_checkpoint_and_dispatch")(model, checkpoint, device_map, **others)
        return cast(torch.nn.Module, dispatched)
    device = torch.device(device_map[""]) if isinstance(device_map, Mapping) else None
    weights = _read(Path(checkpoint))
    load_weights(model, weights, Path(checkpoint), strict, device, target)
    if target is not None:
        _convert(plain_module(model), weights, target)
    return model.to(device=device)


def _read(checkpoint: Path) -> dict[str, Any]:
    """Return the weights in all files of a checkpoint."""
    weights: dict[str, Any] = {}
    for file in model_files.files_of(checkpoint):
        part = model_files.read_weights(file)
        weights = with_versions(weights | part, versions_of(part))
    return weights


def _convert(module: nn.Module, weights: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Convert the floating point tensors of ``module`` that ``weights`` were loaded into."""
    state = module.state_dict()
    saved, special = _in_own_names(weights, state), tuple(special_prefixes(module))
    for name, owner, tensor in list(_tensors(module)):
        is_loaded = name in saved or (name in state and name.startswith(special))
        if not (is_loaded and tensor.is_floating_point()):
            continue
        if isinstance(tensor, torch.nn.Parameter):
            tensor.data = tensor.data.to(dtype)
        else:
            owner._buffers[name.rpartition(".")[2]] = tensor.to(dtype)


def _check_arguments(function: str, passed: Collection[str], valid: Collection[str]) -> None:
    for name in passed:
        if name not in valid:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _is_cut(device_map: Mapping[str, Any] | str | None) -> bool:
    """Return whether a device map needs Accelerate, because it splits the model or offloads it to disk."""
    if device_map is None:
        return False
    return isinstance(device_map, str) or set(device_map) != {""} or device_map[""] == "disk"


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    kind = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise ValueError(f"dtype={dtype!r} is not a floating point type such as torch.bfloat16")
    return kind


# --- does it fit? -----------------------------------------------------------------------------------------------------


def check_weights(model: nn.Module, path: Path, strict: bool) -> None:
    """Raise CheckpointError if the shapes in a weight file (if ``strict``, also the names) differ from the model's.

    Modules that override the loading method are not checked.
    """
    module = plain_module(model)
    state = module.state_dict()
    saved = _in_own_names(model_files.read_weights(path), state)
    views = {name: view_of(value)[0] for name, value in state.items() if isinstance(value, torch.Tensor)}
    held = {views.get(name) for name in saved} - {
        None
    }  # files may contain a tied tensor under only one of its names
    frozen = quantised_entries(module, state).keys()
    special = tuple(special_prefixes(module))
    wrong = [
        f"size mismatch for {name}: {saved_shape} in the file, {own_shape} in the model"
        for name, own_shape, saved_shape in shape_mismatches(module, state, saved)
        if name not in frozen
    ]
    if strict:
        may_miss = {name for name in state if views.get(name) in held or name.startswith(special)} | frozen
        missing = [name for name in state if name not in saved and name not in may_miss]
        unknown = [name for name in saved if name not in state and not name.startswith(special)]
        wrong += [f"{name} is missing from the file" for name in missing]
        wrong += [f"{name} is not in the model" for name in unknown]
    if wrong:
        raise CheckpointError(f"{path} does not fit the model: {formatting.first(wrong, _MAX_NAMED, '; ')}")


# --- loading ----------------------------------------------------------------------------------------------------------


def load_weights(
    model: torch.nn.Module,
    weights: Mapping[str, Any],
    source: Path,
    strict: bool = True,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Load a state dict into the module inside ``model``.

    Args:
        model: the module, wrapped or not.
        weights: the weights from all files, because a module's loading method must see all of its names at once.
        source: file or index, for messages.
        strict: raise an error if names in the files and the module differ.
        device: where tensors on the meta device go; None: the CPU.
        dtype: the dtype for floating point tensors on the meta device; None: keep the module's.
    """
    module = plain_module(model)
    give_own_memory(module)
    rest = _in_own_names(weights, module.state_dict())
    done = _fill_bare(module, rest, device or torch.device("cpu"), dtype)
    state = module.state_dict()
    _add_twins(rest, state)
    done |= _drop_quantised(module, rest, state, source)
    try:
        shards = dtensor.shard_state_dict(rest, state)
        outcome = module.load_state_dict(with_versions(shards, versions_of(rest)), strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{source} does not fit the model: {error}") from error
    if outcome is None:  # a user's method may return nothing
        return
    if weights and not done and len(outcome.unexpected_keys) == len(rest):
        raise CheckpointError(_describe_strangers(module, source, list(rest), list(state)))
    if not strict:
        return
    lists = (("Missing", set(outcome.missing_keys) - done), ("Unexpected", set(outcome.unexpected_keys)))
    texts = [f"{what} key(s) in state_dict: {', '.join(sorted(names))}" for what, names in lists if names]
    if texts:
        raise CheckpointError(f"{source} does not fit the {type(module).__name__}: {'; '.join(texts)}")


def _in_own_names(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``saved`` under the module's own names.

    Names in files may contain parts that wrappers add: anywhere, such as ``_orig_mod`` from torch.compile, or in front
    of all names, such as ``module.`` from a parallel wrapper.
    """
    names = {name: name if name in current else plain_name(name) for name in saved}
    is_known = bool(current.keys() & set(names.values()))
    front = "module." if not is_known and all(name.startswith("module.") for name in names.values()) else ""
    names = {name: plain.removeprefix(front) for name, plain in names.items()}
    count = Counter(names.values())  # names that would become the same stay unchanged
    renamed = {plain if count[plain] == 1 else name: saved[name] for name, plain in names.items()}
    paths = {
        path: plain_name(f"{path}.").removeprefix(front).removesuffix(".")
        for path in versions_of(saved) or ()
    }
    versions = versions_of(saved)
    return with_versions(renamed, versions and {paths[path]: kept for path, kept in versions.items()})


def _describe_strangers(module: nn.Module, source: Path, saved: list[str], current: list[str]) -> str:
    """Return the error message for a file and a module that have no name in common."""
    text = (
        f"{source} has no weights for the {type(module).__name__}: no name matches. The file has "
        f"{formatting.first(saved, _MAX_NAMES_SHOWN)}, but the model has "
        f"{formatting.first(current, _MAX_NAMES_SHOWN)}"
    )
    for longer, shorter, where in ((saved, current, "in the file"), (current, saved, "in the model")):
        end = next((name for name in shorter if longer[0].endswith(f".{name}")), None)
        if end is not None:
            text += (
                f". {longer[0].removesuffix(end)!r} precedes the names {where}: load the file into the module that "
                "has exactly the file's names"
            )
            break
    return text


def _add_twins(weights: dict[str, Any], current: Mapping[str, Any]) -> None:
    """Add the other names of tied tensors, which libraries write only once."""
    held = {
        view_of(current[name])[0]: name for name in weights if isinstance(current.get(name), torch.Tensor)
    }
    for name in current.keys() - weights.keys():
        view = view_of(current[name])[0] if isinstance(current[name], torch.Tensor) else None
        if view is not None and view in held:
            weights[name] = weights[held[view]]


def _drop_quantised(
    module: torch.nn.Module, weights: dict[str, Any], current: Mapping[str, Any], source: Path
) -> set[str]:
    """Remove from ``weights`` the tensors that are quantised in the module, and return their names."""
    entries = quantised_entries(module, current)
    for name, is_weight in entries.items():
        saved = weights.pop(name, None)
        # Compare only weights: other values that libraries store with them may differ in their last digits.
        if not is_weight or not isinstance(saved, torch.Tensor):
            continue
        held = current[name]
        is_alike = held.shape == saved.shape and held.dtype == saved.dtype
        if not is_alike or not torch.equal(held.detach().to(saved.device), saved):
            raise CheckpointError(
                f"{source} has different quantised weights in {name}. They are frozen and not loaded: load the "
                "base model that was trained, with the same quantisation"
            )
    return set(entries)


def _fill_bare(
    module: torch.nn.Module, weights: dict[str, Any], device: torch.device, dtype: torch.dtype | None
) -> set[str]:
    """Move tensors from ``weights`` into the module, in place of its meta tensors, and return their names."""
    tensors = [entry for entry in _tensors(module) if entry[2].is_meta and not is_sharded(entry[2])]
    made: dict[int, torch.Tensor] = {}  # id of the meta tensor, which tied names share -> its replacement
    addresses: set[int] = set()
    for name, owner, bare in tensors:
        saved = weights.get(name)
        if id(bare) in made or not isinstance(saved, torch.Tensor) or saved.shape != bare.shape:
            continue
        to = dtype if dtype is not None and bare.is_floating_point() else bare.dtype
        filled = (
            torch.empty_like(bare, device=device, dtype=to, requires_grad=False)
            if _loads_itself(owner)
            else saved.to(device, to)
        )
        if filled.numel() and filled.data_ptr() in addresses:
            # The files have two names for one tensor, but the module has two tensors.
            filled = filled.clone()
        addresses.add(filled.data_ptr())
        is_parameter = isinstance(bare, torch.nn.Parameter)
        made[id(bare)] = torch.nn.Parameter(filled, bare.requires_grad) if is_parameter else filled
    done = set()
    for name, owner, bare in tensors:
        if id(bare) not in made:
            continue
        held = owner._parameters if isinstance(bare, torch.nn.Parameter) else owner._buffers
        held[name.rpartition(".")[2]] = made[id(bare)]  # type: ignore[assignment]
        if not _loads_itself(owner):
            done.add(name)
            weights.pop(name, None)
    return done


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """Yield every parameter and buffer, once per name, with the module that holds it."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for held in (owner._parameters, owner._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    yield f"{path}.{name}" if path else name, owner, tensor


def _loads_itself(owner: torch.nn.Module) -> bool:
    """Return whether a module has its own loading method, which needs tensors with allocated memory."""
    return type(owner)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
