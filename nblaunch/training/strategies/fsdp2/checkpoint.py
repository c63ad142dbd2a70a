"""States of sharded models in a checkpoint, each rank writing its shards, through torch.distributed.checkpoint.

    pytorch_model_fsdp_0/    .metadata and a file of each rank: the weights of the first model
    optimizer_0/             the same of the first optimizer

Names and contents are those of Hugging Face Accelerate, so that checkpoints can be taken over. They can be loaded on
any number of ranks, of which each reads what it needs. When they take their place in the folder is decided elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from nblaunch.errors import CheckpointError
from nblaunch.training.joining import waiting
from nblaunch.training.models import bare_module
from nblaunch.wire import quantised

_MODEL = "pytorch_model_fsdp_{}"
_OPTIMIZER = "optimizer_{}"


def are_in(folder: Path) -> bool:
    """Return whether a checkpoint has such states."""
    return (folder / _MODEL.format(0)).is_dir()


def save(folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Any], is_alone: bool) -> None:
    """Write this rank's shards; all ranks call it, unless one ``is_alone``."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    for index, model in enumerate(models):
        write({"model": get_model_state_dict(bare_module(model))}, folder / _MODEL.format(index), is_alone)
    for index, optimizer in enumerate(optimizers):
        state = get_optimizer_state_dict(_owner(models, optimizer), _torchs(optimizer))
        write({"optimizer": state}, folder / _OPTIMIZER.format(index), is_alone)


def of_rank(folder: Path, rank: int) -> list[Path]:
    """Return the files that :func:`save` has written on ``rank``; ``.metadata`` is written by rank 0."""
    return sorted(folder.glob(f"*/__{rank}_*.distcp"))


def load(folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Any], is_alone: bool) -> None:
    """Load this rank's shards; all ranks call it, unless one ``is_alone``.

    Raises:
        CheckpointError: the files are missing, damaged, or of another model.
    """
    from torch.distributed.checkpoint import state_dict as states

    for index, model in enumerate(models):
        module = bare_module(model)
        state: dict[str, Any] = {"model": states.get_model_state_dict(module)}
        frozen = quantised.entries(module, state["model"])
        for name in frozen:  # their modules can't load them, and training has not changed them
            del state["model"][name]
        read(state, folder / _MODEL.format(index), is_alone)
        options = states.StateDictOptions(strict=not frozen)
        states.set_model_state_dict(module, state["model"], options=options)
    for index, optimizer in enumerate(optimizers):
        owner = _owner(models, optimizer)
        state = {"optimizer": states.get_optimizer_state_dict(owner, _torchs(optimizer))}
        read(state, folder / _OPTIMIZER.format(index), is_alone)
        states.set_optimizer_state_dict(owner, _torchs(optimizer), state["optimizer"])


def write(state: dict[str, Any], folder: Path, is_alone: bool) -> None:
    """Write this rank's shards of one nested state into ``folder``.

    Raises:
        CheckpointError: they could not be written.
    """
    # Imported where it is used: most training never needs it.
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with waiting(), _quiet():
            dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=is_alone)
    except CheckpointException as error:
        raise CheckpointError(
            f"shards of the state were not saved; nothing was changed. {_errors_of_ranks(error)}"
        ) from error


def read(state: dict[str, Any], folder: Path, is_alone: bool) -> None:
    """Read this rank's shards of a nested state from ``folder``, into its tensors.

    Raises:
        CheckpointError: the files are missing, damaged, or of another model.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"checkpoint {folder.parent} has no {folder.name}")
    try:
        with waiting(), _quiet():
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=is_alone)
    except (CheckpointException, Exception) as error:  # the former is no Exception
        raise CheckpointError(
            f"{folder} does not fit what is prepared, or is damaged. {_errors_of_ranks(error)}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning that a lone process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        yield


def _errors_of_ranks(error: BaseException) -> str:
    """Return what went wrong on which rank, as one line."""
    failures = getattr(error, "failures", None) or {None: (error, None)}
    lines = [
        (f"Rank {rank}: " if rank is not None else "") + f"{type(cause).__name__}: {cause}"
        for rank, (cause, _) in failures.items()
    ]
    return "; ".join(dict.fromkeys(" ".join(line.split()) for line in lines))


def _torchs(optimizer: Any) -> Any:
    """Return the user's own optimizer inside a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)


def _owner(models: Sequence[nn.Module], optimizer: Any) -> nn.Module:
    """Return the module whose parameters the optimizer steps: a model, or several as one.

    Raises:
        CheckpointError: none of the prepared models.
    """
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = [
        bare_module(model)
        for model in models
        if any(id(parameter) in stepped for parameter in model.parameters())
    ]
    if not owners:
        raise CheckpointError(
            f"the {type(_torchs(optimizer)).__name__} steps no parameter of a prepared model, so the names of its "
            "states are not known; prepare it together with its model"
        )
    return owners[0] if len(owners) == 1 else nn.ModuleList(owners)
