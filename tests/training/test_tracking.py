"""Trackers: their selection, their calls, and the metrics that reach the launcher."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.machinery
import json
import pickle
import shlex
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nblaunch import Accelerator, ProjectConfiguration, backends, context
from nblaunch.events import Event, Metric, RunTracked
from nblaunch.training import tracking
from nblaunch.training.trackers import (
    GeneralTracker,
    JsonlTracker,
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
    on_main_process,
)
from nblaunch.training.tracking import LoggerType, register_tracker_class
from tests.training import ranks


class Notebook(GeneralTracker):
    """A tracker that records the calls of its methods."""

    name = "notebook"
    requires_logging_directory = False

    def __init__(self, run_name: str = "own", **options: Any) -> None:
        super().__init__()
        self.calls: list[Any] = [("init", run_name, options)]

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", dict(values)))
        values.clear()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((values, step, kwargs))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.fixture
def emitted() -> list[Event]:
    """Collect the events that this process sends to its launcher."""
    events: list[Event] = []
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu"), emit=events.append))
    return events


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", dict(tracking.LOGGER_TYPE_TO_CLASS))


# --- choosing --------------------------------------------------------------------------------------------------------


def test_trackers_can_be_names_classes_or_instances(tmp_path: Path) -> None:
    register_tracker_class(Notebook)
    own = Notebook()
    chosen = Accelerator(
        log_with=["JSONL", LoggerType.TENSORBOARD, "notebook", own, own, "jsonl"], project_dir=tmp_path
    ).log_with
    assert chosen == [JsonlTracker, TensorBoardTracker, Notebook, own]
    assert Accelerator(log_with=Notebook).log_with == [Notebook]
    assert Accelerator().log_with == []


def test_all_selects_usable_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "is_installed", lambda name: name in ("tensorboard", "wandb"))
    assert Accelerator(log_with="all", project_dir=tmp_path).log_with == [
        JsonlTracker,
        TensorBoardTracker,
        WandBTracker,
    ]
    assert Accelerator(log_with="all").log_with == [WandBTracker]


def test_uninstalled_trackers_are_skipped_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "is_installed", lambda name: False)
    with pytest.warns(UserWarning, match=r"'wandb' \(pip install wandb\)"):
        assert Accelerator(log_with=["wandb", "jsonl"], project_dir=tmp_path).log_with == [JsonlTracker]


def test_unknown_trackers_and_missing_folders_are_reported() -> None:
    with pytest.raises(ValueError, match=r"log_with='aim'.*'all', .*'jsonl', 'mlflow', "):
        Accelerator(log_with="aim")
    with pytest.raises(ValueError, match="log_with=3 is unknown"):
        Accelerator(log_with=[3])
    with pytest.raises(ValueError, match=r"log_with='jsonl' .*Accelerator\(project_dir="):
        Accelerator(log_with="jsonl")


def test_trackers_can_be_registered() -> None:
    with pytest.raises(ValueError, match="is not a subclass of GeneralTracker"):
        register_tracker_class(int)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tracker class Nameless has no name"):
        register_tracker_class(type("Nameless", (GeneralTracker,), {}))
    register_tracker_class(Notebook)
    register_tracker_class(Notebook)
    with pytest.warns(UserWarning, match=r"tracker 'notebook' .*Notebook.* Other"):
        register_tracker_class(type("Other", (Notebook,), {}))


def test_incomplete_trackers_are_rejected() -> None:
    class Poor(GeneralTracker):
        name = "poor"

    with pytest.raises(NotImplementedError, match="Poor needs requires_logging_directory, tracker"):
        Poor()


def test_a_tracker_may_set_its_attributes_itself() -> None:
    class Own(GeneralTracker):
        def __init__(self) -> None:
            self.name, self.requires_logging_directory, self.tracker = "own", False, []
            super().__init__()

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.tracker.append((values, step))

    accelerator = Accelerator(log_with=Own())
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1}, step=2)
    assert accelerator.get_tracker("own", unwrap=True) == [({"loss": 1}, 2)]


def test_trackers_may_be_decorated() -> None:
    from nblaunch.tracking import GeneralTracker, on_main_process

    class Decorated(GeneralTracker):
        name, requires_logging_directory, tracker = "decorated", False, None

        @on_main_process
        def __init__(self) -> None:
            super().__init__()
            self.logged: list[Any] = []

        @on_main_process
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.logged.append((values, step))

    accelerator = Accelerator(log_with=Decorated())
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1}, step=2)
    assert accelerator.get_tracker("decorated").logged == [({"loss": 1}, 2)]


# --- logging ---------------------------------------------------------------------------------------------------------


def test_trackers_receive_settings_and_values() -> None:
    register_tracker_class(Notebook)
    accelerator = Accelerator(log_with="notebook")
    with pytest.raises(ValueError, match=r"tracker 'notebook'.*init_trackers"):
        accelerator.get_tracker("notebook")
    config = {"lr": 0.1}
    accelerator.init_trackers("project", config, {"notebook": {"tags": 1}, "other": {"x": 1}})
    tracker = accelerator.get_tracker("notebook")
    assert accelerator.trackers == [tracker]
    assert accelerator.get_tracker("notebook", unwrap=True) is tracker.calls
    accelerator.log({"loss": 1}, step=3, log_kwargs={"notebook": {"commit": True}})
    with pytest.raises(ValueError, match=r"no tracker 'x'.*starts notebook"):
        accelerator.get_tracker("x")
    accelerator.end_training()
    accelerator.end_training()
    assert config == {"lr": 0.1}
    assert tracker.calls == [
        ("init", "project", {"tags": 1}),
        "start",
        ("config", {"lr": 0.1}),
        ({"loss": 1}, 3, {"commit": True}),
        "finish",
    ]


def test_notebook_trackers_start_in_a_worker_at_first_use() -> None:
    started = Accelerator(log_with=Notebook)
    started.init_trackers("project", {"lr": 1})
    copies = [pickle.loads(pickle.dumps(started)) for _ in range(3)]
    copies[0].log({"loss": 1})
    assert copies[0].trackers[0].calls[:3] == [("init", "project", {}), "start", ("config", {"lr": 1})]
    copies[1].init_trackers("own")
    assert [tracker.calls[0] for tracker in copies[1].trackers] == [("init", "own", {})]
    copies[2].end_training()
    started.end_training()
    assert [copies[2].trackers, pickle.loads(pickle.dumps(started)).trackers] == [[], []]


def test_all_trackers_are_ended_if_one_fails() -> None:
    class Failing(Notebook):
        def finish(self) -> None:
            raise OSError("the disk is full")

    first, second = Failing(), Notebook()
    accelerator = Accelerator(log_with=[first, second])
    accelerator.init_trackers("project")
    with pytest.raises(OSError, match="the disk is full"):
        accelerator.end_training()
    assert second.calls[-1] == "finish"


def test_the_launcher_receives_numbers_and_short_texts(emitted: list[Event]) -> None:
    values = {
        "loss": torch.tensor([0.5], requires_grad=True),
        "of": {"train": {"loss": 2}, "is": True},
        "text": "x" * 500,
        "none": None,
    }
    Accelerator().log(values, step=4)
    (metric,) = emitted
    assert isinstance(metric, Metric)
    assert (metric.rank, metric.step) == (0, 4)
    assert metric.values == {"loss": 0.5, "of/train/loss": 2, "of/is": True, "text": "x" * 200}
    assert type(metric.values["loss"]) is float


class Everywhere(Notebook):
    name = "everywhere"
    main_process_only = False


class Guarded(Notebook):
    name = "guarded"

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        super().log(values, step, **kwargs)


def _on_ranks() -> dict[str, Any]:
    sent: list[Event] = []
    context.current().emit = sent.append
    guarded = Guarded()
    accelerator = Accelerator(log_with=[Notebook, Everywhere])
    accelerator.init_trackers("project")
    accelerator.log({"rank": accelerator.process_index})
    blank = accelerator.get_tracker("notebook")
    blank.log({"x": 1})
    guarded.log({"x": 1})
    names = [tracker.name for tracker in accelerator.trackers]
    accelerator.end_training()
    return {"names": names, "sent": [event.values for event in sent], "guarded": len(guarded.calls)}


def test_trackers_run_on_the_main_process_by_default() -> None:
    main, other = ranks.run(_on_ranks, 2)
    assert main == {"names": ["notebook", "everywhere"], "sent": [{"rank": 0}], "guarded": 2}
    assert other == {"names": ["everywhere"], "sent": [], "guarded": 1}


# --- those that come along -------------------------------------------------------------------------------------------


def test_jsonl(tmp_path: Path) -> None:
    for _run in range(2):  # a resumed run continues in the same file
        accelerator = Accelerator(
            log_with="jsonl", project_config=ProjectConfiguration(logging_dir=str(tmp_path))
        )
        accelerator.init_trackers("project", {"lr": 0.1, "path": tmp_path, "nan": float("nan")})
        accelerator.log(
            {"loss": torch.tensor(0.5), "of": {"inf": float("inf")}, "who": [1, Path("x")]}, step=1
        )
        path = tmp_path / "project" / "metrics.jsonl"
        assert path.read_text().endswith("\n"), "what was logged is there at once"
        accelerator.end_training()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.pop("time_s") > 1e9 for row in rows] == [True, True]
    assert rows == [{"step": 1, "loss": 0.5, "of/inf": None, "who": [1, "x"]}] * 2
    config = json.loads((tmp_path / "project" / "config.json").read_text())
    assert config == {"lr": 0.1, "path": str(tmp_path), "nan": None}


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers(
        "project", {"lr": 0.1, "layers": [1, 2], "scale": torch.tensor(2.0), "grids": [{(1, 2): "a"}]}
    )
    accelerator.log(
        {"loss": torch.tensor(0.5), "note": "hello", "both": {"a": 1, "b": torch.tensor(2)}}, step=7
    )
    tracker = accelerator.get_tracker("tensorboard")
    tracker.log_images({"pictures": torch.zeros(1, 3, 4, 4)}, step=1)
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    assert type(writer).__name__ == "SummaryWriter"
    accelerator.end_training()
    found = EventAccumulator(str(tmp_path / "project"))
    found.Reload()
    (event,) = found.Scalars("loss")
    assert (event.step, event.value) == (7, 0.5)
    assert found.Tags()["tensors"] == ["note/text_summary"]
    assert found.Tags()["images"] == ["pictures"]
    assert (tmp_path / "project" / "both_b").is_dir()
    stored = json.loads((tmp_path / "project" / "hparams.yml").read_text())
    assert (stored["lr"], stored["grids"]) == (0.1, [{"(1, 2)": "a"}])


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    sizes: tuple[int, ...] = (1, 2)
    inner: Any = dataclasses.field(default_factory=lambda: argparse.Namespace(depth=2))


@pytest.mark.parametrize(
    "config",
    [
        Settings(),
        argparse.Namespace(**vars(Settings())),
        types.SimpleNamespace(**vars(Settings())),
        vars(Settings()),
        list(vars(Settings()).items()),
    ],
)
def test_settings_can_be_any_container(config: Any, tmp_path: Path, calls: list[Any]) -> None:
    """This covers each tracker, through ``init_trackers`` and through a direct call of its method."""
    own = Notebook()
    names = ["tensorboard", "jsonl", "wandb", "mlflow"]
    accelerator = Accelerator(log_with=[own, *names], project_dir=tmp_path)
    accelerator.init_trackers("project", config)
    expected = {"lr": 0.1, "sizes": (1, 2), "inner": {"depth": 2}}
    assert ("config", expected) in own.calls
    as_json = {**expected, "sizes": [1, 2]}
    flat = {"lr": "0.1", "sizes": "(1, 2)", "inner/depth": "2"}
    for _ in range(2):
        assert json.loads((tmp_path / "project" / "config.json").read_text()) == as_json
        assert json.loads((tmp_path / "project" / "hparams.yml").read_text()) == as_json
        assert [args for path, args, _ in calls if path.endswith("config.update")] == [(expected,)]
        assert [args for path, args, _ in calls if path.endswith("log_params")] == [(flat,)]
        calls.clear()
        for name in names:
            accelerator.get_tracker(name).store_init_configuration(config)
    accelerator.end_training()


def test_non_text_settings_are_converted(tmp_path: Path, calls: list[Any]) -> None:
    accelerator = Accelerator(log_with="all", project_dir=tmp_path)
    accelerator.init_trackers("project", {0: 0.1, (1, 2): {3: "x"}})
    accelerator.log({4: 0.5, "of": {5: 1}}, step=1)
    accelerator.end_training()
    expected = {"0": 0.1, "(1, 2)": {"3": "x"}}
    assert json.loads((tmp_path / "project" / "config.json").read_text()) == expected
    assert json.loads((tmp_path / "project" / "hparams.yml").read_text()) == expected
    assert json.loads((tmp_path / "project" / "metrics.jsonl").read_text())["4"] == 0.5


def test_settings_without_names_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"must be a mapping, a dataclass, .* of type list: \[0\.1, 3\]"):
        Accelerator(log_with=Notebook()).init_trackers("project", [0.1, 3])


def test_a_non_numeric_step_warns_and_keeps_its_text(emitted: list[Event]) -> None:
    accelerator = Accelerator()
    accelerator.log({"loss": 0.5}, step=torch.tensor([3]))
    with pytest.warns(UserWarning, match="step='epoch 1'.*not a number"):
        accelerator.log({"loss": 0.5}, step="epoch 1")
    for step in ("epoch 2", float("nan"), [4], 2.5, None):  # one warning is enough
        accelerator.log({"loss": 0.5}, step=step)
    steps = [metric.step for metric in emitted if isinstance(metric, Metric)]
    assert steps == [3, "epoch 1", "epoch 2", "nan", "[4]", 2.5, None]


def test_values_that_nothing_records_warn_once(emitted: list[Event]) -> None:
    accelerator = Accelerator()
    with pytest.warns(UserWarning, match=r"ignores 'lr' \(list\), 'eval/confusion' \(Tensor\)"):
        accelerator.log({"loss": 0.5, "lr": [0.1], "eval": {"confusion": torch.ones(2, 2)}, "epoch": None})
    accelerator.log({"loss": 0.25, "lr": [0.1]})
    assert [metric.values for metric in emitted if isinstance(metric, Metric)] == [
        {"loss": 0.5},
        {"loss": 0.25},
    ]


def test_a_tracker_receives_values_that_the_display_lacks(emitted: list[Event], calls: list[Any]) -> None:
    accelerator = Accelerator(log_with=Notebook())
    accelerator.init_trackers("project")
    accelerator.log({"loss": 0.5, "lr": [0.1]})
    assert [metric.values for metric in emitted if isinstance(metric, Metric)] == [{"loss": 0.5}]


class Recorder(types.ModuleType):
    """A module that records every call below it, as a stub for a library that reports to a server."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self._path, self._calls = name, calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self._path}.{name}", self._calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append((self._path, args, kwargs))
        return Recorder(f"{self._path}()", self._calls)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace wandb and mlflow by stubs; return their calls."""
    found: list[Any] = []
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, Recorder(name, found))
    return found


def test_wandb(calls: list[Any]) -> None:
    accelerator = Accelerator(log_with="wandb")
    assert calls == []
    accelerator.init_trackers("project", {"lr": 0.1}, {"wandb": {"tags": ["a"]}})
    accelerator.log(
        {"loss": torch.tensor(0.5), "table": "kept"}, step=3, log_kwargs={"wandb": {"commit": True}}
    )
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images({"pictures": ["image"]}, step=1, caption="c")
    tracker.log_table("name", ["column"], [[1]], step=2)
    accelerator.end_training()
    assert [(path, args, kwargs) for path, args, kwargs in calls if "log" not in path] == [
        ("wandb.init", (), {"project": "project", "tags": ["a"]}),
        ("wandb.init().config.update", ({"lr": 0.1},), {"allow_val_change": True}),
        ("wandb.Image", ("image",), {"caption": "c"}),
        ("wandb.Table", (), {"columns": ["column"], "data": [[1]], "dataframe": None}),
        ("wandb.init().finish", (), {}),
    ]
    logged = [(args, kwargs) for path, args, kwargs in calls if path == "wandb.init().log"]
    assert logged[0] == (({"loss": 0.5, "table": "kept"},), {"step": 3, "commit": True})
    assert [kwargs["step"] for _, kwargs in logged] == [3, 1, 2]


def test_mlflow_is_set_up_by_environment_variables_first(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    MLflowTracker("project", tags='{"of": "call"}').start()
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "other")
    monkeypatch.setenv("MLFLOW_TAGS", '{"of": "environment"}')
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
    MLflowTracker("project", tags={"of": "call"}).start()
    monkeypatch.setenv("MLFLOW_RUN_ID", "known")
    MLflowTracker("project").start()  # a run belongs only to its experiment
    assert [args for path, args, _ in calls if path == "mlflow.set_experiment"] == [("project",), ("other",)]
    options = [kwargs for path, _, kwargs in calls if path == "mlflow.start_run"]
    assert [each["tags"] for each in options] == [{"of": "call"}, *[{"of": "environment"}] * 2]
    assert [each["nested"] for each in options] == [False, True, True]
    assert [each["run_id"] for each in options] == [None, None, "known"]
    monkeypatch.setenv("MLFLOW_TAGS", "of=environment")
    with pytest.raises(ValueError, match="MLFLOW_TAGS"):
        MLflowTracker("project")
    monkeypatch.delenv("MLFLOW_TAGS")
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "perhaps")
    with pytest.raises(ValueError, match=r"MLFLOW_NESTED_RUN must be true or false.*perhaps"):
        MLflowTracker("project")


def test_mlflow(calls: list[Any]) -> None:
    accelerator = Accelerator(log_with="mlflow")
    settings = {f"setting {i}": "x" * 7000 if i == 0 else i for i in range(150)}
    accelerator.init_trackers("project", settings, {"mlflow": {"logging_dir": "store", "run_name": "r"}})
    accelerator.log({"loss": torch.tensor(0.5), "text": "left out", "of": {"a": 1}}, step=3)
    tracker = accelerator.get_tracker("mlflow")
    assert isinstance(tracker, MLflowTracker)
    tracker.log_artifact("file")
    tracker.log_figure("figure", "figure.png")
    accelerator.end_training()
    calls = [call for call in calls if "get_tracking_uri" not in call[0]]  # for the location of the run
    assert [path for path, _, _ in calls] == [
        "mlflow.set_tracking_uri",
        "mlflow.set_experiment",
        "mlflow.start_run",
        "mlflow.log_params",
        "mlflow.log_params",
        "mlflow.log_metrics",
        "mlflow.log_artifact",
        "mlflow.log_figure",
        "mlflow.end_run",
    ]
    assert calls[2][2]["run_name"] == "r"
    assert [len(args[0]) for path, args, _ in calls if path == "mlflow.log_params"] == [100, 50]
    assert len(calls[3][1][0]["setting 0"]) == 6000
    assert calls[5][1:] == (({"loss": 0.5, "of/a": 1},), {"step": 3})


def test_the_location_of_a_run_is_reported(tmp_path: Path, emitted: list[Event]) -> None:
    class Silent(GeneralTracker):
        name, requires_logging_directory, tracker = "silent", False, None

    class Broken(Silent):
        name = "broken"

        def location(self) -> str:
            raise ConnectionError("no answer")

    accelerator = Accelerator(log_with=["tensorboard", Silent(), Broken()], project_dir=tmp_path)
    accelerator.init_trackers("my run")
    accelerator.end_training()
    (seen,) = (event for event in emitted if isinstance(event, RunTracked))
    assert seen.tracker == "tensorboard"
    assert shlex.split(seen.location) == ["tensorboard", "--logdir", str(tmp_path / "my run")]


@pytest.mark.parametrize(
    ("url", "folder", "shown"),
    [
        ("https://wandb.example/run", "offline-run-1", ["https://wandb.example/run"]),
        ("", "offline-run-1", ["wandb", "sync", "{}/offline-run-1"]),
        (None, "run-1", ["{}/run-1/files"]),
    ],
)
def test_wandb_runs_have_a_link_or_a_sync_command(
    tmp_path: Path,
    emitted: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    url: str | None,
    folder: str,
    shown: list[str],
) -> None:
    run = mock.MagicMock(url=url, dir=str(tmp_path / folder / "files"))
    library = mock.MagicMock(init=mock.MagicMock(return_value=run))
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setattr(tracking, "is_installed", lambda _: True)
    accelerator = Accelerator(log_with="wandb")
    accelerator.init_trackers("demo")
    accelerator.end_training()
    (seen,) = (event for event in emitted if isinstance(event, RunTracked))
    assert shlex.split(seen.location) == [part.format(tmp_path) for part in shown]
