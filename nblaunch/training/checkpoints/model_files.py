"""Weight files: one file, or several with an index, in safetensors' or torch's format.

safetensors files hold only tensors: reading one executes no code, and other libraries can read it. Tensors that share
memory are written once, and the file's header lists their other names. Callers choose the paths; :func:`files_of` finds
the files in a folder that :func:`save_sharded` wrote.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nblaunch import formatting
from nblaunch.errors import CheckpointError
from nblaunch.host.files import replace_file
from nblaunch.training.checkpoints.files import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    Staging,
    finish_commit,
    unreadable,
)
from nblaunch.training.collectives import dtensor
from nblaunch.training.joining import current_topology
from nblaunch.weights import is_sharded, versions_of, with_versions

_VERSIONS = "nblaunch.versions"  # entry in a safetensors file's header: the modules' versions, as JSON
_SHARD = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def view_of(tensor: torch.Tensor) -> tuple[tuple[Any, ...] | None, int]:
    """Return a key that identifies a tensor's view of memory, and the address of its storage.

    Return None and 0 if the tensor has no memory. For a sharded tensor, both describe the rank's own shard.
    """
    tensor = dtensor.local(tensor)
    if hasattr(tensor, "__tensor_flatten__") or torch.nn.parameter.is_lazy(tensor):
        return None, 0
    if tensor.numel() == 0 or tensor.data_ptr() == 0:  # 0 if the device hides its memory, as XLA does
        return None, 0
    # A lazily conjugated or negated view differs from its base only in a flag.
    is_lazy = (tensor.is_conj(), tensor.is_neg())
    view = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), is_lazy)
    return view, tensor.untyped_storage().data_ptr()


# --- writing ----------------------------------------------------------------------------------------------------------


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save ``obj`` with ``torch.save`` on the main process, without an Accelerator; other ranks do nothing.

    If saving to a path fails, an existing file stays unchanged.

    Args:
        obj: the object to save.
        f: a path, or an open binary file.
        save_on_each_node: save on the main process of each machine.
        safe_serialization: save a dict of tensors in safetensors' format.

    Raises:
        CheckpointError: ``obj`` has sharded weights.
    """
    topology = current_topology()
    is_writer = (topology.local_rank if save_on_each_node else topology.rank) == 0
    save_object(obj, f, safe_serialization, is_writer)


def save_object(obj: Any, f: Any, safe_serialization: bool, is_writer: bool) -> None:
    """Save ``obj`` like :func:`save`, but only if ``is_writer`` is set; reject shards on every rank."""
    count = dtensor.num_sharded(obj)
    if count:
        raise CheckpointError(
            f"save got {formatting.count(count, 'sharded tensor')}, but would write only the main process's "
            "shards. Save full weights with accelerator.save_model(model, "
            "folder), or with accelerator.save(accelerator.get_state_dict(model), path), on all ranks; "
            "accelerator.save_state also saves optimizers"
        )
    if not is_writer:
        return
    if hasattr(f, "write"):
        torch.save(obj, f)
    elif safe_serialization:
        replace_file(Path(f), lambda path: write_weights(obj, path))
    else:
        replace_file(Path(f), lambda path: torch.save(obj, path))


def write_weights(weights: Mapping[str, Any], path: Path, safe_serialization: bool = True) -> None:
    """Write a state dict to one file, in the format of safetensors or torch."""
    from safetensors.torch import save_file  # imported here because most training does not need it

    if not safe_serialization:
        with path.open("wb") as file:
            torch.save(with_versions(weights, versions_of(weights)), file)
        return
    tensors, aliases = _separate(weights, path.name)
    versions = {name: kept.get("version") for name, kept in (versions_of(weights) or {}).items()}
    if any(version != 1 for version in versions.values()):  # 1 is the version of a module that declares none
        aliases[_VERSIONS] = json.dumps(versions)
    save_file(tensors, path, metadata={**aliases, "format": "pt"})


def _separate(weights: Mapping[str, Any], where: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return one tensor per piece of memory, and a mapping from every other name to the name whose tensor it shares."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{where}: the model's state has {name!r}, {formatting.kind(tensor)}, but safetensors files hold "
                "only tensors; use safe_serialization=False"
            )
        if hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor):
            raise CheckpointError(
                f"{where}: {name!r} is {formatting.kind(tensor.data)}. It consists of several tensors, so safetensors "
                "files can't hold it; use safe_serialization=False, or save only the adapters with save_pretrained()"
            )
        view, storage = view_of(tensor)
        if view is not None and view in seen:
            aliases[name] = seen[view]
            continue
        overlaps = storage in storages
        tensor = tensor.detach() if view is not None else tensor.detach().cpu()
        if tensor.is_conj() or tensor.is_neg():  # safetensors writes the memory as it is
            tensor = tensor.resolve_conj().resolve_neg()
        tensors[name] = (
            tensor.clone(memory_format=torch.contiguous_format) if overlaps else tensor.contiguous()
        )
        if view is not None:
            seen[view] = name
            storages.add(storage)
    return tensors, aliases


def save_sharded(
    weights: Mapping[str, Any],
    folder: Path,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write a state dict to ``folder`` as one file, or as several files of limited size with an index.

    Earlier weights in the folder are removed; other files are kept. See ``Accelerator.save_model``.
    """
    limit = formatting.parse_size(max_shard_size)
    for name, tensor in weights.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise RuntimeError(f"{name!r} is on the meta device, so it has no values to save")
    shards = list(_shards(weights, limit))
    stem, suffix = (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME).rsplit(".", 1)
    names = [f"{stem}.{suffix}"]
    if len(shards) > 1:
        names = [f"{stem}-{i:05d}-of-{len(shards):05d}.{suffix}" for i in range(1, len(shards) + 1)]
    staging = Staging(folder)
    try:
        staging.create()
        for name, shard in zip(names, shards, strict=True):
            part = with_versions(shard, versions_of(weights))
            write_weights(part, staging.folder / name, safe_serialization)
        if len(shards) > 1:
            names.append(f"{stem}.{suffix}.index.json")
            (staging.folder / names[-1]).write_text(_index(names, shards))
        before = [path.name for path in folder.glob("*")] if folder.is_dir() else []
        staging.commit(name for name in before if _SHARD.fullmatch(name) and name not in names)
    except BaseException:
        staging.drop()
        raise


def _shards(weights: Mapping[str, Any], limit: int) -> Iterator[dict[str, Any]]:
    """Divide ``weights``, in order, into parts of at most ``limit`` bytes, unless a single tensor is larger.

    Tensors that share memory stay in one part, so that the memory is written only once.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for name, value in weights.items():
        storage = view_of(value)[1] if isinstance(value, torch.Tensor) else 0
        groups.setdefault(storage or name, {})[name] = value
    shard: dict[str, Any] = {}
    size = 0
    for group in groups.values():
        extra = max((_num_bytes(value) for value in group.values()), default=0)
        if shard and size + extra > limit:
            yield shard
            shard, size = {}, 0
        shard.update(group)
        size += extra
    yield shard


def _num_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _index(names: list[str], shards: list[dict[str, Any]]) -> str:
    """Return the index in the format of Hugging Face's libraries."""
    total = sum(_num_bytes(value) for shard in shards for value in shard.values())
    files = {name: file for file, shard in zip(names, shards, strict=False) for name in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2) + "\n"


# --- reading ----------------------------------------------------------------------------------------------------------


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Call ``torch.load`` on a file that :func:`save` wrote, without executing code in it.

    Args:
        f: a path, or an open binary file.
        map_location: the device to load tensors onto; None: the device that they were saved from.
        **kwargs: further arguments for :func:`torch.load`. Pass ``weights_only=False`` only for files that you trust.
    """
    return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def read_weights(path: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Return the state dict in a file, including all names of shared tensors.

    On the CPU, tensors are memory-mapped from the file. The system reads each page on first use, and copies it on the
    first write.
    """
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path, device)
        is_zip = zipfile.is_zipfile(path)  # torch's older format can't be mapped
        weights = torch.load(path, map_location=device, weights_only=True, mmap=is_zip)
        return with_versions(weights, versions_of(weights))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except Exception as error:  # from torch, pickle or the system; TypeError if the content is not a dict
        raise unreadable(path, error) from error


def _read_safetensors(path: Path, device: str | torch.device) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt", device=str(device)) as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        header = file.metadata() or {}
    aliases = {alias: name for alias, name in header.items() if alias != "format" and name in weights}
    weights.update({alias: weights[name] for alias, name in aliases.items()})
    if _VERSIONS not in header:
        return weights
    versions = json.loads(header[_VERSIONS])
    return with_versions(weights, {name: {"version": version} for name, version in versions.items()})


def files_of(checkpoint: Path) -> list[Path]:
    """Return the weight files of a checkpoint, which may be a file, an index, or a folder that contains either."""
    path = _weights_in(checkpoint)
    if not path.name.endswith(".index.json"):
        return [path]
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of weights ({error!r})") from error
    return [path.with_name(name) for name in names]


def _weights_in(checkpoint: Path) -> Path:
    if not checkpoint.is_dir():
        return checkpoint
    finish_commit(checkpoint)  # in case a process was killed while it was writing there
    names = [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME]
    files_of_weights = [checkpoint / name for name in names if (checkpoint / name).is_file()]
    if not files_of_weights:
        raise CheckpointError(f"{checkpoint} has no weights; looked for {', '.join(names)}")
    return files_of_weights[0]
