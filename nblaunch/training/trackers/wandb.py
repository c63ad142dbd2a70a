"""Weights & Biases, through its own library."""

from __future__ import annotations

from typing import Any

from nblaunch.training.trackers.base import GeneralTracker, plain


class WandBTracker(GeneralTracker):
    """A run of ``wandb``.

    Args:
        run_name: the project's name.
        **options: for ``wandb.init``.
    """

    name = "wandb"
    requires_logging_directory = False
    library = "wandb"

    def __init__(self, run_name: str, **options: Any) -> None:
        super().__init__()
        self._options = {"project": run_name, **options}
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    def start(self) -> None:
        import wandb

        self.run = wandb.init(**self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log({name: plain(value) for name, value in values.items()}, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Lists of images, each as for ``wandb.Image``."""
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
        """A table of ``columns`` and ``data``, or a DataFrame."""
        import wandb

        self.run.log(
            {table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs
        )

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()
