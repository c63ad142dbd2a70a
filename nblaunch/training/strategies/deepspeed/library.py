"""DeepSpeed itself: import it when it is chosen, on the right device, and limit it to what this job needs.

This module imports it; ``checkpoint.py`` imports two of its submodules as well. Nothing here decides how to train a
model.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from nblaunch import env
from nblaunch.packages import is_installed
from nblaunch.training.joining import JoinedProcess, is_distributed
from nblaunch.training.models import add_wrapper

DEVICES = ("cpu", "cuda")
OLDEST = "0.19.2"
"""The oldest DeepSpeed that trains as one process does, accumulation included, in every stage."""

# Warnings of DeepSpeed about states that are intended here.
_EXPECTED = (
    "MPU is not provided, setting tp size to 1",  # there is no tensor parallelism
    "**** You are using ZeRO with an untested optimizer",  # any optimizer of torch is taken on purpose
)

# DeepSpeed (0.19) calls collectives by names that torch 2.13 renamed, at every step; can go when it has followed.
_DEPRECATED = re.compile(
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", re.IGNORECASE
)

# The process group that DeepSpeed took over last, and the process in which it did.
_group: Any = None
_owner_pid = 0
_inherited: list[Any] = []


def check_installed() -> None:
    """Raise ImportError where DeepSpeed is not installed. Imports nothing."""
    if not is_installed("deepspeed"):
        raise ImportError(
            "DeepSpeedPlugin needs DeepSpeed, which is not installed: pip install deepspeed (without a compiler: "
            "DS_BUILD_OPS=0 pip install deepspeed)"
        )


def load(process: JoinedProcess) -> Any:
    """Import ``deepspeed`` and make it compute on this process's kind of device, in this process's group."""
    with suppress(importlib.metadata.PackageNotFoundError):  # sources on the path, without a version
        version = importlib.metadata.version("deepspeed")
        if TorchVersion(version) < OLDEST:  # it would train wrong silently
            raise ImportError(
                f"DeepSpeed {version} is too old: stage 2 accumulates gradients wrongly in 0.17 and fails in 0.18; "
                f"{OLDEST} or newer is needed: pip install -U deepspeed"
            )
    kind = process.backend.device_type
    if kind not in DEVICES:
        raise ValueError(
            f"DeepSpeed is used on {' and '.join(DEVICES)}, but this process uses {process.backend.name}"
        )
    # DeepSpeed would take a GPU wherever it sees one. It also needs the rank in the environment.
    env.apply({"DS_ACCELERATOR": kind, "LOCAL_RANK": str(process.topology.local_rank)})
    quieten()
    library: Any = importlib.import_module("deepspeed")
    chosen: Any = importlib.import_module("deepspeed.accelerator.real_accelerator")
    if library.get_accelerator().device_name().partition(":")[0] != kind:
        chosen.ds_accelerator = None  # imported before, in the kernel, where it chose for itself
        library.get_accelerator()
    # DeepSpeed's all-reduce through shared memory, which only its inference uses: each rank would call a compiler for
    # half a minute as soon as there is a process group.
    getattr(library.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
    # Every stage of ZeRO asks whether its optimizer is Muon, whose module (0.19) decorates functions with
    # ``torch.compile``: that imports the compiler, in each worker for 1 s of processor time (2 to 4 s on busy cores)
    # and 45 MB, with warnings of torch's own.
    with suppress(ImportError), _compiling_later():
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    add_wrapper(library.DeepSpeedEngine)
    # DeepSpeed needs a group in a lone process, too.
    if process.topology.world_size == 1 and not is_distributed():
        dist.init_process_group(process.backend.dist_backend, store=dist.HashStore(), rank=0, world_size=1)
    _take_over_group()
    return library


def quieten() -> None:
    """Silence warnings that are about DeepSpeed's own code, for the rest of this process. Called at every step."""
    # Not again where it is known: Python then forgets what it has shown, and the user's own would appear at every step.
    if ("ignore", _DEPRECATED, FutureWarning, None, 0) not in warnings.filters:
        warnings.filterwarnings("ignore", message=_DEPRECATED.pattern, category=FutureWarning)
    logger = logging.getLogger("DeepSpeed")
    if _is_unexpected not in logger.filters:
        logger.addFilter(_is_unexpected)


def _is_unexpected(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_EXPECTED)


def _take_over_group() -> None:
    """Make DeepSpeed use this process's process group, and forget the group of an earlier launch.

    A group that this process inherited in a fork is kept, unused: destroying it would wait for threads that a fork
    does not copy.
    """
    global _group, _owner_pid
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    if _group is not dist.group.WORLD:
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        if _owner_pid not in (0, os.getpid()):
            held = [dict(value) if isinstance(value, dict) else value for value in vars(groups).values()]
            _inherited.append((_group, comm.cdb, held))
        comm.cdb = None
        getattr(groups, "_release_process_group_references", int)()
        _group, _owner_pid = dist.group.WORLD, os.getpid()
    comm.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)


@contextmanager
def _compiling_later() -> Iterator[None]:
    """Make ``torch.compile`` defer its work, in the block, until the function is called."""
    compiler: Any = torch
    compile_now = compiler.compile

    def compile_later(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    compiler.compile = compile_later
    try:
        yield
    finally:
        compiler.compile = compile_now


def is_engine(model: Any) -> bool:
    """Return whether ``model`` is one of DeepSpeed's engines. Imports nothing."""
    library: Any = sys.modules.get("deepspeed")
    return library is not None and isinstance(model, library.DeepSpeedEngine)


def sharded_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of which this rank holds a shard, as stage 3 makes them."""
    return [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
