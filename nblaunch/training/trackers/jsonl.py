"""Metrics as lines of JSON in a file: no library needed, and ``pandas.read_json(path, lines=True)`` reads it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, TextIO

from nblaunch.training.trackers.base import GeneralTracker, flat


class JsonlTracker(GeneralTracker):
    """Appends to ``<logging_dir>/<run_name>/metrics.jsonl``; settings go to ``config.json`` beside it.

    Args:
        run_name: the project's name.
        logging_dir: the folder of all runs.

    A number that JSON does not know (NaN, infinity) is written as null, an object as its text.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.folder = Path(logging_dir) / run_name
        self._file: TextIO | None = None

    @property
    def path(self) -> Path:
        """The file of metrics."""
        return self.folder / "metrics.jsonl"

    @property
    def tracker(self) -> TextIO | None:
        """The open file."""
        return self._file

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Line by line, so that what was logged outlives a process that is killed.
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = json.dumps(_strict(values), indent=2, default=str)
        (self.folder / "config.json").write_text(text + "\n", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if self._file is not None:
            row = {"step": step, "time_s": time.time(), **_strict(dict(flat(values)))}
            self._file.write(json.dumps(row, default=str, allow_nan=False) + "\n")

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _strict(value: Any) -> Any:
    """``value`` without numbers that are not JSON."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
