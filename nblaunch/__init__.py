"""nblaunch: launch PyTorch training on every device of a machine from a notebook.

    from nblaunch import Accelerator, notebook_launcher

    result = notebook_launcher(training_function, (model,))

The names below are the public ones. They are loaded when first used, so that ``import nblaunch`` costs milliseconds
and imports neither torch nor ipywidgets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Accelerator": "nblaunch.training.accelerator",
    "Job": "nblaunch.launch.job",
    "JobCancelled": "nblaunch.errors",
    "JobHung": "nblaunch.errors",
    "LaunchError": "nblaunch.errors",
    "NblaunchError": "nblaunch.errors",
    "PayloadError": "nblaunch.errors",
    "ResultError": "nblaunch.errors",
    "WorkerDied": "nblaunch.errors",
    "WorkerError": "nblaunch.errors",
    "WorkerFailed": "nblaunch.errors",
    "debug_launcher": "nblaunch.notebook",
    "last_job": "nblaunch.launch.job",
    "notebook_launcher": "nblaunch.notebook",
}

__all__ = [
    "Accelerator",
    "Job",
    "JobCancelled",
    "JobHung",
    "LaunchError",
    "NblaunchError",
    "PayloadError",
    "ResultError",
    "WorkerDied",
    "WorkerError",
    "WorkerFailed",
    "__version__",
    "debug_launcher",
    "last_job",
    "notebook_launcher",
]

if TYPE_CHECKING:
    from nblaunch.errors import (
        JobCancelled,
        JobHung,
        LaunchError,
        NblaunchError,
        PayloadError,
        ResultError,
        WorkerDied,
        WorkerError,
        WorkerFailed,
    )
    from nblaunch.launch.job import Job, last_job
    from nblaunch.notebook import debug_launcher, notebook_launcher
    from nblaunch.training.accelerator import Accelerator


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'nblaunch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
