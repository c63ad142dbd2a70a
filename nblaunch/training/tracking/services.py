"""Trackers for other services: Comet, SwanLab and trackio.

Names, arguments and methods follow Hugging Face Accelerate's trackers.
"""

from __future__ import annotations

import shlex
from typing import Any

from nblaunch.training.tracking.trackers import GeneralTracker, json_settings, plain


class _RunTracker(GeneralTracker):
    """Base class of these trackers: a run that logs and finishes.

    Args:
        run_name: the project's name.
        **options: options for the library's function that starts a run.
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
        """Log lists of images, each of which ``swanlab.Image`` accepts."""
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


SERVICES: tuple[type[GeneralTracker], ...] = (CometMLTracker, SwanLabTracker, TrackioTracker)
