"""nblaunch: launch PyTorch training on every device of a machine from a notebook.

    from nblaunch import Accelerator, notebook_launcher

    result = notebook_launcher(training_function, (model,))

The names in ``__all__`` are public, and so are those of ``nblaunch.utils``. Each is imported at its first use, so that
``import nblaunch`` takes milliseconds and imports neither torch nor ipywidgets.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from nblaunch import packages
from nblaunch.backends import first_use
from nblaunch.compat import delegated, finder, systems

__version__ = "0.1.0"

_PUBLIC = {
    "Accelerator": "nblaunch.training.accelerator",
    "AcceleratorState": "nblaunch.training.state",
    "AutocastKwargs": "nblaunch.training.options",
    "CheckpointError": "nblaunch.errors",
    "DDPCommunicationHookType": "nblaunch.training.options",
    "DataLoaderConfiguration": "nblaunch.training.options",
    "DeepSpeedPlugin": "nblaunch.training.strategies.deepspeed.strategy",
    "DistributedDataParallelKwargs": "nblaunch.training.options",
    "DistributedOperationException": "nblaunch.errors",
    "DistributedType": "nblaunch.training.state",
    "FullyShardedDataParallelPlugin": "nblaunch.training.strategies.fsdp2.strategy",
    "GradScalerKwargs": "nblaunch.training.options",
    "GradientAccumulationPlugin": "nblaunch.training.options",
    "GradientState": "nblaunch.training.state",
    "InitProcessGroupKwargs": "nblaunch.training.options",
    "Job": "nblaunch.launcher.job",
    "JobCancelled": "nblaunch.errors",
    "JobHung": "nblaunch.errors",
    "JobLost": "nblaunch.errors",
    "LaunchError": "nblaunch.errors",
    "LocalSGD": "nblaunch.training.utilities.local_sgd",
    "NblaunchError": "nblaunch.errors",
    "NodeLost": "nblaunch.errors",
    "ParallelismConfig": "nblaunch.training.parallelism",
    "PartialState": "nblaunch.training.state",
    "PayloadError": "nblaunch.errors",
    "ProfileKwargs": "nblaunch.training.options",
    "ProjectConfiguration": "nblaunch.training.options",
    "ResultError": "nblaunch.errors",
    "Session": "nblaunch.session.session",
    "WorkerDied": "nblaunch.errors",
    "WorkerError": "nblaunch.errors",
    "WorkerFailed": "nblaunch.errors",
    "attach": "nblaunch.detached",
    "debug": "nblaunch.debugging",
    "debug_launcher": "nblaunch.notebook",
    "find_executable_batch_size": "nblaunch.training.utilities.memory",
    "init_empty_weights": "nblaunch.training.utilities.memory",
    "init_on_device": "nblaunch.training.utilities.memory",
    "jobs": "nblaunch.detached",
    "last_job": "nblaunch.launcher.job",
    "launch": "nblaunch.notebook",
    "load_checkpoint_and_dispatch": "nblaunch.training.checkpoints.loading",
    "load_checkpoint_in_model": "nblaunch.training.checkpoints.loading",
    "notebook_launcher": "nblaunch.notebook",
    "one_at_a_time": "nblaunch.training.joining",
    "set_seed": "nblaunch.training.collectives.rng",
    "skip_first_batches": "nblaunch.training.data.resuming",
    "synchronize_rng_states": "nblaunch.training.collectives.rng",
}

_SUBMODULES = ("errors", *finder.submodules_of("nblaunch"))
"""Submodules that code written for Accelerate uses as attributes: ``nblaunch.utils.set_seed(0)``."""

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "CheckpointError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "Job",
    "JobCancelled",
    "JobHung",
    "JobLost",
    "LaunchError",
    "LocalSGD",
    "NblaunchError",
    "NodeLost",
    "ParallelismConfig",
    "PartialState",
    "PayloadError",
    "ProfileKwargs",
    "ProjectConfiguration",
    "ResultError",
    "Session",
    "WorkerDied",
    "WorkerError",
    "WorkerFailed",
    "__version__",
    "attach",
    "debug",
    "debug_launcher",
    "find_executable_batch_size",
    "init_empty_weights",
    "init_on_device",
    "jobs",
    "last_job",
    "launch",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "one_at_a_time",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
]

if TYPE_CHECKING:
    from nblaunch.debugging import debug
    from nblaunch.detached import attach, jobs
    from nblaunch.errors import (
        CheckpointError,
        DistributedOperationException,
        JobCancelled,
        JobHung,
        JobLost,
        LaunchError,
        NblaunchError,
        NodeLost,
        PayloadError,
        ResultError,
        WorkerDied,
        WorkerError,
        WorkerFailed,
    )
    from nblaunch.launcher.job import Job, last_job
    from nblaunch.notebook import debug_launcher, launch, notebook_launcher
    from nblaunch.session.session import Session
    from nblaunch.training.accelerator import Accelerator
    from nblaunch.training.checkpoints.loading import (
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
    )
    from nblaunch.training.collectives.rng import set_seed, synchronize_rng_states
    from nblaunch.training.data.resuming import skip_first_batches
    from nblaunch.training.joining import one_at_a_time
    from nblaunch.training.options import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
        ProjectConfiguration,
    )
    from nblaunch.training.parallelism import ParallelismConfig
    from nblaunch.training.state import AcceleratorState, DistributedType, GradientState, PartialState
    from nblaunch.training.strategies.deepspeed.strategy import DeepSpeedPlugin
    from nblaunch.training.strategies.fsdp2.strategy import FullyShardedDataParallelPlugin
    from nblaunch.training.utilities.local_sgd import LocalSGD
    from nblaunch.training.utilities.memory import (
        find_executable_batch_size,
        init_empty_weights,
        init_on_device,
    )


finder.install()

# A launch can fork if GPUs were only counted, and names the line of code that initialised CUDA if it can't.
first_use.watch()
packages.when_imported("torch.cuda", first_use.watch_torch)
packages.when_imported("torch.xpu", first_use.watch_torch)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in delegated.HOMES:
        globals()[name] = delegated.find(name)
        return globals()[name]
    if name not in _PUBLIC:
        raise AttributeError(finder.missing_attribute(__name__, name))
    if systems.refusal() is not None and _PUBLIC[name] != "nblaunch.errors":
        return systems.StandIn()
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    # Where a folder has the name too, importing it has set the attribute: the folder, which can be called as well.
    value = sys.modules.get(f"{__name__}.{name}", value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*__all__, *_SUBMODULES, *dunders})


def load_ipython_extension(shell: Any) -> None:
    """Add ``%%ranks`` and ``%ranks`` to IPython: ``%load_ext nblaunch``."""
    from nblaunch.session import magics

    magics.register(shell)
