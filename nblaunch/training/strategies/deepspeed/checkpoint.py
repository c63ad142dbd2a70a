"""States of DeepSpeed's engines in a checkpoint folder. All ranks write them; any number of ranks can load them.

    pytorch_model/     the first engine, in DeepSpeed's layout, with its script zero_to_fp32.py
    pytorch_model_1/   the second engine; a model without an engine is saved as pytorch_model_1.bin

Every rank writes its own files. The caller moves them to their final place, which makes the checkpoint valid.
DeepSpeed unpickles its files: load a checkpoint only from a source that you trust to run code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nblaunch.errors import CheckpointError
from nblaunch.training import models
from nblaunch.training.collectives import operations
from nblaunch.training.joining import JoinedProcess, barrier
from nblaunch.training.models import plain_module
from nblaunch.training.strategies.deepspeed import library
from nblaunch.training.strategies.shard_files import loading
from nblaunch.weights import versions_of, with_versions

_NAME = "pytorch_model"
OWN_FILES = f"{_NAME}*/*zero_pp_rank_{{rank}}_mp_rank_*.pt"
"""Pattern for the files that rank ``{rank}`` writes."""
_UNIVERSAL = "universal"


def save(folder: Path, models: Sequence[torch.nn.Module], process: JoinedProcess) -> None:
    """Write the engines' shards. All ranks must call it."""
    for index, model in enumerate(models):
        engine = _engine_of(model)
        if engine is not None:
            engine.save_checkpoint(str(folder), tag=_tag(index), save_latest=index == 0)
        elif process.topology.rank == 0:
            torch.save(plain_module(model).state_dict(), folder / f"{_tag(index)}.bin")


def load(folder: Path, models: Sequence[torch.nn.Module], process: JoinedProcess) -> None:
    """Load what :func:`save` wrote. All ranks must call it."""
    for index, model in enumerate(models):
        engine = _engine_of(model)
        if engine is not None:
            _load_engine(engine, folder, _tag(index), process)
            continue
        path = folder / f"{_tag(index)}.bin"
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder} has no {path.name} for model {index}")
        with loading(path):
            plain_module(model).load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def _tag(index: int) -> str:
    return _NAME if index == 0 else f"{_NAME}_{index}"


def _engine_of(model: Any) -> Any:
    inner = models.uncompiled(model)
    return inner if library.is_engine(inner) else None


def _load_engine(engine: Any, folder: Path, tag: str, process: JoinedProcess) -> None:
    if not (folder / tag).is_dir():
        raise CheckpointError(
            f"checkpoint {folder} has no folder {tag}, which DeepSpeed's engine writes; it was saved without "
            "DeepSpeed, or with fewer models"
        )
    _check_stage(engine, folder / tag)
    # Each rank wrote one file with optimizer states. With stage 0 there are none, because every rank holds all states.
    world_size = len(list((folder / tag).glob("*_optim_states.pt")))
    if world_size in (0, process.topology.world_size):
        _load_as_it_is(engine, folder, tag)
    else:
        with _converted(folder, tag, process) as universal:
            engine._config.load_universal_checkpoint = True
            try:
                _load_as_it_is(engine, universal, _UNIVERSAL)
            finally:
                engine._config.load_universal_checkpoint = False


def _load_as_it_is(engine: Any, folder: Path, tag: str) -> None:
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=tag)
    except Exception as error:  # errors from DeepSpeed, torch and the file system
        raise CheckpointError(f"checkpoint {folder} does not fit DeepSpeed's engine: {error}") from error
    if path is None:
        raise CheckpointError(f"checkpoint {folder} can't be read by DeepSpeed's engine")


def _check_stage(engine: Any, folder: Path) -> None:
    """Raise CheckpointError if a checkpoint was saved in a stage whose files the engine's stage can't load."""
    if not any(folder.glob("*_optim_states.pt")):
        saved = "0"
    else:
        saved = "3" if any(folder.glob("zero_pp_rank_*_model_states.pt")) else "1 or 2"
    stage = engine.zero_optimization_stage()
    if str(int(stage)) not in saved:
        raise CheckpointError(
            f"checkpoint {folder} was saved with zero_optimization.stage={saved}, but this engine has stage "
            f"{int(stage)}; use the same stage, or load only the weights after merging them with the "
            "checkpoint's script zero_to_fp32.py"
        )


@contextlib.contextmanager
def _converted(folder: Path, tag: str, process: JoinedProcess) -> Iterator[Path]:
    """Convert a checkpoint to a layout that any number of ranks can load; remove the result after the block.

    The result is created next to the checkpoint, because all machines must see it. Rank 0 converts the checkpoint in
    its own process.
    """
    universal = folder.with_name(f".{folder.name}.{tag}.{_UNIVERSAL}")
    problem: str | None = None
    try:
        if process.topology.rank == 0:
            shutil.rmtree(universal, ignore_errors=True)
            problem = _convert(folder / tag, universal / _UNIVERSAL)
        (problem, *_) = operations.gather_object([problem])
        if problem is not None:
            raise CheckpointError(
                f"checkpoint {folder} can't be loaded on {process.topology.world_size} processes. {problem}"
            )
        yield universal
        barrier(process.device)  # until all ranks have read it; a rank that failed does not wait
    finally:
        if process.topology.rank == 0:
            shutil.rmtree(universal, ignore_errors=True)


def _convert(source: Path, target: Path) -> str | None:
    """Convert with DeepSpeed's script, but without its child processes or output; return the error, or None."""
    script: Any = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    options = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            script.main(options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# --- full weights -----------------------------------------------------------------------------------------------------


def full_state_dict(module: torch.nn.Module, keep: bool) -> dict[str, Any]:
    """Return a copy of a module's full state dict in CPU memory. All ranks must call this.

    A rank without ``keep`` only contributes its shards, and gets an empty dict.
    """
    if not keep and not library.sharded_parameters(module):
        return {}
    state = module.state_dict(keep_vars=True)
    # Tied parameters stay tied in the copy.
    tensors = {id(value): value for value in state.values() if isinstance(value, torch.Tensor)}
    copies = {key: _copy(value, keep) for key, value in tensors.items()}
    full = {name: copies.get(id(value), value) for name, value in state.items()}
    return with_versions(full, versions_of(state)) if keep else {}


def _copy(value: torch.Tensor, keep: bool) -> torch.Tensor:
    # In stages 1 and 2, all parameters are views of one buffer. Without a copy, torch.save would write the buffer once
    # per parameter.
    if not hasattr(value, "ds_id"):
        return value.detach().to("cpu", copy=True) if keep else value
    zero: Any = importlib.import_module("deepspeed.runtime.zero")
    with zero.GatheredParameters([value]):
        return value.detach().to("cpu", copy=True) if keep else value
