"""TensorBoard, through torch's own writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nblaunch.training.trackers.base import GeneralTracker, plain

_HPARAM_TYPES = (bool, int, float, str)
_FLUSH_S = 10  # how much a killed process may lose


class TensorBoardTracker(GeneralTracker):
    """Writes event files to ``<logging_dir>/<run_name>``.

    Args:
        run_name: the project's name.
        logging_dir: the folder of all runs.
        **options: for :class:`torch.utils.tensorboard.SummaryWriter`.
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

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Settings as hyperparameters of the run, and in ``hparams.yml``."""
        shown = {
            name: value if isinstance(value, _HPARAM_TYPES) else str(value)
            for name, value in ((name, plain(value)) for name, value in values.items())
        }
        self.writer.add_hparams(shown, metric_dict={}, run_name="hparams")
        self.writer.flush()
        # JSON is YAML, so this needs no library.
        (self.folder / "hparams.yml").write_text(
            json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8"
        )

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, texts as texts, mappings of numbers as several scalars in one chart."""
        for name, value in values.items():
            value = plain(value)
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                parts = {part: plain(number) for part, number in value.items()}
                self.writer.add_scalars(name, parts, global_step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Batches of images, as for ``SummaryWriter.add_images``."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()
