"""Where a training run keeps its files: :class:`ProjectConfiguration`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class ProjectConfiguration:
    """Where a training run keeps checkpoints and logs.

    Args:
        project_dir: folder of the run; None: none.
        logging_dir: folder of trackers that write files; None: ``project_dir``.
        automatic_checkpoint_naming: ``save_state`` writes ``<project_dir>/checkpoints/checkpoint_<iteration>``.
        total_limit: how many of these to keep, at least 1; None: all. The oldest goes once the new one is complete.
        iteration: number of the next one; grows with every ``save_state``, and ``load_state`` puts it behind the one
            that it loaded.
        save_on_each_node: ``save`` and ``save_model`` write on every machine, not on the main one only.

    Raises:
        ValueError: ``total_limit`` is less than 1, ``iteration`` is negative, or ``automatic_checkpoint_naming`` is
            asked for where there is no ``project_dir`` (once it is used).
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(
                f"total_limit={self.total_limit} would keep no checkpoint; give at least 1, or None"
            )
        if self.iteration < 0:
            raise ValueError(f"iteration={self.iteration} is negative")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set ``project_dir``, and ``logging_dir`` where that was not given."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    @property
    def checkpoints(self) -> Path:
        """The folder of automatically named checkpoints.

        Raises:
            ValueError: there is no ``project_dir``.
        """
        if self.project_dir is None:
            raise ValueError(
                "automatic_checkpoint_naming needs a project_dir: Accelerator(project_dir=...) or "
                "ProjectConfiguration(project_dir=...)"
            )
        return Path(self.project_dir) / "checkpoints"


def project_of(
    project_dir: str | os.PathLike[str] | None, config: ProjectConfiguration | None
) -> ProjectConfiguration:
    """The project that an Accelerator's two arguments describe.

    Raises:
        ValueError: they name different folders.
    """
    config = config or ProjectConfiguration()
    if project_dir is None:
        return config
    given = os.fspath(project_dir)
    if config.project_dir is not None and config.project_dir != given:
        raise ValueError(
            f"project_dir={given!r}, but project_config has project_dir={config.project_dir!r}; set it in one place"
        )
    config.set_directories(given)
    return config
