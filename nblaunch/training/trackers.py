"""Experiment trackers: the base class, JSON lines, MLflow, TensorBoard, Weights & Biases, Comet, SwanLab and trackio.

The interface follows Hugging Face Accelerate's, so trackers written for Accelerate work here. A tracker imports its
library only when it starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import shlex
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch

from nblaunch import env
from nblaunch.training.joining import current_topology

F = TypeVar("F", bound=Callable[..., Any])


class GeneralTracker:
    """Base class for trackers.

    A subclass has the class attributes ``name`` and ``requires_logging_directory``, and the property ``tracker``, which
    returns the library's run object. A tracker that you pass to ``log_with`` as an object can instead set these
    attributes in its own constructor before it calls the base class's. The constructor may run before the process joins
    its job, so put code that needs the job (for example, its rank) into :meth:`start`.

    Args:
        _blank: whether to create a tracker that does nothing, for ``get_tracker`` on other ranks.

    Raises:
        NotImplementedError: an attribute is missing from both the class and the object; the message names the missing
            ones.
    """

    main_process_only = True
    """Whether the tracker runs only on the main process."""

    library: str | None = None
    """The module that the tracker needs; None if it needs only Python's standard library."""

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        needed = ("name", "requires_logging_directory", "tracker")
        # Don't read properties, because a property may need something that the constructor has not created yet.
        missing = [name for name in needed if not hasattr(type(self), name) and name not in vars(self)]
        if missing:
            raise NotImplementedError(f"tracker class {type(self).__name__} needs {', '.join(missing)}")

    def start(self) -> None:
        """Start a run. Called by ``init_trackers``, once in each process that uses the tracker."""

    def location(self) -> str:
        """Return an address or a command for viewing the run; an empty string if there is nothing to see."""
        return ""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings of the run; :func:`settings_of` converts other kinds of configuration to a dict."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values`` at ``step``."""

    def finish(self) -> None:
        """End the run. Called by ``end_training``."""


def on_main_process(function: F) -> F:
    """Decorate a tracker's method to do nothing on ranks other than 0, unless ``main_process_only`` is False."""

    @functools.wraps(function)
    def call(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if self.main_process_only and current_topology().rank != 0:
            return None
        return function(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def plain(value: Any) -> Any:
    """Return a tensor or NumPy number with one element as a Python number; return other values unchanged."""
    if isinstance(value, torch.Tensor):
        return value.detach().item() if value.numel() == 1 else value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings of a run as a dict; all names, including names of nested settings, are strings.

    Args:
        config: a mapping, a dataclass, an ``argparse.Namespace``, or another object whose attributes are the settings.
            Mappings, dataclasses and namespaces among its values are nested settings; other values stay unchanged.

    Raises:
        TypeError: ``config`` has no names for its values.
    """
    if not _has_names(config) and not hasattr(config, "__dict__"):
        try:
            config = dict(config)  # pairs of a name and a value
        except (TypeError, ValueError):
            raise TypeError(
                "init_trackers(config=...) must be a mapping, a dataclass, a namespace or an object with attributes, "
                f"but it is of type {type(config).__name__}: {config!r:.200}"
            ) from None
    if isinstance(config, Mapping):
        items: Iterable[tuple[Any, Any]] = config.items()
    elif dataclasses.is_dataclass(config):
        items = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    else:
        items = vars(config).items()
    return {str(name): settings_of(value) if _has_names(value) else value for name, value in items}


def _has_names(value: Any) -> bool:
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_dataclass or isinstance(value, (Mapping, argparse.Namespace, types.SimpleNamespace))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and plain values; names in nested mappings are joined with a slash, as in ``loss/train``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", plain(value)


def numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the numbers among ``values``."""
    return {name: value for name, value in flat(values) if isinstance(value, (int, float))}


class JsonlTracker(GeneralTracker):
    """Appends to ``<logging_dir>/<run_name>/metrics.jsonl``, and writes settings to ``config.json`` in that folder.

    Args:
        run_name: the project's name.
        logging_dir: the folder of all runs.

    Numbers that JSON does not support (NaN, infinity) are written as null, and objects as text.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.folder = Path(logging_dir) / run_name
        self._file: TextIO | None = None

    @property
    def path(self) -> Path:
        """The metrics file."""
        return self.folder / "metrics.jsonl"

    @property
    def tracker(self) -> TextIO | None:
        """The open file."""
        return self._file

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Write line by line, so that logged values survive a killed process.
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = json.dumps(json_settings(values), indent=2)
        (self.folder / "config.json").write_text(text + "\n", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if self._file is not None:
            row = {"step": step, "time_s": time.time(), **_strict(dict(flat(values)))}
            self._file.write(json.dumps(row, default=str, allow_nan=False) + "\n")

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def json_settings(config: Any) -> Any:
    """Return the settings of a run, converted to JSON types; other objects become text."""
    return json.loads(json.dumps(_strict(settings_of(config)), default=str))


def _strict(value: Any) -> Any:
    """Return ``value`` without numbers that JSON does not support."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# https://mlflow.org/docs/latest/rest-api.html#request-limits: limits for one request.
_MAX_PARAMS = 100
_MAX_PARAM_LENGTH = 6000


class MLflowTracker(GeneralTracker):
    """A run of ``mlflow``.

    The environment variables MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS and MLFLOW_NESTED_RUN take precedence.

    Args:
        experiment_name: the project's name.
        logging_dir: folder or address of the tracking store; None: MLflow's own setting, for example
            MLFLOW_TRACKING_URI.
        run_id: an existing run to continue, in its own experiment; None: a new one.
        tags: tags for the run; a dict, or a JSON object as a string.
        nested_run: whether to nest the run in the active run.
        run_name: name of the run; None: MLflow creates one.
        description: description of the run.

    Raises:
        ValueError: the tags are not valid JSON, or MLFLOW_NESTED_RUN is not a boolean.
    """

    name = "mlflow"
    requires_logging_directory = False
    library = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        variables = env.snapshot()
        nested, tags = variables.get("MLFLOW_NESTED_RUN"), variables.get("MLFLOW_TAGS", tags)
        try:
            nested_run = nested_run if nested is None else env.as_flag(nested)
            tags = json.loads(tags) if isinstance(tags, str) else tags
        except ValueError as error:
            raise ValueError(
                "tags=... or MLFLOW_TAGS must be a JSON object, and MLFLOW_NESTED_RUN must be true or false: "
                f"{error}"
            ) from error
        self.experiment_name = variables.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self._run_options = {
            "run_id": variables.get("MLFLOW_RUN_ID", run_id),
            "run_name": run_name,
            "nested": nested_run,
            "tags": tags,
            "description": description,
        }
        self.active_run: Any = None

    @property
    def tracker(self) -> Any:
        """The active run."""
        return self.active_run

    def start(self) -> None:
        import mlflow

        if self.logging_dir is not None:
            mlflow.set_tracking_uri(self.logging_dir)
        if self._run_options["run_id"] is None and self.experiment_name is not None:
            mlflow.set_experiment(self.experiment_name)
        self.active_run = mlflow.start_run(**self._run_options)

    def location(self) -> str:
        import mlflow

        store, about = mlflow.get_tracking_uri(), self.active_run.info
        if store.startswith(("http://", "https://")):
            return f"{store.rstrip('/')}/#/experiments/{about.experiment_id}/runs/{about.run_id}"
        return f"mlflow ui --backend-store-uri {shlex.quote(store)}"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log settings as parameters of the run; cut strings to MLflow's limit."""
        import mlflow

        items = iter([(name, str(value)[:_MAX_PARAM_LENGTH]) for name, value in flat(settings_of(values))])
        while batch := dict(islice(items, _MAX_PARAMS)):
            mlflow.log_params(batch)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers; MLflow accepts only numbers as metrics."""
        import mlflow

        mlflow.log_metrics(numbers(values), step=step, **kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file with the run."""
        import mlflow

        mlflow.log_artifact(local_path, artifact_path=artifact_path)

    def log_figure(self, figure: Any, artifact_file: str, **kwargs: Any) -> None:
        """Store a figure with the run."""
        import mlflow

        mlflow.log_figure(figure=figure, artifact_file=artifact_file, **kwargs)

    def finish(self) -> None:
        if self.active_run is None:
            return
        import mlflow

        mlflow.end_run()


_HPARAM_TYPES = (bool, int, float, str)
_FLUSH_S = 10  # a killed process loses at most the values from this many seconds


class TensorBoardTracker(GeneralTracker):
    """Writes event files to ``<logging_dir>/<run_name>``.

    Args:
        run_name: the project's name.
        logging_dir: the folder of all runs.
        **options: options for :class:`torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    library = "tensorboard"

    def __init__(self, run_name: str, logging_dir: str, **options: Any) -> None:
        super().__init__()
        self.folder = Path(logging_dir) / run_name
        self._options = {"flush_secs": _FLUSH_S, **options}
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``."""
        return self.writer

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), **self._options)

    def location(self) -> str:
        return f"tensorboard --logdir {shlex.quote(str(self.folder.absolute()))}"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log settings as hyperparameters of the run, and write them to ``hparams.yml``; convert objects to text."""
        values = settings_of(values)
        shown = {
            name: value if isinstance(value, _HPARAM_TYPES) else str(value)
            for name, value in ((name, plain(value)) for name, value in values.items())
        }
        self.writer.add_hparams(shown, metric_dict={}, run_name="hparams")
        self.writer.flush()
        # JSON is valid YAML, so this needs no library.
        (self.folder / "hparams.yml").write_text(
            json.dumps(json_settings(values), indent=2) + "\n", encoding="utf-8"
        )

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, strings as text, and mappings of numbers as several scalars in one chart."""
        for name, value in values.items():
            value = plain(value)
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                parts = {str(part): plain(number) for part, number in value.items()}
                self.writer.add_scalars(name, parts, global_step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images, with the arguments of ``SummaryWriter.add_images``."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()


class _RunTracker(GeneralTracker):
    """Base class for service trackers, whose run objects log values and are finished at the end.

    Args:
        run_name: the project's name.
        **options: options for the library function that starts a run.
    """

    name = ""
    requires_logging_directory = False

    def __init__(self, run_name: str, **options: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._options = options
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log({name: plain(value) for name, value in values.items()}, step=step, **kwargs)

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()


class WandBTracker(_RunTracker):
    """A run of ``wandb``; ``options`` are for ``wandb.init``."""

    name = "wandb"
    library = "wandb"

    def start(self) -> None:
        import wandb

        self.run = wandb.init(**{"project": self.run_name, **self._options})

    def location(self) -> str:
        if self.run.url:
            return str(self.run.url)
        folder = Path(self.run.dir)  # the folder with the run's files, inside the run's own folder
        is_offline = folder.parent.name.startswith("offline-run-")
        return f"wandb sync {shlex.quote(str(folder.parent))}" if is_offline else str(folder)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(settings_of(values), allow_val_change=True)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images, in any form that ``wandb.Image`` accepts."""
        import wandb

        pictures = {
            name: [wandb.Image(image, **kwargs) for image in images] for name, images in values.items()
        }
        self.run.log(pictures, step=step)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given as ``columns`` and ``data`` or as a DataFrame."""
        import wandb

        self.run.log(
            {table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs
        )


class TrackioTracker(_RunTracker):
    """A run of ``trackio``; ``options`` are for ``trackio.init``."""

    name = "trackio"
    library = "trackio"

    def start(self) -> None:
        import trackio

        self.run = trackio.init(project=self.run_name, **self._options)

    def location(self) -> str:
        return f"trackio show --project {shlex.quote(self.run_name)}"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        import trackio

        trackio.config.update(json_settings(values))  # trackio stores other objects as {}


class SwanLabTracker(_RunTracker):
    """A run of ``swanlab``; ``options`` are for ``swanlab.init``."""

    name = "swanlab"
    library = "swanlab"

    def start(self) -> None:
        import swanlab

        self.run = swanlab.init(project=self.run_name, **self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        import swanlab

        swanlab.config.update(json_settings(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and media; strings become ``swanlab.Text``, because SwanLab rejects plain strings."""
        import swanlab

        shown = {
            name: swanlab.Text(value) if isinstance(value, str) else value for name, value in values.items()
        }
        super().log(shown, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images, in any form that ``swanlab.Image`` accepts."""
        import swanlab

        pictures = {name: [swanlab.Image(image) for image in images] for name, images in values.items()}
        self.run.log(pictures, step=step, **kwargs)


class CometMLTracker(_RunTracker):
    """An experiment of ``comet_ml``; ``options`` are for ``comet_ml.start``."""

    name = "comet_ml"
    library = "comet_ml"

    def start(self) -> None:
        import comet_ml

        self.run = comet_ml.start(project_name=self.run_name, **self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, strings separately, and mappings as several metrics."""
        if step is not None:
            self.run.set_step(step)
        for name, value in values.items():
            value = plain(value)
            if isinstance(value, (int, float)):
                self.run.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.run.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                parts = {part: plain(number) for part, number in value.items()}
                self.run.log_metrics(parts, step=step, **kwargs)

    def finish(self) -> None:
        if self.run is not None:
            self.run.end()


BUILT_IN: tuple[type[GeneralTracker], ...] = (
    JsonlTracker,
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
    CometMLTracker,
    SwanLabTracker,
    TrackioTracker,
)
