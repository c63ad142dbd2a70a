"""What a tracker of experiments has to say: :class:`GeneralTracker`.

The contract is the one that users of the reference know, so that trackers written for it work here. A tracker of ours
is one file in this folder and imports its library only when it is started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from nblaunch import context

F = TypeVar("F", bound=Callable[..., Any])


class GeneralTracker:
    """Base of trackers.

    A subclass has the class attributes ``name`` and ``requires_logging_directory``, and the property ``tracker``, the
    library's own run object. Its constructor must not touch the job: what does belongs into :meth:`start`.

    Args:
        _blank: make one that does nothing: what ``get_tracker`` returns on other ranks.

    Raises:
        NotImplementedError: the class lacks one of these attributes; names them.
    """

    main_process_only = True
    """Whether it runs on the main process alone."""

    library: str | None = None
    """The module it needs; None: none beyond Python's own."""

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [attribute for attribute in needed if not hasattr(type(self), attribute)]
        if missing:
            raise NotImplementedError(f"tracker class {type(self).__name__} needs {', '.join(missing)}")

    def start(self) -> None:
        """Begin a run. Called once, by ``init_trackers``."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep ``values`` as those of ``step``."""

    def finish(self) -> None:
        """End the run. Called by ``end_training``."""


def on_main_process(function: F) -> F:
    """Decorator for a tracker's methods: on other ranks they do nothing, unless its ``main_process_only`` is False."""

    @functools.wraps(function)
    def call(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if self.main_process_only and context.current().topology.rank != 0:
            return None
        return function(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def plain(value: Any) -> Any:
    """A tensor or NumPy number with one element as a Python number; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().item() if value.numel() == 1 else value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and plain values; those of nested mappings with a slash, as in ``loss/train``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", plain(value)


def numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    """What of ``values`` is a number."""
    return {name: value for name, value in flat(values) if isinstance(value, (int, float))}
