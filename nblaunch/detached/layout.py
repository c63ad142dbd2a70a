"""The layout of what is pickled in the folder of a detached job: its classes, with the names and types of their fields.

A process attaches to jobs with its own layout only: an event without a field, or with a field of another meaning, would
fail somewhere in a dashboard. The version of nblaunch does not matter: the layout is computed
from the classes.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
from functools import cache
from typing import Any, get_args, get_type_hints

from nblaunch import events
from nblaunch.detached.folder import JobError, Launch, Snapshot
from nblaunch.launcher.plan import LaunchPlan


@cache
def own_layout() -> str:
    """Return the layout of this process, as a short text."""
    found: dict[Any, str] = {}
    for cls in (Launch, LaunchPlan, Snapshot, JobError, *vars(events).values()):
        if inspect.isclass(cls):
            _add(cls, found)
    return hashlib.sha256("\n".join(sorted(found.values())).encode()).hexdigest()[:16]


def _add(hint: Any, found: dict[Any, str]) -> None:
    """Add the classes that ``hint`` names, with the classes of their fields."""
    for argument in get_args(hint):
        _add(argument, found)
    if not inspect.isclass(hint) or hint in found:
        return
    if issubclass(hint, enum.Enum):
        found[hint] = f"{hint.__qualname__}: {[(one.name, one.value) for one in hint]}"
    elif dataclasses.is_dataclass(hint):
        fields = dataclasses.fields(hint)
        found[hint] = f"{hint.__module__}.{hint.__qualname__}: {[(one.name, one.type) for one in fields]}"
        hints = get_type_hints(hint)
        for one in fields:
            _add(hints[one.name], found)
