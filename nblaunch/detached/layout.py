"""The layout of the pickles in a detached job's folder: their classes, with names and types of fields.

A process attaches only to jobs with its own layout, because an event with missing or different fields would fail
somewhere in a dashboard. The layout is computed from the classes, so the version of nblaunch does not matter.
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
    texts: dict[Any, str] = {}
    for cls in (Launch, LaunchPlan, Snapshot, JobError, *vars(events).values()):
        if inspect.isclass(cls):
            _add(cls, texts)
    return hashlib.sha256("\n".join(sorted(texts.values())).encode()).hexdigest()[:16]


def _add(hint: Any, texts: dict[Any, str]) -> None:
    """Add the classes that ``hint`` names, with the classes of their fields."""
    for argument in get_args(hint):
        _add(argument, texts)
    if not inspect.isclass(hint) or hint in texts:
        return
    if issubclass(hint, enum.Enum):
        texts[hint] = f"{hint.__qualname__}: {[(member.name, member.value) for member in hint]}"
    elif dataclasses.is_dataclass(hint):
        fields = dataclasses.fields(hint)
        texts[hint] = (
            f"{hint.__module__}.{hint.__qualname__}: {[(field.name, field.type) for field in fields]}"
        )
        hints = get_type_hints(hint)
        for field in fields:
            _add(hints[field.name], texts)
