"""Optuna studies in the kernel's memory. A worker's changes to its copy are lost, and a note says so.

A study without a storage keeps its trials in an object of the kernel, and each worker has a copy. Values that the
function reports, attributes that it sets and parameters that it suggests never reach the study. Studies that
are stored in files or databases are shared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nblaunch import packages

_WRITES = (
    "create_new_study",
    "create_new_trial",
    "set_study_user_attr",
    "set_trial_intermediate_value",
    "set_trial_param",
    "set_trial_state_values",
    "set_trial_user_attr",
)
_LOST = (
    "an optuna study in the kernel's memory never gets the function's trials, or its calls to report(), "
    "set_user_attr() and suggest_float(). Return the values and record them in the kernel, or store the study "
    "in a file"
)


def watch(warn: Callable[[str], None]) -> None:
    """Report this worker's first write to one of the kernel's studies.

    Args:
        warn: receives a sentence for the user.
    """
    packages.observe_when_imported("optuna.storages._in_memory", functools.partial(_watch_storages, warn))


def _watch_storages(warn: Callable[[str], None], module: Any) -> None:
    packages.note_inherited_use(module.InMemoryStorage, _WRITES, functools.partial(warn, _LOST))
