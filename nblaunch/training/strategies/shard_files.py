"""Shard files, which each rank writes and reads through torch.distributed.checkpoint.

    pytorch_model_fsdp_0/    the weights of the first model: .metadata, and one file per rank
    optimizer_0/             the same for the first optimizer

Names and contents are the same as in Hugging Face Accelerate's checkpoints, so users can keep their existing
checkpoints. Any number of ranks can load the files; each rank reads only what it needs.

torch unpickles ``.metadata`` and all values that are not tensors, such as an optimizer's settings, without checking
their contents. This module allows only the classes that such files need, so a malicious file can't run code.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import torch

from nblaunch.errors import CheckpointError
from nblaunch.training.joining import waiting
from nblaunch.training.trusted_types import trusted_types, trusting

NOT_SAVED = "shards of the state were not saved; nothing was changed."
_UNFIT = "does not fit the prepared objects, or is damaged"
_DISABLED = "torch.distributed is disabled, unavailable or uninit"

_SHARDED = ("TensorProperties", "MEM_FORMAT_ENCODING", "ShardMetadata", "ShardedTensorMetadata")
_METADATA = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "MetadataIndex",
        "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    # torch before 2.3
    "torch.distributed._shard.sharded_tensor.metadata": _SHARDED,
    "torch.distributed._shard.metadata": _SHARDED,
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
}
"""Names that ``.metadata`` may contain, by module; dtypes such as ``torch.float32`` are allowed as well."""


def write(state: dict[str, Any], folder: Path, is_alone: bool, group: Any = None) -> None:
    """Write this rank's shards of one nested state into ``folder``.

    Args:
        group: process group with all ranks; None: the default process group.
    """
    # Imported here because most training runs never need it.
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    _expect_no_group()
    try:
        writer = dcp.FileSystemWriter(folder)
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=is_alone)
    except CheckpointException as error:
        raise CheckpointError(f"{NOT_SAVED} {_errors_of_ranks(error)}") from error


def read(
    state: dict[str, Any], folder: Path, is_alone: bool, problem: str = _UNFIT, owner: object = None
) -> None:
    """Read this rank's shards from ``folder`` into the tensors of a nested state.

    Args:
        problem: what may be wrong with the files, as for :func:`loading`.
        owner: the object that the state belongs to, as for :func:`trusted_types`.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint._nested_dict import set_element

    class Reader(dcp.FileSystemReader):
        # The signature has no ``kwargs``, because torch would otherwise look for other files after an error.
        def read_metadata(self) -> Any:
            metadata = read_metadata(folder)
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = dcp.metadata.StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            name = read_item.dest_index.fqn
            set_element(self.original_state_dict, self.mappings[name], _data(value, name, owner))

    _check_metadata(folder)
    _expect_no_group()
    with loading(folder, problem), waiting():
        dcp.load(state, storage_reader=Reader(folder), planner=Planner(), no_dist=is_alone)


def read_metadata(folder: Path) -> Any:
    """Return a shard folder's metadata: which tensors its files contain, and where.

    Raises:
        CheckpointError: the folder has no ``.metadata``.
        UnpicklingError: ``.metadata`` is damaged, or names classes that such a file does not need.
    """
    _check_metadata(folder)
    with (folder / ".metadata").open("rb") as file:
        return _MetadataUnpickler(file).load()


def _check_metadata(folder: Path) -> None:
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"checkpoint {folder.parent} has no {folder.name}")


_PythonUnpickler: Any = pickle._Unpickler  # not the C version, so that load_build can inspect BUILD


class _MetadataUnpickler(_PythonUnpickler):
    dispatch: ClassVar = dict(_PythonUnpickler.dispatch)

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member  # Python 3.11.2 pickles enum members this way
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_dtype or global_name in _METADATA.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(
            f"it names {module_name}.{global_name}, which shard metadata never needs"
        )

    def load_build(self) -> None:
        if isinstance(self.stack[-2], (type, FunctionType)):
            raise pickle.UnpicklingError(f"it changes {self.stack[-2].__name__}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def _member(kind: object, name: str) -> Any:
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it asks for an attribute of {kind!r}")
    return kind.__members__[name]


def _data(value: io.BytesIO, name: str, owner: object) -> Any:
    """Unpickle ``value`` without running any code that it contains."""
    try:
        with trusting(trusted_types(owner)):
            return torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} has an untrusted class. If you trust the source of the checkpoint, pass the class to "
            "torch.serialization.add_safe_globals first"
        ) from error


@contextmanager
def loading(path: Path, problem: str = _UNFIT) -> Iterator[None]:
    """Raise CheckpointError for any error in a block that loads a file or folder from a checkpoint.

    Args:
        problem: what may be wrong with the file, as the end of a sentence.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointError:
        raise
    except (CheckpointException, Exception) as error:  # CheckpointException is not an Exception
        raise CheckpointError(f"{path} {problem}. {_errors_of_ranks(error)}") from error


def _expect_no_group() -> None:
    """Permanently silence torch's warning that a single process has no group, because threads share warning filters."""
    warnings.filterwarnings("ignore", message=_DISABLED)


def _errors_of_ranks(error: BaseException) -> str:
    """Describe all ranks' failures in one line."""
    failures = getattr(error, "failures", None) or {None: (error, None)}
    lines = [
        (f"Rank {rank}: " if rank is not None else "") + f"{type(cause).__name__}: {cause}"
        for rank, (cause, _) in failures.items()
    ]
    return "; ".join(dict.fromkeys(" ".join(line.split()) for line in lines))
