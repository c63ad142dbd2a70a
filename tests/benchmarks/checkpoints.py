"""How often checkpoints survive kills, late ranks, full disks and flipped bits, counted over many jobs.

    python -m tests.benchmarks checkpoints [--kills 200] [--late 50] [--disks 50] [--flips 200] [--seed 0]

Ranks are real processes joined by gloo, without the launcher. Every weight, the registered counter and the optimizer's
state have the number of the save as their value, so that a mixture of two checkpoints shows.

* kill: ranks save in a loop and kill themselves with SIGKILL at a random time. The checkpoint must then load
  completely, and be at least as new as the last save that returned.
* late: ranks arrive at each save at random times, some 5 to 10 s late, or never if the main process saves alone. Each
  checkpoint must have the random states of all ranks that had to arrive.
* full disk: one write of one rank fails with ENOSPC. Every rank must raise it as a CheckpointError, the old checkpoint
  must load, and the next save must work.
* flipped bit: one bit of one file is changed. Loading must name the file and change nothing.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.utils.data import DataLoader

from nblaunch import (
    Accelerator,
    CheckpointError,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    backends,
    context,
)
from nblaunch.training.checkpoints import files, model_files
from tests.benchmarks.bench import Row, count
from tests.training import ranks

KINDS = ("ddp", "fsdp2", "stateful", "main only")
_SAVES = 1000  # more than a job reaches before it is killed
_LONG_S = (5.0, 10.0)
_OFTEN_S = (0.0, 0.4)

Round = Callable[[random.Random, Path], str]
"""Play one round in a folder; return what went wrong, or an empty string."""


def measure(
    kills: int = 200, late: int = 50, disks: int = 50, flips: int = 200, seed: int = 0
) -> Iterator[Row]:
    ranks.start_server()
    try:
        yield _count("a checkpoint is left by killed ranks", kill_round, kills, seed)
        yield _count("late ranks lose nothing", late_round, late, seed)
        yield _count("a full disk leaves the old checkpoint", disk_round, disks, seed)
        yield _count("a flipped bit is found", flip_round, flips, seed)
    finally:
        ranks.stop_server()


def _count(what: str, play: Round, of: int, seed: int) -> Row:
    good = 0
    for number in range(of):
        draw = random.Random(f"{what}{seed}{number}")
        with tempfile.TemporaryDirectory() as folder:
            problem = play(draw, Path(folder))
        good += not problem
        if problem:
            print(f"{what}, round {number}: {problem}", file=sys.stderr)
    return count(what, good, of)


# --- a job ------------------------------------------------------------------------------------------------------------


class Counter:
    """A user's object that holds the number of the save."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Job:
    """The objects that every rank of a job prepares and saves."""

    def __init__(self, kind: str, folder: Path, is_automatic: bool = False) -> None:
        plugin = (
            FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT") if kind == "fsdp2" else None
        )
        self.accelerator = Accelerator(
            fsdp_plugin=plugin,
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=kind == "stateful"),
            project_config=ProjectConfiguration(
                str(folder), automatic_checkpoint_naming=is_automatic, total_limit=2
            ),
        )
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
        loader = DataLoader(torch.zeros(8, 64), batch_size=2)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.target = None if is_automatic else folder / "state"

    def fill(self, number: int) -> None:
        """Set all saved values to ``number``."""
        self.counter.number = number
        self.accelerator.backward(self.model(torch.zeros(1, 64)).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(number)
                self.optimizer.state[parameter]["momentum_buffer"].fill_(number)

    def values(self) -> set[float]:
        """Return the set of saved values; it has one element if checkpoints are not mixed."""
        found = {float(self.counter.number)}
        for parameter in self.model.parameters():
            for tensor in (parameter, self.optimizer.state[parameter]["momentum_buffer"]):
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                found |= set(whole.detach().flatten().tolist())
        return found


def _loaded(kind: str, folder: Path, is_automatic: bool = False) -> set[float]:
    """Load a checkpoint in this process alone, and return its values."""
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu")))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the random states and the order of data belong to two ranks
            job = Job(kind, folder, is_automatic)
            job.fill(0)
            job.accelerator.load_state(job.target)
            return job.values()
    finally:
        context.take()


# --- rounds -----------------------------------------------------------------------------------------------------------


def kill_round(draw: random.Random, folder: Path) -> str:
    kind = draw.choice(KINDS[:3])
    is_automatic, asynchronous = draw.random() < 0.5, draw.random() < 0.5
    first = draw.randrange(2)
    kill_s = draw.uniform(0.0, 0.5)
    delays_s = [kill_s + (0.0 if rank == first else draw.uniform(0.0, 0.1)) for rank in range(2)]
    try:
        ranks.run(_save_until_killed, 2, kind, folder, is_automatic, asynchronous, delays_s)
        return "no rank was killed"
    except ranks.RankFailed as error:
        # The rank that is killed later may first notice that the other is gone.
        if not any(text in str(error) for text in ("died without a result", "Connection")):
            return f"{kind}: {error}"
    confirmed = int((folder / "confirmed").read_text())
    try:
        found = _loaded(kind, folder, is_automatic)
    except Exception as error:
        return f"{kind}, automatic {is_automatic}, asynchronous {asynchronous}: {error!r}"
    is_good = len(found) == 1 and min(found) >= confirmed
    return "" if is_good else f"{kind}: save {confirmed} had returned, but {found} was loaded"


def _save_until_killed(
    kind: str, folder: Path, is_automatic: bool, asynchronous: bool, delays_s: list[float]
) -> None:
    job = Job(kind, folder, is_automatic)
    rank = job.accelerator.process_index
    for number in range(1, _SAVES):
        job.fill(number)
        job.accelerator.save_state(job.target, asynchronous=asynchronous and number > 1)
        if rank == 0:
            # An asynchronous save is on disk once the next save has begun.
            (folder / "aside").write_text(str(number - 1 if asynchronous and number > 1 else number))
            (folder / "aside").rename(folder / "confirmed")
        if number == 1:
            job.accelerator.wait_for_everyone()
            killer = threading.Timer(delays_s[rank], os.kill, (os.getpid(), signal.SIGKILL))
            killer.daemon = True
            killer.start()


def late_round(draw: random.Random, folder: Path) -> str:
    kind = draw.choice(KINDS)
    size = draw.choice((2, 2, 3))
    delays_s = [
        [draw.uniform(*(_LONG_S if draw.random() < 0.1 else _OFTEN_S)) for _ in range(size)] for _ in range(3)
    ]
    try:
        results = ranks.run(_save_late, size, kind, folder, delays_s)
        expected = [[str(rank) for rank in range(1 if kind == "main only" else size)]] * 3
        if any(result != expected for result in results):
            return f"{kind}, {size} ranks: random states of {results}, and not of {expected}"
        found = _loaded(kind, folder)
    except Exception as error:
        return f"{kind}, {size} ranks, delays {delays_s}: {error!r}"
    return "" if found == {2.0} else f"{kind}: {found} was loaded"


def _save_late(kind: str, folder: Path, delays_s: list[list[float]]) -> list[list[str]]:
    """Save three times, the second time asynchronously; return whose random states each checkpoint has."""
    job = Job(kind, folder)
    rank = job.accelerator.process_index
    is_alone = kind == "main only"
    warnings.simplefilter("ignore" if is_alone else "error")
    found = []
    for number, delays in enumerate(delays_s):
        job.fill(number)
        time.sleep(delays[rank])
        if rank == 0 or not is_alone:
            job.accelerator.save_state(job.target, asynchronous=number == 1)
            job.accelerator.wait_for_checkpoint()
        job.accelerator.wait_for_everyone()
        found.append(
            sorted(path.stem.rpartition("_")[2] for path in (folder / "state").glob("random_states*"))
        )
        job.accelerator.wait_for_everyone()
    return found


_WRITES: dict[str, tuple[Any, str]] = {
    "folder": (Path, "mkdir"),
    "objects": (files, "write_object"),
    "weights": (model_files, "write_weights"),
    "parts": (FileSystemWriter, "write_data"),
    "manifest": (files.Manifest, "write"),
    "sync": (files, "sync_file"),
}


def disk_round(draw: random.Random, folder: Path) -> str:
    kind = draw.choice(("ddp", "fsdp2"))
    shared = ["objects"] if kind == "ddp" else ["objects", "parts"]
    culprit = draw.randrange(2)
    writes = [*shared, "folder", "manifest", "sync", *(["weights"] if kind == "ddp" else [])]
    write = draw.choice(writes if culprit == 0 else shared)
    asynchronous = draw.random() < 0.5
    try:
        results = ranks.run(_fill_disk, 2, kind, folder, culprit, write, asynchronous, draw.randrange(2))
        if any("No space left on device" not in result for result in results):
            return f"{kind}, {write} of rank {culprit}, asynchronous {asynchronous}: {results}"
        found = _loaded(kind, folder)
    except Exception as error:
        return f"{kind}, {write} of rank {culprit}, asynchronous {asynchronous}: {error!r}"
    return "" if found == {3.0} else f"{kind}: {found} was loaded"


def _fill_disk(kind: str, folder: Path, culprit: int, write: str, asynchronous: bool, num_before: int) -> str:
    job = Job(kind, folder)
    job.fill(1)
    job.accelerator.save_state(job.target)
    job.fill(2)
    owner, name = _WRITES[write]
    original = getattr(owner, name)
    calls = 0

    def full(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        # The first write fails, or the second if there is one.
        if calls <= num_before and write in ("objects", "sync") and culprit == 0:
            return original(*args, **kwargs)
        raise OSError(28, "No space left on device")

    if job.accelerator.process_index == culprit:
        setattr(owner, name, full)
    message = "nothing was raised"
    try:
        job.accelerator.save_state(job.target, asynchronous=asynchronous)
        job.accelerator.wait_for_checkpoint()
    except CheckpointError as error:
        message = str(error)
    setattr(owner, name, original)
    job.accelerator.load_state(job.target)
    if job.values() != {1.0}:
        return f"{job.values()} was loaded after the failure"
    job.fill(3)
    job.accelerator.save_state(job.target)
    return message


def flip_round(draw: random.Random, folder: Path) -> str:
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu")))
    try:
        job = Job(draw.choice(("ddp", "fsdp2")), folder)
        job.fill(1)
        job.accelerator.save_state(job.target)
        job.fill(2)
        path = draw.choice([path for path in sorted((folder / "state").rglob("*")) if path.is_file()])
        data = bytearray(path.read_bytes())
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            job.accelerator.load_state(job.target)
        except CheckpointError as error:
            if path.name in str(error) or "newer nblaunch" in str(error):
                return "" if job.values() == {2.0} else "something was loaded all the same"
            return f"{path.name}, bit {bit}: {error}"
        return f"{path.name}, bit {bit}: nothing was noticed"
    finally:
        context.take()
