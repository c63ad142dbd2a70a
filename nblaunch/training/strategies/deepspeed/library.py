"""Imports DeepSpeed when a job uses it, sets it up for this process's device, and turns off what the job doesn't need.

``checkpoint.py`` also imports two of DeepSpeed's submodules. Nothing here decides how to train a model.
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
"""The oldest version whose training matches a single process's in every stage, even with gradient accumulation."""

# DeepSpeed's warnings about intended settings.
_EXPECTED = (
    "MPU is not provided, setting tp size to 1",  # there is no tensor parallelism
    "**** You are using ZeRO with an untested optimizer",  # nblaunch accepts any torch optimizer
)

# In every step, DeepSpeed 0.19 calls collectives by names that torch 2.13 deprecates. Remove this once DeepSpeed uses
# the new names.
_DEPRECATED = re.compile(
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", re.IGNORECASE
)

# The process group that DeepSpeed uses, and the process that set it.
_group: Any = None
_owner_pid = 0
_inherited: list[Any] = []


def check_installed() -> None:
    """Raise ImportError if DeepSpeed is not installed; import nothing."""
    if not is_installed("deepspeed"):
        raise ImportError(
            "DeepSpeedPlugin needs DeepSpeed, which is not installed: pip install deepspeed (without a compiler: "
            "DS_BUILD_OPS=0 pip install deepspeed)"
        )


def load(process: JoinedProcess) -> Any:
    """Import ``deepspeed``, and make it use this process's device type and process group."""
    with suppress(importlib.metadata.PackageNotFoundError):  # a source folder has no version
        version = importlib.metadata.version("deepspeed")
        if TorchVersion(version) < OLDEST:  # it would train incorrectly without raising an error
            raise ImportError(
                f"DeepSpeed {version} is too old: stage 2 accumulates gradients wrongly in 0.17 and fails in 0.18; "
                f"{OLDEST} or newer is needed: pip install -U deepspeed"
            )
    kind = process.backend.device_type
    if kind not in DEVICES:
        raise ValueError(
            f"DeepSpeed supports {' and '.join(DEVICES)}, but this process uses {process.backend.name}"
        )
    # DeepSpeed would use any GPU that it sees. It also reads the local rank from the environment.
    env.apply({"DS_ACCELERATOR": kind, "LOCAL_RANK": str(process.topology.local_rank)})
    quieten()
    library: Any = importlib.import_module("deepspeed")
    chosen: Any = importlib.import_module("deepspeed.accelerator.real_accelerator")
    if library.get_accelerator().device_name().partition(":")[0] != kind:
        chosen.ds_accelerator = None  # DeepSpeed chose a device when the kernel imported it
        library.get_accelerator()
    # Turn off DeepSpeed's shared-memory all-reduce, which only inference uses. Otherwise each rank would spend half
    # a minute compiling it once there is a process group.
    getattr(library.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
    # Every stage of ZeRO checks whether its optimizer is Muon. Muon's module (0.19) decorates functions with
    # ``torch.compile``, which imports the compiler, at the cost of 1 s of processor time per worker (2 to 4 s on busy
    # cores), 45 MB, and warnings from torch.
    with suppress(ImportError), _compiling_later():
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    add_wrapper(library.DeepSpeedEngine)
    # DeepSpeed needs a process group even in a single process.
    if process.topology.world_size == 1 and not is_distributed():
        dist.init_process_group(process.backend.dist_backend, store=dist.HashStore(), rank=0, world_size=1)
    _take_over_group()
    return library


def quieten() -> None:
    """Silence warnings about DeepSpeed's own code until this process exits. Called in every step."""
    # Add the filter only once: whenever a filter is added, Python forgets which warnings it has shown, and repeats the
    # user's.
    if ("ignore", _DEPRECATED, FutureWarning, None, 0) not in warnings.filters:
        warnings.filterwarnings("ignore", message=_DEPRECATED.pattern, category=FutureWarning)
    logger = logging.getLogger("DeepSpeed")
    if _is_unexpected not in logger.filters:
        logger.addFilter(_is_unexpected)


def _is_unexpected(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_EXPECTED)


def _take_over_group() -> None:
    """Make DeepSpeed use this process's process group, and forget an earlier launch's group.

    A group inherited through a fork is kept but not used. It can't be destroyed, because the call would wait for the
    group's threads, which a fork does not copy.
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
    """Make ``torch.compile`` in the block defer compilation until the function is called."""
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
    """Return whether ``model`` is one of DeepSpeed's engines; import nothing."""
    library: Any = sys.modules.get("deepspeed")
    return library is not None and isinstance(model, library.DeepSpeedEngine)


def sharded_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that stage 3 has sharded."""
    return [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
