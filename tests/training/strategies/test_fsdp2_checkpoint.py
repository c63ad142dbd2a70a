"""Checkpoints of sharded models: in shards or full, for any number of ranks, never half-written."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.utils.data import DataLoader

from nblaunch import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    load_checkpoint_in_model,
    notebook_launcher,
    utils,
)
from nblaunch.errors import CheckpointError
from nblaunch.training.checkpoints import files
from nblaunch.training.checkpoints.snapshot import Snapshot
from nblaunch.training.collectives import dtensor
from nblaunch.training.strategies import shard_files
from tests.thorough import thorough
from tests.training import ranks
from tests.training.strategies.test_fsdp2 import GLOBAL_BATCH, Tied, data, epoch, network

SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def _prepare(kind: str | None) -> tuple[Accelerator, Any, Any, Any]:
    plugin = None if kind is None else FullyShardedDataParallelPlugin(state_dict_type=kind)
    accelerator = Accelerator(fsdp_plugin=plugin, split_batches=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(data(), batch_size=GLOBAL_BATCH)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def _save(kind: str | None, folder: str) -> list[float]:
    """Save after one epoch; return the results of the second one."""
    accelerator, *rest = _prepare(kind)
    epoch(accelerator, *rest)
    accelerator.save_state(folder)
    return epoch(accelerator, *rest)


def _resume(kind: str | None, folder: str) -> list[float]:
    accelerator, *rest = _prepare(kind)
    accelerator.load_state(folder)
    for parameter in rest[0].parameters():
        dtensor.local(parameter).sum().item()
    return epoch(accelerator, *rest)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        *((SHARDED, 2, 1), (SHARDED, 1, 2), (FULL, 2, 1)),
        *(thorough(SHARDED, 4, 2), thorough(SHARDED, 2, 4), thorough(FULL, 4, 2), thorough(FULL, 1, 2)),
    ],
)
def test_training_continues_on_another_number_of_ranks(
    tmp_path: Path, kind: str, before: int, after: int
) -> None:
    """Other tests use the same number: those of interrupted saves below, and those of unsharded models."""
    going_on = ranks.run(_save, before, kind, str(tmp_path / "state"))
    for resumed in ranks.run(_resume, after, kind, str(tmp_path / "state")):
        assert resumed == pytest.approx(going_on[0], rel=1e-3, abs=1e-3)


class _Partly(nn.Module):
    """Two layers, the second of which some forwards don't use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        return self.second(self.first(x)) if uses_all else self.first(x)


class _PartlyTrained:
    """A sharded model with a layer that a step may leave without gradients, and its two kinds of checkpoints."""

    def __init__(self, kind: str, one_by_one: bool) -> None:
        self.plugin = FullyShardedDataParallelPlugin(state_dict_type=kind)
        self.accelerator = Accelerator(fsdp_plugin=self.plugin)
        module = _Partly()
        self.model, self.optimizer = self.accelerator.prepare(
            module, torch.optim.AdamW(module.parameters(), lr=0.1)
        )
        self.one_by_one = one_by_one

    def step(self, uses_all: bool) -> None:
        """Step without clearing gradients."""
        self.optimizer.zero_grad()
        self.accelerator.backward(self.model(torch.ones(2, 6), uses_all).pow(2).sum())
        self.optimizer.step()

    def save(self, folder: str) -> None:
        if self.one_by_one:
            utils.save_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, folder)
        else:
            self.accelerator.save_state(folder)

    def load(self, folder: str) -> dict[int, Any]:
        """Return the states by the numbers of parameters."""
        if self.one_by_one:
            utils.load_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, folder)
        else:
            self.accelerator.load_state(folder)
        return self.states()

    def states(self) -> dict[int, Any]:
        full = dtensor.gather(self.optimizer.state_dict()["state"], True)
        return {
            number: {name: value.tolist() for name, value in state.items()} for number, state in full.items()
        }


def _train_partly_then_all(folder: str, kind: str, one_by_one: bool) -> tuple[dict[int, Any], ...]:
    training = _PartlyTrained(kind, one_by_one)
    found = []
    for name in ("part", "all"):
        training.step(name == "all")
        training.save(f"{folder}/{name}")
        found.append(training.states())
    steps: list[Any] = []
    training.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    assert training.load(f"{folder}/part") == found[0]
    assert not steps, "all that is loaded has a place already"
    assert training.load(f"{folder}/all") == found[1]
    return tuple(found)


def _load_part_and_all(folder: str, kind: str, one_by_one: bool) -> tuple[dict[int, Any], ...]:
    return tuple(_PartlyTrained(kind, one_by_one).load(f"{folder}/{name}") for name in ("part", "all"))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("one_by_one", [thorough(False), True])
@pytest.mark.parametrize("kind", [SHARDED, FULL])
def test_parameters_that_had_no_gradient_have_no_state(
    tmp_path: Path, kind: str, one_by_one: bool, num_ranks: int
) -> None:
    part, whole = ranks.run(_train_partly_then_all, num_ranks, str(tmp_path), kind, one_by_one)[0]
    assert (list(part), list(whole)) == ([0, 1], [0, 1, 2, 3])
    for found in ranks.run(_load_part_and_all, num_ranks, str(tmp_path), kind, one_by_one):
        assert found == (part, whole)


def _keep_what_a_failed_load_has_left(folder: str) -> None:
    training = _PartlyTrained(SHARDED, one_by_one=True)
    for name in ("part", "all"):
        training.step(name == "all")
        training.save(f"{folder}/{name}")
    before = training.load(f"{folder}/part")
    rejected = mock.patch.object(shard_files, "read", side_effect=CheckpointError("damaged"))
    with rejected, pytest.raises(CheckpointError, match="damaged"):
        training.load(f"{folder}/all")
    assert training.states() == before


def test_failed_loads_leave_the_optimizer_unchanged(tmp_path: Path) -> None:
    ranks.run(_keep_what_a_failed_load_has_left, 1, str(tmp_path))


def _save_before_training(folder: str | None, asynchronous: bool) -> list[list[float]]:
    accelerator, model, optimizer, loader = _prepare(SHARDED)
    if folder is None:
        return [epoch(accelerator, model, optimizer, loader)]
    steps: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))
    accelerator.save_state(folder, asynchronous=asynchronous)
    assert not steps
    assert optimizer.state_dict()["state"] == {}
    results = [epoch(accelerator, model, optimizer, loader)]
    accelerator.load_state(folder)
    assert optimizer.state_dict()["state"] == {}
    return [*results, epoch(accelerator, model, optimizer, loader)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_ranks", [thorough(1), 2])
def test_a_checkpoint_before_the_first_step_changes_nothing(
    tmp_path: Path, num_ranks: int, asynchronous: bool
) -> None:
    unsaved = ranks.run(_save_before_training, num_ranks, None, asynchronous)[0][0]
    for results in ranks.run(_save_before_training, num_ranks, str(tmp_path / "state"), asynchronous):
        for one in results:
            assert one == pytest.approx(unsaved, rel=1e-6)


def _save_whole_over_shards(folder: str) -> list[float]:
    accelerator, *rest = _prepare(SHARDED)
    epoch(accelerator, *rest)
    accelerator.save_state(folder)
    plugin = accelerator.state.fsdp_plugin
    assert plugin is not None
    plugin.set_state_dict_type(FULL)
    accelerator.save_state(folder)
    return epoch(accelerator, *rest)


def test_whole_checkpoints_can_replace_sharded_ones(tmp_path: Path) -> None:
    going_on = ranks.run(_save_whole_over_shards, 2, str(tmp_path / "state"))
    for resumed in ranks.run(_resume, 2, FULL, str(tmp_path / "state")):
        assert resumed == pytest.approx(going_on[0], rel=1e-3, abs=1e-3)


def _resume_with_a_hook(folder: str) -> tuple[list[int], list[float]]:
    accelerator, *rest = _prepare(SHARDED)
    seen: list[int] = []

    def take_over(models: list[Any], input_dir: str) -> None:
        seen.append(len(models))
        models.clear()

    accelerator.register_load_state_pre_hook(take_over)
    accelerator.load_state(folder)
    return seen, epoch(accelerator, *rest)


def test_hooks_see_no_old_shards(tmp_path: Path) -> None:
    going_on = ranks.run(_save, 2, SHARDED, str(tmp_path / "state"))
    for seen, resumed in ranks.run(_resume_with_a_hook, 2, str(tmp_path / "state")):
        assert seen == [0]
        assert resumed == pytest.approx(going_on[0], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("before", "after"), [("FULL_STATE_DICT", None), (None, "SHARDED_STATE_DICT")])
def test_full_states_equal_unsharded_ones(tmp_path: Path, before: str | None, after: str | None) -> None:
    folder = tmp_path / "state"
    going_on = ranks.run(_save, 2, before, str(folder))
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "optimizer.bin", "nblaunch_checkpoint.json"} <= names
    for resumed in ranks.run(_resume, 2, after, str(folder)):
        assert resumed == pytest.approx(going_on[0], rel=1e-3, abs=1e-3)


def test_shards_have_accelerates_names(tmp_path: Path) -> None:
    ranks.run(_save, 2, "SHARDED_STATE_DICT", str(tmp_path / "state"))
    found = {str(path.relative_to(tmp_path / "state")) for path in (tmp_path / "state").rglob("*")}
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert {f"{name}/.metadata", f"{name}/__0_0.distcp", f"{name}/__1_0.distcp"} <= found
    assert not {"model.safetensors", "optimizer.bin"} & found
    assert {"sampler.bin", "random_states_0.pkl", "random_states_1.pkl"} <= found
    manifest = files.read_manifest(tmp_path / "state")
    assert manifest is not None
    assert manifest.checksums == files.checksums(tmp_path / "state", manifest.files)
    damaged = tmp_path / "state" / "pytorch_model_fsdp_0" / "__1_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    for message in ranks.run(_load_elsewhere, 2, str(tmp_path / "state"), "SHARDED_STATE_DICT"):
        assert "pytorch_model_fsdp_0/__1_0.distcp has the checksum" in message


def _load_elsewhere(folder: str, kind: str | None = None) -> str:
    accelerator, *_ = _prepare(kind)
    try:
        accelerator.load_state(folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_parts_without_a_plugin_are_reported(tmp_path: Path) -> None:
    ranks.run(_save, 2, "SHARDED_STATE_DICT", str(tmp_path / "state"))
    for message in ranks.run(_load_elsewhere, 2, str(tmp_path / "state")):
        assert all(word in message for word in ("saved", "'fsdp2'", "'ddp'"))
        assert "Accelerator(fsdp_plugin=...)" in message


def _save_model(folder: str) -> bool:
    accelerator, model, *_ = _prepare("SHARDED_STATE_DICT")
    accelerator.save_model(model, folder, max_shard_size="1KB")
    weights = accelerator.get_state_dict(model)
    return bool(weights) == accelerator.is_main_process


def test_models_are_saved_whole(tmp_path: Path) -> None:
    assert ranks.run(_save_model, 2, str(tmp_path)) == [True, True]
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    fresh = network()
    with torch.no_grad():
        fresh.entry.weight.zero_()
    load_checkpoint_in_model(fresh, tmp_path)
    torch.testing.assert_close(dict(fresh.state_dict()), dict(network().state_dict()))


def _load_model(folder: str) -> dict[str, torch.Tensor]:
    accelerator, model, *_ = _prepare("SHARDED_STATE_DICT")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint_in_model(model, folder, strict=True)
    return accelerator.get_state_dict(model)


def test_whole_weights_go_into_a_sharded_model(tmp_path: Path) -> None:
    lone = Accelerator()
    lone.save_model(network(), tmp_path)
    found = ranks.run(_load_model, 2, str(tmp_path))[0]
    torch.testing.assert_close(found, dict(network().state_dict()))


def _save_own_way(folder: str) -> str:
    accelerator, model, *_ = _prepare("SHARDED_STATE_DICT")
    accelerator.save(accelerator.get_state_dict(model), f"{folder}/whole.pt")
    with pytest.raises(CheckpointError) as rejected:
        accelerator.save({"weights": model.state_dict(), "epoch": 3}, f"{folder}/parts.pt")
    return str(rejected.value)


def test_saving_one_ranks_shards_is_rejected(tmp_path: Path) -> None:
    for rejected in ranks.run(_save_own_way, 2, str(tmp_path)):
        assert "would write only the main process's shards" in rejected
        assert "accelerator.save_model(model, folder)" in rejected
    assert not (tmp_path / "parts.pt").exists()
    torch.testing.assert_close(torch.load(tmp_path / "whole.pt"), dict(network().state_dict()))


def _save_tied(folder: str) -> None:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.save_model(accelerator.prepare(Tied()), folder)


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    ranks.run(_save_tied, 2, str(tmp_path))
    names = load_file(tmp_path / "model.safetensors").keys()
    assert len({"entry.weight", "exit.weight"} & names) == 1
    load_checkpoint_in_model(Tied(), tmp_path, strict=True)


def _load_tied(folder: str) -> dict[str, Any]:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(Tied())
    load_checkpoint_in_model(model, folder, strict=True)
    return accelerator.get_state_dict(model)


def test_a_file_may_have_tied_weights_under_one_name(tmp_path: Path) -> None:
    weights = Tied().state_dict()
    del weights["exit.weight"]  # like libraries that know which weights are tied
    save_file(weights, tmp_path / "model.safetensors")
    found = ranks.run(_load_tied, 2, str(tmp_path))[0]
    torch.testing.assert_close(found, {**weights, "exit.weight": weights["entry.weight"]})


def _parts_in(folder: str) -> list[Path]:
    """Ignore other files, because another rank may be removing a failed save."""
    names = ("pytorch_model_fsdp_0", "optimizer_0")
    return [path for name in names for path in (Path(folder) / name).glob("*.distcp")]


def _fail(folder: str, culprit: int) -> str:
    accelerator, *rest = _prepare("SHARDED_STATE_DICT")
    accelerator.save_state(folder)
    before = {path.name: path.stat().st_mtime_ns for path in _parts_in(folder)}
    epoch(accelerator, *rest)
    if accelerator.process_index == culprit:
        FileSystemWriter.write_data = _disk_full  # type: ignore[method-assign]
    try:
        accelerator.save_state(folder)
    except CheckpointError as error:
        after = {path.name: path.stat().st_mtime_ns for path in _parts_in(folder)}
        assert after == before
        return str(error)
    return "saved"


def _disk_full(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("culprit", [thorough(0), 1])
def test_write_errors_keep_the_old_checkpoint(tmp_path: Path, culprit: int) -> None:
    for message in ranks.run(_fail, 2, str(tmp_path / "state"), culprit):
        assert "nothing was changed" in message
        assert f"Rank {culprit}: OSError: [Errno 28] No space left on device" in message
    assert sorted(os.listdir(tmp_path)) == ["state"]
    ranks.run(_resume, 2, "SHARDED_STATE_DICT", str(tmp_path / "state"))


def _save_on_main(folder: str) -> str:
    accelerator, *_ = _prepare("SHARDED_STATE_DICT")
    if not accelerator.is_main_process:
        return ""
    try:
        accelerator.save_state(folder)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_no_rank_can_save_alone(tmp_path: Path) -> None:
    message, _ = ranks.run(_save_on_main, 2, str(tmp_path / "state"))
    assert "call it on all ranks" in message
    assert not (tmp_path / "state").exists()


def _load_other(folder: str) -> str:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(nn.Linear(3, 3))
    before = dtensor.local(model.weight).clone()
    try:
        accelerator.load_state(folder)
    except CheckpointError as error:
        assert torch.equal(dtensor.local(model.weight), before)
        return str(error)
    return "loaded"


def test_parts_of_another_model_are_reported(tmp_path: Path) -> None:
    ranks.run(_save, 2, "SHARDED_STATE_DICT", str(tmp_path / "state"))
    for message in ranks.run(_load_other, 2, str(tmp_path / "state")):
        assert "pytorch_model_fsdp_0 does not fit the prepared objects" in message
        assert "weight" in message


# --- written while training goes on ----------------------------------------------------------------------------------


@contextmanager
def _blocked(seconds: float | None = None) -> Iterator[threading.Event]:
    """Make torch write shards only once the event is set: by the block, at its end, or after some seconds."""
    may_write, write = threading.Event(), FileSystemWriter.write_data

    def late(self: Any, *args: Any) -> Any:
        assert may_write.wait(180)
        return write(self, *args)

    FileSystemWriter.write_data = late  # type: ignore[method-assign]
    if seconds is not None:
        threading.Timer(seconds, may_write.set).start()
    try:
        yield may_write
    finally:
        may_write.set()
        FileSystemWriter.write_data = write  # type: ignore[method-assign]


def _save_while_training(kind: str, folder: str) -> list[float]:
    accelerator, *rest = _prepare(kind)
    epoch(accelerator, *rest)
    with _blocked() as may_write:
        accelerator.save_state(folder, asynchronous=True)
        results = epoch(accelerator, *rest)  # steps, with their collectives, while nothing can be written
        assert not os.path.exists(folder)
        may_write.set()
        accelerator.wait_for_checkpoint()
    return results


@pytest.mark.parametrize("num_ranks", [thorough(1), 2])
def test_asynchronous_shards_are_snapshots(tmp_path: Path, num_ranks: int) -> None:
    folder = str(tmp_path / "state")
    going_on = ranks.run(_save_while_training, num_ranks, "SHARDED_STATE_DICT", folder)
    assert os.listdir(tmp_path) == ["state"]
    for resumed in ranks.run(_resume, num_ranks, "SHARDED_STATE_DICT", folder):
        assert resumed == pytest.approx(going_on[0], rel=1e-6, abs=1e-6)


def _save_twice(folder: str) -> list[str]:
    accelerator, *rest = _prepare("SHARDED_STATE_DICT")
    epoch(accelerator, *rest)
    with _blocked(0.2):
        accelerator.save_state(f"{folder}_0", asynchronous=True)
        accelerator.save_state(f"{folder}_1", asynchronous=True)
        accelerator.wait_for_everyone()
        first = files.read_manifest(Path(f"{folder}_0"))
        accelerator.end_training()
    return sorted(first.files) if first is not None else []


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    first, second = ranks.run(_save_twice, 2, str(tmp_path / "state"))
    assert first == second
    assert {"pytorch_model_fsdp_0/.metadata", "optimizer_0/__1_0.distcp", "random_states_1.pkl"} <= set(first)
    assert sorted(os.listdir(tmp_path)) == ["state_0", "state_1"]


def _fail_to_write(folder: str, culprit: int) -> tuple[str, list[float], list[float]]:
    accelerator, *rest = _prepare("SHARDED_STATE_DICT")
    accelerator.save_state(folder)
    results = epoch(accelerator, *rest)
    write = FileSystemWriter.write_data
    if accelerator.process_index == culprit:
        FileSystemWriter.write_data = _disk_full  # type: ignore[method-assign]
    accelerator.save_state(folder, asynchronous=True)
    with pytest.raises(CheckpointError) as caught:
        accelerator.save_state(folder)
    FileSystemWriter.write_data = write  # type: ignore[method-assign]
    accelerator.load_state(folder)
    return str(caught.value), results, epoch(accelerator, *rest)


def _disk_full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("culprit", [0, thorough(1)])
def test_asynchronous_write_errors_keep_the_old_shards(tmp_path: Path, culprit: int) -> None:
    for message, results, again in ranks.run(_fail_to_write, 2, str(tmp_path / "state"), culprit):
        assert (
            f"was not saved; nothing was changed. Rank {culprit}: OSError: [Errno 28] No space"
            in message.replace("shards of the state were not saved", "was not saved")
        )
        assert again == pytest.approx(results, rel=1e-6)
    assert os.listdir(tmp_path) == ["state"]


def _fail_before_writing(folder: str) -> str:
    accelerator, *rest = _prepare("SHARDED_STATE_DICT")
    if accelerator.process_index == 1:
        handle = accelerator.register_save_state_pre_hook(_disk_full)
    try:
        accelerator.save_state(folder, asynchronous=True)
        accelerator.wait_for_checkpoint()
        message = "saved"
    except (CheckpointError, OSError) as error:
        message = str(error)
    if accelerator.process_index == 1:
        handle.remove()
    accelerator.save_state(f"{folder}_later", asynchronous=True)
    epoch(accelerator, *rest)
    accelerator.wait_for_checkpoint()
    return message


def test_a_rank_failing_early_does_not_block_others(tmp_path: Path) -> None:
    for message in ranks.run(_fail_before_writing, 2, str(tmp_path / "state")):
        assert "No space left on device" in message
    assert os.listdir(tmp_path) == ["state_later"]


def _die_while_saving(folder: str) -> None:
    accelerator, *rest = _prepare("SHARDED_STATE_DICT")
    epoch(accelerator, *rest)
    with _blocked():
        accelerator.save_state(folder, asynchronous=True)
        os.kill(os.getpid(), signal.SIGKILL)


def test_deaths_during_a_save_keep_the_old_shards(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    going_on = ranks.run(_save, 2, "SHARDED_STATE_DICT", folder)
    with pytest.raises(ranks.RankFailed, match="died"):
        ranks.run(_die_while_saving, 2, folder)
    for resumed in ranks.run(_resume, 2, "SHARDED_STATE_DICT", folder):
        assert resumed == pytest.approx(going_on[0], rel=1e-6, abs=1e-6)


def _wait_for_ever(folder: str, begun: str) -> None:
    accelerator, *rest = _prepare("SHARDED_STATE_DICT")
    epoch(accelerator, *rest)
    with _blocked():
        accelerator.save_state(folder, asynchronous=True)
        Path(f"{begun}_{accelerator.process_index}").touch()
        accelerator.wait_for_checkpoint()


def test_interrupted_saves_keep_the_old_shards(tmp_path: Path) -> None:
    folder, begun = str(tmp_path / "state"), tmp_path / "begun"
    going_on = ranks.run(_save, 2, "SHARDED_STATE_DICT", folder)
    job = notebook_launcher(
        _wait_for_ever, (folder, str(begun)), num_processes=2, backend="cpu", background=True
    )
    while not all(Path(f"{begun}_{rank}").exists() for rank in range(2)):
        assert job.is_running
        time.sleep(0.01)
    job.interrupt()
    with pytest.raises(KeyboardInterrupt):
        job.result()
    for resumed in ranks.run(_resume, 2, "SHARDED_STATE_DICT", folder):
        assert resumed == pytest.approx(going_on[0], rel=1e-6, abs=1e-6)


def _return_while_saving(kind: str | None, folder: str) -> bool:
    accelerator, *rest = _prepare(kind)
    epoch(accelerator, *rest)
    may_write, write = threading.Event(), Snapshot.write

    def late(self: Any, *args: Any) -> Any:
        assert may_write.wait(180)
        return write(self, *args)

    Snapshot.write = late  # type: ignore[method-assign]
    accelerator.save_state(folder, asynchronous=True)
    # the process waits for this thread at its end, as for the save
    threading.Timer(0.2, may_write.set).start()
    return os.path.exists(folder)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", None])
def test_returning_waits_for_a_save(tmp_path: Path, kind: str | None) -> None:
    folder = str(tmp_path / "state")
    assert notebook_launcher(_return_while_saving, (kind, folder), num_processes=2, backend="cpu") is False
    assert os.listdir(tmp_path) == ["state"]
    manifest = files.read_manifest(tmp_path / "state")
    assert manifest is not None
    files.check_files(tmp_path / "state", manifest)
