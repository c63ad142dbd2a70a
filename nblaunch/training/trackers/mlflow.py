"""MLflow, through its own library."""

from __future__ import annotations

from itertools import islice
from typing import Any

from nblaunch.training.trackers.base import GeneralTracker, flat, numbers

# https://mlflow.org/docs/latest/rest-api.html#request-limits: what one request may hold.
_MAX_PARAMS = 100
_MAX_PARAM_LENGTH = 6000


class MLflowTracker(GeneralTracker):
    """A run of ``mlflow``.

    Args:
        experiment_name: the project's name.
        logging_dir: folder or address of the tracking store; None: as MLflow is set up, by MLFLOW_TRACKING_URI
            among others.
        run_id: an existing run to continue; None: a new one.
        tags: of the run.
        nested_run: whether it is part of a run that is active.
        run_name: of the run; None: MLflow makes one up.
        description: of the run.
    """

    name = "mlflow"
    requires_logging_directory = False
    library = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = experiment_name
        self.logging_dir = logging_dir
        self._run_options = {
            "run_id": run_id,
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

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Settings as parameters of the run, texts cut to the length that MLflow takes."""
        import mlflow

        items = iter([(name, str(value)[:_MAX_PARAM_LENGTH]) for name, value in flat(values)])
        while batch := dict(islice(items, _MAX_PARAMS)):
            mlflow.log_params(batch)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers only; MLflow keeps nothing else as metrics."""
        import mlflow

        mlflow.log_metrics(numbers(values), step=step, **kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file with the run."""
        import mlflow

        mlflow.log_artifact(local_path, artifact_path=artifact_path)

    def log_figure(self, figure: Any, artifact_file: str, **kwargs: Any) -> None:
        """Keep a figure with the run."""
        import mlflow

        mlflow.log_figure(figure=figure, artifact_file=artifact_file, **kwargs)

    def finish(self) -> None:
        if self.active_run is None:
            return
        import mlflow

        mlflow.end_run()
