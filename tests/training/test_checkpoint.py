"""Checkpoints: resumed training equals uninterrupted training, bit for bit on two ranks; rejections."""

from __future__ import annotations

import datetime
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import types
import warnings
import zlib
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from nblaunch import (
    Accelerator,
    CheckpointError,
    DataLoaderConfiguration,
    ProjectConfiguration,
    backends,
    context,
    set_seed,
)
from nblaunch.training.checkpoints import files, model_files, save_round
from nblaunch.training.checkpoints.snapshot import CpuCopies, Snapshot
from nblaunch.training.options import GradScalerKwargs
from nblaunch.training.precision import Fp16Precision
from nblaunch.training.trusted_types import trusted_types
from tests.training import ranks

ROWS = 44


class Counter:
    """A user's object that a checkpoint must include."""

    def __init__(self) -> None:
        self.steps = 0
        self.best = np.float64(0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.best = state["steps"], state["best"]


def _dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin(), torch.arange(ROWS))


def _train(
    folder: str,
    save_at: int | None,
    is_resumed: bool,
    options: dict[str, Any],
    mixed_precision: str = "no",
    sampling: dict[str, Any] | None = None,
    skips_by_number: bool = True,
) -> dict[str, Any]:
    """Train for three epochs, or for the rest of them; return seen samples, random numbers and results by step."""
    set_seed(99 if is_resumed else 5, device_specific=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=mixed_precision,
        dataloader_config=DataLoaderConfiguration(**options),
    )
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=7)
    wrapped, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(_dataset(), batch_size=4, **(sampling or {"shuffle": True}))
    )
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if is_resumed:
        random.random(), np.random.rand(), torch.rand(3)
        accelerator.load_state(folder)
    first_epoch, seen_batches = divmod(counter.steps, len(loader))
    steps = []
    for epoch in range(first_epoch, 3):
        is_middle = epoch == first_epoch and seen_batches and "use_stateful_dataloader" not in options
        skipped = seen_batches if skips_by_number else None
        batches = accelerator.skip_first_batches(loader, skipped) if is_middle else loader
        for inputs, targets, index in batches:
            with accelerator.accumulate(wrapped):
                accelerator.backward((wrapped(inputs) - targets).pow(2).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.steps += 1
            steps.append((index.tolist(), random.random(), np.random.rand(), torch.rand(()).item()))
            if save_at is not None and counter.steps >= save_at and accelerator.sync_gradients:
                accelerator.save_state(folder)
                save_at, saved = None, counter.steps
    return {
        "steps": steps,
        "saved": None if is_resumed else saved,
        "best": type(counter.best),
        "weights": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


def _train_in_float64(*arguments: Any) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    return _train(*arguments)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("where", ["in the middle of an epoch", "at the end of an epoch"])
@pytest.mark.parametrize("options", [{}, {"use_seedable_sampler": True}], ids=["generator", "seedable"])
def test_training_continues_exactly(
    tmp_path: Path, world_size: int, where: str, options: dict[str, Any]
) -> None:
    per_epoch = -(-ROWS // (4 * world_size))
    save_at = per_epoch + (2 if where == "in the middle of an epoch" else per_epoch)
    _compare(tmp_path / "state", world_size, save_at, options)


def test_training_continues_on_four_ranks_up_to_rounding(tmp_path: Path) -> None:
    """A new DDP adds the first gradients of four ranks in another order.

    The test uses float64, whose rounding errors are below Adam's epsilon, so gradients of only rounding errors hardly
    change weights.
    """
    _compare(tmp_path / "state", 4, -(-ROWS // 16) + 2, {}, program=_train_in_float64, tolerance=1e-6)


@pytest.mark.parametrize("save_at", [8, 12])
def test_stateful_loaders_continue_exactly_without_skipping(tmp_path: Path, save_at: int) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    _compare(tmp_path / "state", 2, save_at, {"use_stateful_dataloader": True})


def test_training_continues_exactly_after_seen_samples(tmp_path: Path) -> None:
    """The last batches of an epoch are filled up with the same rows from its start."""
    _compare(tmp_path / "state", 2, 8, {}, "no", None, False)


def test_training_continues_exactly_in_bf16(tmp_path: Path) -> None:
    _compare(tmp_path / "state", 2, 8, {}, "bf16")


def test_training_continues_exactly_with_dispatched_batches(tmp_path: Path) -> None:
    _compare(tmp_path / "state", 2, 8, {"dispatch_batches": True})


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(1, {}), (2, {}), (2, {"dispatch_batches": True}), (1, {"use_stateful_dataloader": True})],
)
def test_training_continues_exactly_with_the_global_generator(
    tmp_path: Path, world_size: int, options: dict[str, Any]
) -> None:
    if options.get("use_stateful_dataloader"):
        pytest.importorskip("torchdata.stateful_dataloader")
    sampling = {"sampler": SubsetRandomSampler(range(ROWS))}
    save_at = -(-ROWS // (4 * world_size)) + 2
    _compare(
        tmp_path / "state", world_size, save_at, {"use_seedable_sampler": True, **options}, "no", sampling
    )


def _compare(
    folder: Path, world_size: int, save_at: int, *settings: Any, program: Any = _train, tolerance: float = 0.0
) -> None:
    whole = ranks.run(program, world_size, str(folder), save_at, False, *settings)
    rest = ranks.run(program, world_size, str(folder), None, True, *settings)
    for one, other in zip(whole, rest, strict=True):
        assert 0 < len(other["steps"]) < len(one["steps"])
        assert one["steps"][one["saved"] :] == other["steps"]
        assert one["best"] is other["best"] is np.float64
        for kind in ("weights", "optimizer", "scheduler"):
            _assert_same(one[kind], other[kind], tolerance)


def _assert_same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _assert_same(one[key], other[key], tolerance)
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            _assert_same(a, b, tolerance)
    else:
        assert one == other


class _Unusual(nn.Module):
    """A model with sparse and complex gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=True)
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.table(rows) * self.phase).abs().sum()


def _resume_unusual(folder: str) -> bool:
    accelerator = Accelerator()

    def prepare() -> tuple[Any, Any]:
        model = _Unusual()
        return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(model: Any, optimizer: Any) -> None:
        accelerator.backward(model(torch.tensor([accelerator.process_index, 5])))
        optimizer.step()
        optimizer.zero_grad()

    trained, optimizer = prepare()
    for _ in range(2):  # DDP knows the order of gradients only after its second forward
        step(trained, optimizer)
    accelerator.save_state(folder)
    step(trained, optimizer)
    accelerator.free_memory()
    resumed, optimizer = prepare()
    accelerator.load_state(folder)
    step(resumed, optimizer)
    _assert_same(dict(resumed.state_dict()), dict(trained.state_dict()), 1e-6)
    return True


def test_a_model_with_sparse_and_complex_gradients_continues(tmp_path: Path) -> None:
    assert ranks.run(_resume_unusual, 2, str(tmp_path / "state")) == [True, True]


def _all_files(folder: str) -> list[str]:
    accelerator = Accelerator()
    models = [nn.Linear(1, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    loaders = [DataLoader(range(4)), DataLoader(range(4))]
    accelerator.prepare(*models, *optimizers, *schedulers, *loaders)
    accelerator.register_for_checkpointing(Counter(), Counter())
    return sorted(path.name for path in Path(accelerator.save_state(folder)).iterdir())


def test_files_have_accelerates_names(tmp_path: Path) -> None:
    for found in ranks.run(_all_files, 2, str(tmp_path / "a" / "state")):
        kinds = ("model.safetensors", "optimizer.bin", "sampler.bin", "scheduler.bin")
        firsts = [name for kind in kinds for name in (kind, kind.replace(".", "_1."))]
        assert found == sorted(
            [
                *firsts,
                "custom_checkpoint_0.pkl",
                "custom_checkpoint_1.pkl",
                "nblaunch_checkpoint.json",
                "random_states_0.pkl",
                "random_states_1.pkl",
            ]
        )


# --- a lone process --------------------------------------------------------------------------------------------------


def _prepared(**arguments: Any) -> tuple[Accelerator, nn.Linear, Any]:
    accelerator = Accelerator(**arguments)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def _step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.randn(4, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_scaler_is_saved(tmp_path: Path) -> None:
    accelerator = Accelerator()
    backend = context.current().backend
    # fp16 needs a GPU; its scaler does not.
    accelerator._preparer.precision = Fp16Precision(
        backend, {GradScalerKwargs: GradScalerKwargs(init_scale=8.0)}
    )
    accelerator.save_state(tmp_path / "state")
    accelerator._preparer.precision = Fp16Precision(
        backend, {GradScalerKwargs: GradScalerKwargs(init_scale=2.0)}
    )
    accelerator.load_state(tmp_path / "state")
    assert accelerator.scaler is not None
    assert accelerator.scaler.state_dict()["scale"] == 8.0
    assert (tmp_path / "state" / "scaler.pt").is_file()


def test_torch_format(tmp_path: Path) -> None:
    accelerator, model, optimizer = _prepared()
    accelerator.save_state(tmp_path / "state", safe_serialization=False)
    before = _weights(model)
    _step(accelerator, model, optimizer)
    accelerator.load_state(tmp_path / "state", map_location="on_device")
    _assert_same(_weights(model), before)
    assert (tmp_path / "state" / "pytorch_model.bin").is_file()
    with pytest.raises(TypeError, match=r"map location .*map_location='gpu'.*None, 'cpu' and 'on_device'"):
        accelerator.load_state(tmp_path / "state", map_location="gpu")


def test_foreign_weights_in_the_folder_are_not_loaded(tmp_path: Path) -> None:
    """They stay, because they don't belong to our checkpoint, and are not preferred for their safetensors format."""
    accelerator, model, _ = _prepared()
    others = {name: torch.zeros_like(value) for name, value in _weights(model).items()}
    model_files.write_weights(others, tmp_path / "model.safetensors")
    accelerator.save_state(tmp_path, safe_serialization=False)
    before = _weights(model)
    with torch.no_grad():
        model.weight.fill_(7.0)
    accelerator.load_state(tmp_path)
    _assert_same(_weights(model), before)
    assert (tmp_path / "model.safetensors").is_file()


def test_torch_load_arguments_are_passed_on(tmp_path: Path) -> None:
    accelerator, model, optimizer = _prepared()
    _step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "state")
    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    _step(accelerator, model, optimizer)
    accelerator.load_state(tmp_path / "state", load_kwargs={"mmap": True})
    _assert_same(optimizer.state_dict()["state"][0]["exp_avg"], before)
    _step(accelerator, model, optimizer)


def test_a_checkpoint_replaces_its_files_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    accelerator, model, optimizer = _prepared()
    accelerator.register_for_checkpointing(Counter())
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "notes.txt").write_text("keep")
    accelerator.save_state(folder)
    _step(accelerator, model, optimizer)
    accelerator._checkpoints.registered.clear()
    accelerator.save_state(folder, safe_serialization=False)
    assert sorted(files.files_below(folder)) == [
        "mine/notes.txt",
        "nblaunch_checkpoint.json",
        "optimizer.bin",
        "pytorch_model.bin",
        "random_states_0.pkl",
    ]
    assert (folder / "mine" / "notes.txt").read_text() == "keep"
    accelerator.load_state(folder)


def test_automatic_names_and_their_limit(tmp_path: Path) -> None:
    project = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2, iteration=8)
    accelerator, model, optimizer = _prepared(project_dir=tmp_path, project_config=project)
    assert (accelerator.project_dir, accelerator.logging_dir) == (str(tmp_path), str(tmp_path))
    for number in (8, 9, 10):
        assert accelerator.save_state() == str(tmp_path / "checkpoints" / f"checkpoint_{number}")
        saved = _weights(model)
        _step(accelerator, model, optimizer)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint_10",
        "checkpoint_9",
    ]
    project.iteration = 9
    with pytest.raises(ValueError, match="checkpoint_9"):
        accelerator.save_state()
    accelerator.load_state()
    _assert_same(_weights(model), saved)
    assert accelerator.save_iteration == 11
    # A new checkpoint with a lower number does not count as the oldest.
    project.iteration = 3
    accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint_10",
        "checkpoint_3",
    ]


def test_undeletable_checkpoints_do_not_end_training(tmp_path: Path) -> None:
    project = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=1, iteration=8)
    accelerator, _, _ = _prepared(project_dir=tmp_path, project_config=project)
    accelerator.save_state()
    in_its_way = tmp_path / "checkpoints" / ".checkpoint_8.doomed"
    in_its_way.write_text("")
    with pytest.warns(UserWarning, match="checkpoint_8 exceeds total_limit=1, but could not be removed"):
        accelerator.save_state()
    in_its_way.unlink()
    accelerator.save_state()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_10"]


def test_only_own_checkpoints_are_deleted(tmp_path: Path) -> None:
    """Folders and links with such names that ``save_state`` did not create stay; remains of a killed save are
    removed.
    """
    project = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=1, iteration=8)
    accelerator, _, _ = _prepared(project_dir=tmp_path / "project", project_config=project)
    checkpoints = tmp_path / "project" / "checkpoints"
    moved = tmp_path / "moved"
    accelerator.save_state()
    (checkpoints / "checkpoint_8").rename(moved)
    (checkpoints / "checkpoint_7").symlink_to(moved)
    (checkpoints / ".checkpoint_6.partial").symlink_to(moved)
    for name in ("checkpoint_5", ".mine.partial", ".checkpoint_4.partial", ".checkpoint_3.doomed"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "notes.txt").write_text("keep")
    for _ in range(2):
        accelerator.save_state()
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        ".checkpoint_6.partial",
        ".mine.partial",
        "checkpoint_10",
        "checkpoint_5",
        "checkpoint_7",
    ]
    accelerator.load_state(moved)


def test_projects() -> None:
    with pytest.raises(ValueError, match="total_limit=0 would keep no checkpoint"):
        ProjectConfiguration(total_limit=0)
    with pytest.raises(ValueError, match="iteration=-1 is negative"):
        ProjectConfiguration(iteration=-1)
    with pytest.warns(UserWarning, match=r"project_dir='a' has no effect.*project_dir='b'"):
        assert Accelerator(project_dir="a", project_config=ProjectConfiguration("b")).project_dir == "b"
    shared = ProjectConfiguration()
    assert Accelerator(project_dir="run0", project_config=shared).project_dir == shared.project_dir == "run0"
    with pytest.warns(UserWarning, match=r"project_dir='run1' has no effect"):
        Accelerator(project_dir="run1", project_config=shared)
    accelerator = Accelerator(project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    with pytest.raises(ValueError, match=r"automatic_checkpoint_naming.*project_dir"):
        accelerator.save_state()
    assert ProjectConfiguration("a", logging_dir="logs").logging_dir == "logs"
    assert Accelerator(project_dir="a").project_configuration.logging_dir == "a"


def test_invalid_folders_are_rejected(tmp_path: Path) -> None:
    accelerator = Accelerator()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="save_state needs an output_dir"):
        accelerator.save_state()
    with pytest.raises(ValueError, match="file is a file; a folder is needed"):
        accelerator.save_state(tmp_path / "file")
    with pytest.raises(ValueError, match="load_state needs an input_dir"):
        accelerator.load_state()
    with pytest.raises(ValueError, match="nothing does not exist"):
        accelerator.load_state(tmp_path / "nothing")


def test_folders_may_be_named_from_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    accelerator, model, _ = _prepared()
    saved = _weights(model)
    assert accelerator.save_state("~/state") == str(tmp_path / "state")
    nn.init.zeros_(model.weight)
    accelerator.load_state("~/state")
    _assert_same(_weights(model), saved)


def test_hooks_can_save_models_themselves(tmp_path: Path) -> None:
    accelerator, model, optimizer = _prepared()
    second = accelerator.prepare(nn.Linear(1, 1))

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        assert models == [model, second]
        folder = Path(output_dir) / "first"
        folder.mkdir()
        torch.save(weights.pop(0), folder / "weights.pt")

    def load(models: list[Any], input_dir: str) -> None:
        models.pop(0).load_state_dict(torch.load(Path(input_dir) / "first" / "weights.pt"))

    handle = accelerator.register_save_state_pre_hook(save)
    load_handle = accelerator.register_load_state_pre_hook(load)
    for folder in ("one", "one", "two"):
        accelerator.save_state(tmp_path / folder)
    before = _weights(model), _weights(second)
    _step(accelerator, model, optimizer)
    with torch.no_grad():
        second.weight.add_(1)
    accelerator.load_state(tmp_path / "one")
    _assert_same((_weights(model), _weights(second)), before)
    assert not (tmp_path / "one" / "model_1.safetensors").exists()
    handle.remove()
    load_handle.remove()
    # ``two`` has one file of weights, but without the hook, two models need one each.
    with torch.no_grad():
        model.weight.zero_()
    accelerator._preparer.models[:] = [second, model]
    with pytest.raises(CheckpointError, match=r"model 1.* model_1\.safetensors"):
        accelerator.load_state(tmp_path / "two")


class _Savable(nn.Linear):
    """A model that saves and loads itself, like models of transformers and diffusers."""

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), Path(folder) / "own.pt")

    def load_pretrained(self, folder: str) -> None:
        self.load_state_dict(torch.load(Path(folder) / "own.pt"))


def _models_save_themselves(folder: str) -> bool:
    accelerator, module = Accelerator(), _Savable(4, 2)

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        for model in models:
            weights.pop()
            if accelerator.is_main_process:
                model.save_pretrained(output_dir)

    def load(models: list[Any], input_dir: str) -> None:
        models.pop().load_pretrained(input_dir)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    model = accelerator.prepare(module)
    accelerator.save_state(folder)
    before = _weights(module)
    nn.init.zeros_(module.weight)
    accelerator.load_state(folder)
    _assert_same(_weights(module), before)
    return model is not module and not (Path(folder) / files.SAFE_WEIGHTS_NAME).exists()


def test_hooks_on_several_ranks_get_the_users_own_models(tmp_path: Path) -> None:
    assert ranks.run(_models_save_themselves, 2, str(tmp_path / "state")) == [True, True]


def test_failing_hooks_keep_the_old_checkpoint(tmp_path: Path) -> None:
    accelerator, model, optimizer = _prepared()
    accelerator.save_state(tmp_path / "state")
    before = _weights(model)
    _step(accelerator, model, optimizer)

    def fail(models: Any, weights: Any, output_dir: str) -> None:
        (Path(output_dir) / "half").write_text("half")
        raise ZeroDivisionError("of the hook")

    accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(ZeroDivisionError, match="of the hook"):
        accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    _assert_same(_weights(model), before)
    assert "half" not in str(files.files_below(tmp_path))


def test_registered_objects_are_checked(tmp_path: Path) -> None:
    accelerator = Accelerator()
    with pytest.raises(ValueError, match=r"index 1 \(int\); Item at index 3 \(str\)"):
        accelerator.register_for_checkpointing(Counter(), 1, Counter(), "x")
    accelerator.save_state(tmp_path / "state")
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match="0 registered objects, but 1"):
        accelerator.load_state(tmp_path / "state")


class Settings:
    def __init__(self) -> None:
        self.rate = 0.1


class Config(dict[str, int]):
    pass


class Registered(Counter):
    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_registered_states_may_hold_the_users_classes(tmp_path: Path) -> None:
    accelerator = Accelerator()
    began = datetime.datetime(2026, 1, 2)
    registered = Registered({"path": Path("x"), "began": began, "settings": Settings()})
    torch.serialization.add_safe_globals([Settings])
    accelerator.register_for_checkpointing(registered)
    accelerator.save_state(tmp_path / "state")
    registered.state = {}
    accelerator.load_state(tmp_path / "state")
    assert registered.state["path"] == Path("x")
    assert registered.state["began"] == began
    assert type(registered.state["settings"]) is Settings
    assert registered.state["settings"].rate == 0.1
    assert Settings in torch.serialization.get_safe_globals()


def test_an_untrusted_dict_class_is_not_damage(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(Registered({"config": Config(rate=1)}))
    accelerator.save_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match="weights_only"):
        accelerator.load_state(tmp_path / "state")


def test_classes_of_library_objects_stay_untrusted() -> None:
    trusted = trusted_types(torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 1))
    assert torch.optim.lr_scheduler.LambdaLR not in trusted
    assert Settings in trusted_types(Registered({}))


def test_finding_classes_is_thread_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    main, is_over = types.ModuleType("__main__"), threading.Event()
    vars(main).update({f"name_{number}": number for number in range(20_000)})
    monkeypatch.setitem(sys.modules, "__main__", main)

    def define() -> None:
        while not is_over.is_set():
            vars(main)["name_of_a_thread"] = 0
            del vars(main)["name_of_a_thread"]

    interval, thread = sys.getswitchinterval(), threading.Thread(target=define)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(20):
            assert Settings in trusted_types(Registered({}))
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)


class _Executes:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)

    def __init__(self, path: Path) -> None:
        self.path = path


def test_objects_with_code_load_only_on_request(tmp_path: Path) -> None:
    accelerator = Accelerator()
    registered = Registered({"made": _Executes(tmp_path / "made")})
    accelerator.register_for_checkpointing(registered)
    accelerator.save_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl .*weights_only"):
        accelerator.load_state(tmp_path / "state")
    assert not (tmp_path / "made").exists()
    accelerator.load_state(tmp_path / "state", load_kwargs={"weights_only": False})
    assert (tmp_path / "made").is_dir()


class _Rejects:
    def __reduce__(self) -> tuple[Any, ...]:
        return _reject, ()


def _reject() -> None:
    raise ValueError("Unsupported class of state")


def test_an_unpickled_objects_own_error_is_reported(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(Registered({"made": _Rejects()}))
    accelerator.save_state(tmp_path / "state")
    with pytest.raises(
        CheckpointError, match=r"can't be read; is it damaged\? \(ValueError: Unsupported class of state\)$"
    ):
        accelerator.load_state(tmp_path / "state", load_kwargs={"weights_only": False})


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "sampler.bin"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_truncated_checkpoint_changes_nothing(tmp_path: Path, name: str, damage: str) -> None:
    accelerator, model, optimizer = _prepared()
    accelerator.prepare(DataLoader(range(3)))
    accelerator.save_state(tmp_path / "state")
    _step(accelerator, model, optimizer)
    before = _weights(model)
    path = tmp_path / "state" / name
    size = path.stat().st_size
    if damage == "cut":
        path.write_bytes(path.read_bytes()[: size // 2])
        expected = f"{name} has {size // 2:,} bytes instead of {size:,}"
    else:
        path.unlink()
        expected = f"{name} is missing"
    with pytest.raises(CheckpointError, match=f"checkpoint {tmp_path / 'state'} is damaged: {expected}"):
        accelerator.load_state(tmp_path / "state")
    _assert_same(_weights(model), before)


def test_damaged_or_newer_manifests_are_reported(tmp_path: Path) -> None:
    accelerator, _, _ = _prepared()
    accelerator.save_state(tmp_path / "state")
    manifest = tmp_path / "state" / "nblaunch_checkpoint.json"
    text = manifest.read_text()
    manifest.write_text(text[:30])
    with pytest.raises(CheckpointError, match=r"damaged.* nblaunch_checkpoint\.json"):
        accelerator.load_state(tmp_path / "state")
    manifest.write_text(text.replace('"version": 2', '"version": 3'))
    with pytest.raises(CheckpointError, match=r"newer nblaunch \(format 3.* 2\)"):
        accelerator.load_state(tmp_path / "state")


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_flipped_bit_in_any_file_is_reported_before_anything_changes(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator, model, optimizer = _prepared(project_config=project)
    accelerator.prepare(DataLoader(range(3)), torch.optim.lr_scheduler.StepLR(optimizer, 1))
    accelerator.register_for_checkpointing(Counter())
    accelerator.save_state()
    folder = Path(accelerator.save_state())
    _step(accelerator, model, optimizer)
    before = _weights(model)
    manifest = files.read_manifest(folder)
    assert manifest is not None
    assert manifest.checksums.keys() == manifest.files.keys()
    assert len(manifest.files) == 6
    for name, size in manifest.files.items():
        for bit in (0, 4 * size, 8 * size - 1):
            _flip(folder / name, bit)
            with pytest.raises(CheckpointError, match=f"{name} has the checksum crc32:") as caught:
                accelerator.load_state()
            assert f"Load an older one: load_state('{tmp_path}/checkpoints/checkpoint_0')" in str(
                caught.value
            )
            _flip(folder / name, bit)
    _assert_same(_weights(model), before)
    accelerator.load_state()


def test_a_flipped_bit_in_the_list_of_files_is_reported(tmp_path: Path) -> None:
    accelerator, _, _ = _prepared()
    folder = Path(accelerator.save_state(tmp_path / "state"))
    path = folder / "nblaunch_checkpoint.json"
    for bit in range(0, 8 * path.stat().st_size, 13):
        _flip(path, bit)
        with pytest.raises(
            CheckpointError, match=f"checkpoint {folder} is damaged|was written by a newer nblaunch"
        ):
            files.read_manifest(folder)
        _flip(path, bit)
    files.read_manifest(folder)


def test_checksums_are_divided_among_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BLOCK_BYTES", 7)
    data = bytes(range(100))
    sizes = {"a": 0, "b": 100, "c": 7, "d": 8}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(data[:size])
    manifest = files.Manifest(2, files=sizes, checksums=files.checksums(tmp_path, sizes))
    assert manifest.checksums == {
        name: f"crc32:{zlib.crc32(data[:size]):08x}" for name, size in sizes.items()
    }
    for name in sizes:
        if sizes[name]:
            _flip(tmp_path / name, 0)
    found = ""
    for rank in range(2):
        with pytest.raises(CheckpointError) as caught:
            files.check_files(tmp_path, manifest, rank, 2)
        found += str(caught.value)
    assert [found.count(f" {name} has the checksum") for name in "abcd"] == [0, 1, 1, 1]


def test_checksums_start_threads_only_for_further_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pool also starts threads that manage it, and one of these sleeps for 0.1 s: as long as a small save takes.
    for name in "abc":
        (tmp_path / name).write_bytes(b"1")
    start, started = threading.Thread.start, []

    def noting(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noting)
    assert files.checksums(tmp_path, "") == {}
    assert files.checksums(tmp_path, "a") == {"a": "crc32:83dcefb7"}
    assert not started
    assert list(files.checksums(tmp_path, "abc").values()) == ["crc32:83dcefb7"] * 3
    assert len(started) == 2


def test_misfits_are_reported(tmp_path: Path) -> None:
    accelerator, _, _ = _prepared()
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator.prepare(nn.Linear(3, 5))
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors does not fit the model(.|\n)*size mismatch"
    ):
        accelerator.load_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator.prepare(*(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2)))
    with pytest.raises(CheckpointError, match="has 1 optimizers, but 2 are prepared"):
        accelerator.load_state(tmp_path / "state")


def _other_size(folder: str) -> list[float]:
    accelerator, model, _ = _prepared()
    accelerator.load_state(folder)
    return accelerator.unwrap_model(model).weight.flatten().tolist()


def test_checkpoints_load_on_other_numbers_of_processes(tmp_path: Path) -> None:
    accelerator, model, _ = _prepared()
    accelerator.save_state(tmp_path / "state")
    for weights in ranks.run(_other_size, 2, str(tmp_path / "state")):
        assert weights == model.weight.flatten().tolist()


def test_accelerate_checkpoints_load_if_trusted(tmp_path: Path) -> None:
    """It has the same file names, ``module.`` before every weight, no manifest, and random states in its own format."""
    accelerator, model, _ = _prepared()
    accelerator.save_state(tmp_path / "state", safe_serialization=False)
    before = _weights(model)
    (tmp_path / "state" / "nblaunch_checkpoint.json").unlink()
    torch.save(
        {f"module.{name}": value for name, value in before.items()}, tmp_path / "state" / "pytorch_model.bin"
    )
    states = {
        "step": 3,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(states, tmp_path / "state" / "random_states_0.pkl")
    drawn = random.random(), np.random.rand(), torch.rand(()).item()
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path / "state")
    assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())
    assert accelerator.step == 3
    _assert_same(_weights(model), before)


def _saved_by_the_reference(folder: str) -> list[float]:
    import accelerate

    warnings.simplefilter("ignore")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(_dataset(), batch_size=4, shuffle=True)
    model, optimizer, _, scheduler = accelerator.prepare(
        model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 3)
    )
    _step(accelerator, model, optimizer)
    scheduler.step()
    accelerator.save_state(folder)
    state = optimizer.state_dict()["state"][0]["exp_avg"]
    return [
        *accelerator.unwrap_model(model).weight.flatten().tolist(),
        *state.flatten().tolist(),
        random.random(),
        torch.rand(()).item(),
    ]


def test_accelerate_checkpoints_are_read(tmp_path: Path) -> None:
    (expected,) = ranks.run(_saved_by_the_reference, 1, str(tmp_path / "state"))
    accelerator, model, optimizer = _prepared()
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 3))
    accelerator.load_state(tmp_path / "state")
    state = optimizer.state_dict()["state"][0]["exp_avg"]
    found = [
        *model.weight.flatten().tolist(),
        *state.flatten().tolist(),
        random.random(),
        torch.rand(()).item(),
    ]
    assert found == expected
    accelerator.prepare(DataLoader(_dataset(), batch_size=4))
    with pytest.warns(UserWarning, match=r"loader 0.*first epoch"):
        accelerator.load_state(tmp_path / "state")


def test_saving_in_a_window_warns(tmp_path: Path) -> None:
    accelerator, model, _ = _prepared(gradient_accumulation_steps=3)
    with accelerator.accumulate(model):
        pass
    with pytest.warns(UserWarning, match=r"gradient accumulation \(micro-step 1 of 3 for Linear\)"):
        accelerator.save_state(tmp_path / "state")


# --- saving that fails -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with two thirds of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=680k", "tmpfs", folder], capture_output=True)
    if mount.returncode:
        pytest.skip(f"can't mount: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("safe_serialization", [False, True])
def test_a_full_disk_leaves_the_old_checkpoint(
    small_disk: Path, asynchronous: bool, safe_serialization: bool
) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(
        nn.Linear(300, 200)
    )  # 240 kB: two of them fit beside the small files, but not three
    accelerator.save_state(small_disk / "a", safe_serialization)
    before = _weights(model)
    with torch.no_grad():
        model.weight.zero_()
    bulk = small_disk / "bulk"
    bulk.write_bytes(bytes(200_000))
    reason = (
        r"checkpoint .*/a was not saved; nothing was changed. Rank 0: .*(No space left|enforce fail|write)"
    )
    save = accelerator.save_state if not asynchronous else accelerator.wait_for_checkpoint
    arguments = (small_disk / "a", safe_serialization)
    if asynchronous:
        accelerator.save_state(*arguments, asynchronous=True)
        arguments = ()
    with pytest.raises(CheckpointError, match=reason):
        save(*arguments)
    assert sorted(path.name for path in small_disk.iterdir()) == ["a", "bulk"]
    accelerator.load_state(small_disk / "a")
    _assert_same(_weights(model), before)
    bulk.unlink()
    accelerator.save_state(small_disk / "a", safe_serialization)


def _fail_on_one_rank(folder: str, culprit: int) -> str:
    accelerator, _, _ = _prepared()
    accelerator.save_state(folder)

    def hook(*_: Any) -> None:
        if accelerator.process_index == culprit:
            raise OSError("the hook's own")

    accelerator.register_save_state_pre_hook(hook)
    with pytest.raises((OSError, CheckpointError)) as caught:
        accelerator.save_state(folder)
    accelerator.load_state(folder)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_on_one_rank_reaches_all(tmp_path: Path, culprit: int) -> None:
    messages = ranks.run(_fail_on_one_rank, 3, str(tmp_path / "state"), culprit)
    assert messages.pop(culprit) == "OSError: the hook's own"
    for message in messages:
        assert message.startswith(f"CheckpointError: checkpoint {tmp_path / 'state'} was not saved")
        assert f"Rank {culprit}: OSError: the hook's own" in message


def _rejected_everywhere(folder: str) -> str:
    accelerator = Accelerator()
    with pytest.raises(ValueError) as caught:
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    return str(caught.value)


def test_all_ranks_reject_an_invalid_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert set(ranks.run(_rejected_everywhere, 2, str(tmp_path / "file"))) == {
        f"{tmp_path / 'file'} is a file; a folder is needed"
    }


# --- on the main process alone ---------------------------------------------------------------------------------------


def _save_on_main(folder: str) -> list[str]:
    accelerator, model, optimizer = _prepared()
    found = []
    for number in range(2):
        _step(accelerator, model, optimizer)
        if accelerator.is_main_process:
            if number == 0:
                with pytest.warns(UserWarning, match=r"save_state .*main process"):
                    accelerator.save_state(f"{folder}_{number}")
            else:
                accelerator.save_state(f"{folder}_{number}")
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        with pytest.warns(UserWarning, match=r"random states for rank 1.* rank 0"):
            accelerator.load_state(f"{folder}_1")
    else:
        accelerator.load_state(f"{folder}_1")
        found = sorted(path.name for path in Path(f"{folder}_1").glob("random*"))
    accelerator.save_state(f"{folder}_all")
    return found or sorted(path.name for path in Path(f"{folder}_all").glob("random*"))


def test_the_main_process_may_save_alone(tmp_path: Path) -> None:
    """Many scripts do so; a collective would wait for ranks that wait for gradients."""
    assert ranks.run(_save_on_main, 2, str(tmp_path / "state")) == [
        ["random_states_0.pkl"],
        ["random_states_0.pkl", "random_states_1.pkl"],
    ]


# --- aside of training -----------------------------------------------------------------------------------------------


def test_asynchronous_checkpoints_are_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer = _prepared()
    _step(accelerator, model, optimizer)
    may_write = threading.Event()
    write = Snapshot.write

    def late(snapshot: Any, folder: Path) -> Any:
        assert may_write.wait(180)
        return write(snapshot, folder)

    monkeypatch.setattr(Snapshot, "write", late)
    before = _weights(model), json.dumps(optimizer.state_dict(), default=lambda x: x.tolist())
    accelerator.save_state(tmp_path / "state", asynchronous=True)
    drawn = torch.rand(3)
    for _ in range(3):
        _step(accelerator, model, optimizer)
    with pytest.raises(TypeError, match="map location"):  # the failure needs no wait
        accelerator.load_state(tmp_path / "state", map_location="gpu")
    assert not (tmp_path / "state").exists()
    may_write.set()
    accelerator.load_state(tmp_path / "state")
    _assert_same(before, (_weights(model), json.dumps(optimizer.state_dict(), default=lambda x: x.tolist())))
    assert torch.equal(drawn, torch.rand(3))


def test_an_asynchronous_checkpoint_keeps_tied_weights_tied(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    accelerator.prepare(model)
    accelerator.save_state(tmp_path / "state", asynchronous=True)
    accelerator.end_training()
    before = _weights(model)
    with torch.no_grad():
        model[0].weight.zero_()
    accelerator.load_state(tmp_path / "state")
    _assert_same(_weights(model), before)
    assert model[1].weight is model[0].weight


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sequential_schedulers_continue(tmp_path: Path, asynchronous: bool) -> None:
    accelerator, _, optimizer = _prepared()
    parts = [LinearLR(optimizer, total_iters=2), MultiStepLR(optimizer, [1, 2])]
    scheduler = accelerator.prepare(SequentialLR(optimizer, parts, [2]))
    accelerator.save_state(tmp_path / "state", asynchronous=asynchronous)
    rates: list[list[list[float]]] = [[], []]
    for seen in rates:
        accelerator.load_state(tmp_path / "state")
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            seen.append(scheduler.get_last_lr())
    assert rates[0] == rates[1]
    assert rates[0][-1] == pytest.approx([0.001])


def test_copies_keep_the_kinds_of_dicts() -> None:
    state = defaultdict(list, a=OrderedDict(x=torch.ones(1)), b=UserDict(x=torch.ones(1)))
    copies = CpuCopies().take(state)
    assert copies["none"] == []
    assert type(copies["a"]) is OrderedDict
    assert "none" not in state
    for key in "ab":
        assert copies[key]["x"] is not state[key]["x"]
        assert torch.equal(copies[key]["x"], state[key]["x"])


def _asynchronously(folder: str) -> tuple[list[str], str]:
    accelerator, model, optimizer = _prepared()
    for number in range(3):
        _step(accelerator, model, optimizer)
        accelerator.save_state(f"{folder}_{number}", asynchronous=True)
    accelerator.wait_for_checkpoint()
    found = sorted(path.name for path in Path(f"{folder}_2").iterdir())
    shutil.copy(f"{folder}_2/optimizer.bin", f"{folder}_file") if accelerator.is_main_process else None
    accelerator.wait_for_everyone()
    original = model_files.write_weights
    model_files.write_weights = _raise  # type: ignore[assignment]
    accelerator.save_state(f"{folder}_3", asynchronous=True)
    with pytest.raises(CheckpointError) as caught:
        accelerator.end_training()
    model_files.write_weights = original
    return found, str(caught.value)


def _raise(*_: Any) -> None:
    raise OSError("no room")


def test_asynchronous_checkpoints_on_ranks(tmp_path: Path) -> None:
    for found, message in ranks.run(_asynchronously, 2, str(tmp_path / "state")):
        assert {"model.safetensors", "random_states_0.pkl", "random_states_1.pkl"} <= set(found)
        assert "state_3 was not saved; nothing was changed. Rank 0: OSError: no room" in message
    assert not (tmp_path / "state_3").exists()


def _behind_a_failure(folder: str) -> str:
    accelerator, _, _ = _prepared()
    model_files.write_weights = _raise  # type: ignore[assignment]
    arrive = save_round.Participant.arrive

    def arrive_late(self: save_round.Participant) -> save_round.Round:
        round = arrive(self)
        while self.failure_of(round.number) is None:
            time.sleep(0.01)
        return round

    save_round.Participant.arrive = arrive_late  # type: ignore[method-assign]
    accelerator.save_state(folder, asynchronous=True)
    with pytest.raises(CheckpointError) as caught:
        accelerator.wait_for_checkpoint()
    return str(caught.value)


def test_late_ranks_raise_the_error_of_rank_0_when_they_wait(tmp_path: Path) -> None:
    first, late = ranks.run(_behind_a_failure, 2, str(tmp_path / "state"))
    assert first == late
    assert "Rank 0: OSError: no room" in late


def test_an_asynchronous_failure_is_reported_to_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted: list[Any] = []
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu"), emit=emitted.append))
    accelerator, _, _ = _prepared()
    monkeypatch.setattr(model_files, "write_weights", _raise)
    accelerator.save_state(tmp_path / "state", asynchronous=True)
    with pytest.raises(CheckpointError, match="no room"):
        accelerator.save_state(tmp_path / "other")
    assert [note.text for note in emitted] == [
        f"checkpoint {tmp_path / 'state'} was not saved; nothing was changed. Rank 0: OSError: no room"
    ]
    accelerator.wait_for_checkpoint()


def test_numpy_values_load_before_all_of_numpy_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In NumPy 1.26, ``numpy._core`` has no attribute ``multiarray`` until that is imported."""
    values = {"array": np.arange(3.0), "number": np.float32(0.5)}
    torch.save(values, tmp_path / "state.bin")
    monkeypatch.delattr(np._core, "multiarray")
    read = files.read_object(tmp_path / "state.bin")
    assert (read["array"] == values["array"]).all()
    assert read["number"] == values["number"]
