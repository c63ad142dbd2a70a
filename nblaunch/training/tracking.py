"""Metrics on their way to trackers and to the launcher: ``log_with``, ``init_trackers``, ``log``.

    accelerator.log ──> every tracker (main process)
                    └─> events.Metric ──> dashboards, job.metrics

:class:`TrackerHub` is the part of the ``Accelerator`` that sends them. ``trackers.py`` has the tracker interface and
the built-in trackers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch import context
from nblaunch.errors import warn
from nblaunch.events import Metric, RunTracked
from nblaunch.packages import is_installed
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.options import ProjectConfiguration, Word
from nblaunch.training.trackers import BUILT_IN, GeneralTracker, flat, settings_of
from nblaunch.training.trackers import plain as as_number
from nblaunch.wire.channel import plain

Start = tuple[str, Any, Mapping[str, Mapping[str, Any]]]
"""Name of the project, settings, and further arguments by tracker name."""

_MAX_TEXT = 200  # maximum characters in a string that is sent to the launcher

_LOGGED = (int, float, str, enum.Enum)
"""The types of logged values that are sent to the launcher. Tensors with one element are converted to numbers first."""

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {str(vars(kind)["name"]): kind for kind in BUILT_IN}
"""Name for ``log_with`` -> tracker class, including registered classes."""


_ONLY_IN_ACCELERATE = {
    "aim": "aim.Run()",
    "clearml": "clearml.Task.init(project_name=...)",
    "dvclive": "dvclive.Live()",
}
"""Name of a tracker that only Accelerate has -> the function in its library that starts a run."""


class LoggerType(Word):
    """Names for ``log_with``. ``AIM``, ``CLEARML`` and ``DVCLIVE`` need a registered tracker class."""

    AIM = "aim"
    ALL = "all"
    CLEARML = "clearml"
    COMETML = "comet_ml"
    DVCLIVE = "dvclive"
    JSONL = "jsonl"
    MLFLOW = "mlflow"
    SWANLAB = "swanlab"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"


def register_tracker_class(kind: type[GeneralTracker]) -> None:
    """Let ``log_with`` find a tracker class by its ``name``. This warns if it replaces another class.

    Raises:
        ValueError: ``kind`` is not a subclass of ``GeneralTracker``, or has no ``name``.
    """
    if not (isinstance(kind, type) and issubclass(kind, GeneralTracker)):
        raise ValueError(f"{kind!r} is not a subclass of GeneralTracker")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"tracker class {kind.__name__} has no name")
    if LOGGER_TYPE_TO_CLASS.get(name, kind) is not kind:
        warn(
            f"tracker {name!r} was {LOGGER_TYPE_TO_CLASS[name].__qualname__}, and is now {kind.__qualname__}"
        )
    LOGGER_TYPE_TO_CLASS[name] = kind


class TrackerHub:
    """One Accelerator's trackers, chosen by ``log_with``; ``"all"`` chooses every tracker whose requirements are met.

    Attributes:
        starts: the arguments passed to :meth:`start` for all runs that have not ended.

    Raises:
        ValueError: a name is unknown, or a tracker needs a folder and there is none.
    """

    def __init__(self, log_with: Any, project: ProjectConfiguration, process: JoinedProcess) -> None:
        self.project = project
        self.process = process
        self.chosen = _chosen(log_with, project.logging_dir)
        self.starts: list[Start] = []
        self._trackers: list[GeneralTracker] = []
        self._carried: list[Start] = []
        self._has_warned_of_step = False
        self._has_warned_of_values = False

    def take_over(self, starts: Sequence[Start]) -> None:
        """Start the notebook's trackers in this process when it first uses one.

        Starting them earlier would create a run even if the function logs nothing, or starts its own trackers.
        """
        self._carried = list(starts)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that are running in this process."""
        carried, self._carried = self._carried, []
        for start in carried:
            self.start(*start)
        return self._trackers

    def start(self, project_name: str, config: Any, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Create and start the trackers that run on this rank; see ``Accelerator.init_trackers``."""
        self._carried = []
        self.starts.append((project_name, config, options))
        for choice in self.chosen:
            if choice.main_process_only and self.process.topology.rank != 0:
                continue
            tracker = choice
            if isinstance(choice, type):
                where = (self.project.logging_dir,) if _needs_folder(choice) else ()
                tracker = choice(project_name, *where, **options.get(choice.name, {}))  # type: ignore[attr-defined]
            tracker.start()
            _report_location(tracker, self.process.topology.rank)
            if config is not None:
                tracker.store_init_configuration(settings_of(config))
            self._trackers.append(tracker)

    def log(self, values: Mapping[str, Any], step: Any, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Pass ``values`` to the trackers, and the numbers and strings among them to the launcher."""
        named = {str(name): value for name, value in values.items()}
        for tracker in self.trackers:
            tracker.log(dict(named), step=step, **options.get(tracker.name, {}))  # type: ignore[attr-defined]
        if self.process.topology.rank == 0:
            logged = self._values_to_show(named)
            step = self._step_to_show(step)
            epoch = self.process.slot.epoch
            context.current().emit(Metric(rank=0, step=step, values=logged, epoch=epoch))

    def _values_to_show(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers and strings among the values; warn once if no tracker gets the other values."""
        logged, lost = {}, {}
        for name, value in flat(named):
            if isinstance(value, _LOGGED):
                logged[name] = _plain(value)
            elif value is not None:
                lost[name] = value
        if lost and not self.trackers and not self._has_warned_of_values:
            self._has_warned_of_values = True
            described = ", ".join(f"{name!r} ({type(value).__name__})" for name, value in lost.items())
            warn(
                f"accelerator.log ignores {described}, because the dashboard and job.metrics take only numbers and "
                "text. Log single numbers, as in scheduler.get_last_lr()[0], or choose a tracker that takes such "
                "values: Accelerator(log_with=...)"
            )
        return logged

    def _step_to_show(self, step: Any) -> int | float | str | None:
        """Return ``step`` as a number or a string; warn about the first step that is not a number."""
        step = _plain(as_number(step))
        if step is None or isinstance(step, int) or (isinstance(step, float) and math.isfinite(step)):
            return step
        if not self._has_warned_of_step:
            self._has_warned_of_step = True
            warn(
                f"accelerator.log(step={step!r}): charts count the calls instead, because this step is not a number"
            )
        return str(step)

    def get(self, name: str, unwrap: bool) -> Any:
        """Return the tracker called ``name``; see ``Accelerator.get_tracker``."""
        for tracker in self.trackers:
            if tracker.name == name:  # type: ignore[attr-defined]
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
        names = [choice.name for choice in self.chosen]
        if name in names and self.process.topology.rank != 0:
            return GeneralTracker(_blank=True)
        raise ValueError(
            f"there is no tracker {name!r}; accelerator.init_trackers(project_name) starts {', '.join(names) or 'none'}"
        )

    def finish(self) -> None:
        """End all runs, and then raise the first error, if any."""
        trackers, self._trackers, self.starts, self._carried = self._trackers, [], [], []
        first: Exception | None = None
        for tracker in trackers:
            try:
                tracker.finish()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first


def _report_location(tracker: Any, rank: int) -> None:
    """Show where to see the run; show nothing for a tracker without a known location."""
    try:
        location = str(tracker.location())
    except Exception:  # from the user's tracker, or from a service that has not answered
        return
    if location:
        context.current().emit(RunTracked(rank, tracker=tracker.name, location=location))


def _chosen(log_with: Any, logging_dir: str | None) -> list[Any]:
    """Return the installed tracker classes and the trackers that ``log_with`` selects, each once."""
    choices = list(log_with) if isinstance(log_with, (list, tuple, set)) else [log_with]
    choices = [
        str(choice) if isinstance(choice, (str, enum.Enum)) else choice
        for choice in choices
        if choice is not None
    ]
    chosen: list[Any] = []
    missing: list[str] = []
    for choice in choices:
        if choice == "all":
            for kind in LOGGER_TYPE_TO_CLASS.values():
                if _can_be_used(kind) and (logging_dir is not None or not _needs_folder(kind)):
                    _add(chosen, kind)
            continue
        kind = _resolve(choice)
        if not _can_be_used(kind):
            missing.append(f"{choice!r} (pip install {kind.library})")
            continue
        if isinstance(kind, type) and _needs_folder(kind) and logging_dir is None:
            raise ValueError(
                f"log_with={choice!r} writes files; choose a folder: Accelerator(project_dir=...) or "
                "ProjectConfiguration(logging_dir=...)"
            )
        _add(chosen, kind)
    if missing:
        warn(f"these trackers log nothing, because their packages are not installed: {', '.join(missing)}")
    return chosen


def _resolve(choice: Any) -> Any:
    if isinstance(choice, GeneralTracker):
        return choice
    if isinstance(choice, str) and choice.lower() in LOGGER_TYPE_TO_CLASS:
        return LOGGER_TYPE_TO_CLASS[choice.lower()]
    if isinstance(choice, type) and issubclass(choice, GeneralTracker):
        return choice
    valid = ", ".join(map(repr, ("all", *sorted(LOGGER_TYPE_TO_CLASS))))
    if isinstance(choice, str) and choice.lower() in _ONLY_IN_ACCELERATE:
        name = choice.lower()
        raise ValueError(
            f"log_with={name!r}: Accelerate has a tracker for {name}, but nblaunch does not. Write a subclass of "
            f"nblaunch.tracking.GeneralTracker whose start() calls {_ONLY_IN_ACCELERATE[name]} (pip install {name}), "
            "and pass it, Accelerator(log_with=MyTracker()), or register the class under this name with "
            f"nblaunch.tracking.register_tracker_class. Built-in trackers are {valid}"
        )
    raise ValueError(
        f"log_with={choice!r} is unknown; valid values are {valid}, your own GeneralTracker, or a list of these"
    )


def _add(chosen: list[Any], tracker: Any) -> None:
    if not any(tracker is other for other in chosen):
        chosen.append(tracker)


def _needs_folder(kind: Any) -> bool:
    return bool(getattr(kind, "requires_logging_directory", False))


def _can_be_used(kind: Any) -> bool:
    library = getattr(kind, "library", None)
    return library is None or is_installed(library)


def _plain(value: Any) -> Any:
    value = plain(value)
    return value[:_MAX_TEXT] if isinstance(value, str) else value
