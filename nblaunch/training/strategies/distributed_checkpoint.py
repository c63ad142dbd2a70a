"""States of sharded models in a checkpoint, each rank writing its shards, through torch.distributed.checkpoint.

    pytorch_model_fsdp_0/    .metadata and a file of each rank: the weights of the first model
    optimizer_0/             the same of the first optimizer

Names and contents are those of Hugging Face Accelerate, so that checkpoints can be taken over. They can be loaded on
any number of ranks, of which each reads what it needs. When they take their place in the folder is decided elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from nblaunch.errors import CheckpointError
from nblaunch.training.models import bare_module
from nblaunch.training.strategies.base import ShardWriter
from nblaunch.training.waiting import waiting
from nblaunch.wire.weights import quantised_entries

_MODEL = "pytorch_model_fsdp_{}"
_OPTIMIZER = "optimizer_{}"
_NOT_SAVED = "shards of the state were not saved; nothing was changed."
_DISABLED = "torch.distributed is disabled, unavailable or uninit"
_NO_DEADLINE = timedelta(days=365)  # for a rank whose disk is slow, as training waits for it without one


def are_in(folder: Path) -> bool:
    """Return whether a checkpoint has such states."""
    return (folder / _MODEL.format(0)).is_dir()


def save(folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Any], is_alone: bool) -> None:
    """Write this rank's shards; all ranks call it, unless one ``is_alone``."""
    for name, state in _states(models, optimizers):
        write(state, folder / name, is_alone)


def _states(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of a folder, and the nested state that goes there."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    for index, model in enumerate(models):
        yield _MODEL.format(index), {"model": get_model_state_dict(bare_module(model))}
    for index, optimizer in enumerate(optimizers):
        state = get_optimizer_state_dict(_owner(models, optimizer), _torchs(optimizer))
        yield _OPTIMIZER.format(index), {"optimizer": state}


class CopiedShards(ShardWriter):
    """Copies of a rank's shards, which torch.distributed.checkpoint writes from a thread.

    The ranks exchange what it plans in a process group of its own: the order of collectives in a thread, beside those
    of training, is another on every rank. (``async_save`` of torch writes one state like this; here are several, which
    one thread writes in an order that all ranks have in common.)

    Args:
        models: prepared.
        optimizers: prepared.
        copy: returns a nested state in memory that training does not write to.
        group: of all ranks, on the CPU, for nothing else; None: this process is alone.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        copy: Callable[[Any], Any],
        group: Any,
    ) -> None:
        self._group = group
        if group is None:
            # For good: threads share the filters.
            warnings.filterwarnings("ignore", message=_DISABLED)
        try:
            self._states: dict[str, dict[str, Any]] = copy(dict(_states(models, optimizers)))
        except Exception as error:
            self.cancel(f"{type(error).__name__}: {error}")
            raise

    def write(self, folder: Path) -> None:
        self._raise_on_all_ranks(None)
        for name, state in self._states.items():
            _save(state, folder / name, is_alone=self._group is None, group=self._group)

    def cancel(self, problem: str) -> None:
        with suppress(CheckpointError):
            self._raise_on_all_ranks(problem)

    def _raise_on_all_ranks(self, problem: str | None) -> None:
        problems = [problem]
        if self._group is not None:
            problems *= dist.get_world_size(self._group)
            dist.all_gather_object(problems, problem, self._group)
        for rank, one in enumerate(problems):
            if one is not None:
                raise CheckpointError(f"{_NOT_SAVED} Rank {rank}: {one}")


def new_group() -> Any:
    """Return a process group of all ranks for :class:`CopiedShards`. All ranks call it."""
    with waiting():
        return dist.new_group(backend="gloo", timeout=_NO_DEADLINE)


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
        frozen = quantised_entries(module, state["model"])
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
    with waiting(), _quiet():
        _save(state, folder, is_alone)


def _save(state: dict[str, Any], folder: Path, is_alone: bool, group: Any = None) -> None:
    # Imported where it is used: most training never needs it.
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        writer = dcp.FileSystemWriter(folder)
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=is_alone)
    except CheckpointException as error:
        raise CheckpointError(f"{_NOT_SAVED} {_errors_of_ranks(error)}") from error


def read(state: dict[str, Any], folder: Path, is_alone: bool) -> None:
    """Read this rank's shards of a nested state from ``folder``, into its tensors.

    Raises:
        CheckpointError: the files are missing, damaged, or of another model.
    """
    from torch.distributed import checkpoint as dcp

    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"checkpoint {folder.parent} has no {folder.name}")
    with loading(folder), waiting(), _quiet():
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=is_alone)


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Raise CheckpointError for whatever goes wrong in a block that loads a file or folder of a checkpoint."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointException, Exception) as error:  # the former is no Exception
        raise CheckpointError(
            f"{path} does not fit what is prepared, or is damaged. {_errors_of_ranks(error)}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning that a lone process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_DISABLED)
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
