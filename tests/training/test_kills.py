"""A process that is killed while it saves leaves a complete, loadable checkpoint: the old one or the new one.

For every n, a process kills itself at its n-th access to the file system.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch import Accelerator, ProjectConfiguration, backends, context
from nblaunch.training.checkpoints import files, load_weights, model_files
from tests.thorough import thorough

# Python's audit events for the file system (https://docs.python.org/3/library/audit_events.html).
_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree")


def _accelerator(folder: Path, is_automatic: bool) -> tuple[Accelerator, nn.Linear]:
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu")))
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=is_automatic, total_limit=1)
    accelerator = Accelerator(project_config=project)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    accelerator.prepare(model, optimizer)
    model.requires_grad_(False).weight.fill_(1.0)
    return accelerator, model


def _save_automatically(folder: Path) -> None:
    accelerator, model = _accelerator(folder, True)
    accelerator.load_state()
    model.weight.fill_(2.0)
    accelerator.save_state()


def _save_over(folder: Path) -> None:
    accelerator, model = _accelerator(folder, False)
    model.weight.fill_(2.0)
    accelerator.save_state(
        folder / "state", safe_serialization=False
    )  # different files from the old checkpoint's


def _save_over_asynchronously(folder: Path) -> None:
    accelerator, model = _accelerator(folder, False)
    model.weight.fill_(2.0)
    accelerator.save_state(folder / "state", asynchronous=True)
    accelerator.wait_for_checkpoint()


def _save_shards(folder: Path) -> None:
    weights = {"a": torch.full((4,), 2.0), "b": torch.full((4,), 2.0), "c": torch.full((4,), 2.0)}
    model_files.save_sharded(weights, folder / "model", max_shard_size=16)


def _killed_at(number: int, program: Callable[[Path], None], folder: Path) -> None:
    """Run ``program`` and die at its ``number``-th access to the file system below ``folder``."""
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in _EVENTS and any(str(folder) in str(argument) for argument in arguments[:2]):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    sys.addaudithook(watch)
    program(folder)
    os._exit(0)


def _kill_everywhere(program: Callable[[Path], None], start: Path, work: Path) -> Any:
    """Yield the folder that a kill at each point leaves, until ``program`` completes."""
    spawn = multiprocessing.get_context("forkserver")
    for number in range(1, 1000):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(start, work)
        process = spawn.Process(target=_killed_at, args=(number, program, work))
        process.start()
        process.join()
        code = process.exitcode
        process.close()
        yield number
        if code == 0:
            return
        assert code == -signal.SIGKILL


@pytest.mark.parametrize("program", [_save_automatically, thorough(_save_over), _save_over_asynchronously])
def test_a_kill_leaves_a_checkpoint(tmp_path: Path, program: Callable[[Path], None]) -> None:
    is_automatic = program is _save_automatically
    start, work = tmp_path / "start", tmp_path / "work"
    accelerator, _ = _accelerator(start, is_automatic)
    accelerator.save_state(start / "state")
    if not is_automatic:
        (start / "state" / "mine.txt").write_text("keep")
    found = []
    for number in _kill_everywhere(program, start, work):
        accelerator, model = _accelerator(work, is_automatic)
        model.weight.zero_()
        accelerator.load_state(None if is_automatic else work / "state")
        (value,) = set(model.weight.flatten().tolist())
        found.append(value)
        # The next save works in spite of the kill's remains, and removes them.
        model.weight.fill_(3.0)
        accelerator.save_state(work / "state")
        model.weight.zero_()
        accelerator.load_state(None if is_automatic else work / "state")
        assert set(model.weight.flatten().tolist()) == {3.0}, number
        hidden = [name for name in files.files_below(work) if "/." in name or name.startswith(".")]
        assert not hidden, (number, hidden)
        assert is_automatic or (work / "state" / "mine.txt").read_text() == "keep"
    assert len(found) > 15
    assert found == sorted(found), "once the new one counted, it counts"
    assert set(found) == {1.0, 2.0}


def test_a_kill_leaves_a_model(tmp_path: Path) -> None:
    start, work = tmp_path / "start", tmp_path / "work"
    model_files.save_sharded({name: torch.ones(4) for name in "abc"}, start / "model", "10GB")
    found = []
    for _ in _kill_everywhere(_save_shards, start, work):
        model = nn.Module()
        for name in "abc":
            model.register_buffer(name, torch.zeros(4))
        load_weights.load_checkpoint_in_model(model, work / "model", strict=True)
        (value,) = {value for buffer in model.buffers() for value in buffer.tolist()}
        found.append(value)
    assert found == sorted(found)
    assert set(found) == {1.0, 2.0}
