"""The timeline of a job: its slices on one clock, its size, and the ways to write it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nblaunch
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.launcher.timeline import Timeline, write_timeline
from nblaunch.spec import LaunchSpec
from nblaunch.wire.board import Board
from nblaunch.wire.spans import SpanKind, SpanWriter, read_blocks, to_blocks, unpack

pytestmark = pytest.mark.usefixtures("first_store")

NUM_BATCHES = 6
NUM_RANKS, NUM_STEPS = 8, 10_000
MAX_BYTES = 20e6
MAX_SKEW_US = 100.0
MAX_PROFILE_SKEW_US = 5000.0  # a clock that the system may adjust


def slices(path: Path) -> list[dict[str, Any]]:
    """Return the slices of a timeline, after checking its format."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events = document["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
    found = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in found)
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {rank: f"rank {rank}" for rank in sorted({event["tid"] for event in found})}
    return found


def assert_nested(found: Iterable[dict[str, Any]]) -> None:
    """Assert that the slices of each track are nested or disjoint, as Perfetto requires."""
    open_ends: dict[int, list[float]] = {}
    for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
        ends, end = open_ends.setdefault(event["tid"], []), event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"] + 1e-6:
            ends.pop()
        assert not ends or end <= ends[-1] + 1e-6, event
        ends.append(end)


def ran(function: Callable[..., Any], args: tuple[Any, ...], num_ranks: int) -> JobRunner:
    """Return the job of a function that has run on the CPU."""
    spec = LaunchSpec(function, args, num_ranks, backend="cpu")
    runner: JobRunner = JobRunner(spec, plan_launch(spec), [])
    runner.run()
    return runner


def train(folder: str = "") -> None:
    accelerator = nblaunch.Accelerator()
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = TensorDataset(torch.ones(NUM_BATCHES * 2 * accelerator.num_processes, 4))
    model, sgd, loader = accelerator.prepare(model, sgd, DataLoader(rows, batch_size=2))
    for (batch,) in loader:
        accelerator.backward(model(batch).sum())
        sgd.step()
        sgd.zero_grad()
    model.eval()
    with torch.no_grad():
        for (batch,) in loader:
            accelerator.gather(model(batch))
    if folder:
        torch.save(model.state_dict(), f"{folder}/{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()


def meet(folder: str) -> None:
    accelerator = nblaunch.Accelerator()
    began_s = time.monotonic()
    accelerator.wait_for_everyone()
    times_us = [began_s * 1e6, time.monotonic() * 1e6]
    Path(folder, f"{accelerator.process_index}.json").write_text(json.dumps(times_us))


def train_under_the_profiler(folder: str) -> None:
    accelerator = nblaunch.Accelerator()
    with accelerator.profile(nblaunch.ProfileKwargs(activities=["cpu"], output_trace_dir=folder)):
        train_plainly(4)


def train_plainly(num_steps: int) -> None:
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.ones(num_steps, 4))):
        model(batch).sum().backward()
        sgd.step()
        sgd.zero_grad()


def test_a_timeline_has_all_activities(tmp_path: Path) -> None:
    job = ran(train, (str(tmp_path),), 2)
    path = job.timeline()
    assert path.parent == job.log_dir
    found = slices(path)
    assert_nested(found)
    for rank in range(2):
        counts = Counter(event["name"] for event in found if event["tid"] == rank)
        wanted = {"data": 2 * NUM_BATCHES, "forward": NUM_BATCHES, "backward": NUM_BATCHES}
        wanted |= {"optimizer": NUM_BATCHES, "evaluation": 1, "save": 1}
        assert {name: counts[name] for name in wanted} == wanted
        assert counts["barrier"] == 1
        assert counts["all_gather"] >= NUM_BATCHES
    (saved,) = [event["args"]["bytes"] for event in found if event["name"] == "save" and event["tid"] == 0]
    assert saved == (tmp_path / "0.pt").stat().st_size


def test_ranks_share_a_clock(tmp_path: Path) -> None:
    job = ran(meet, (str(tmp_path),), 2)
    earliest, latest = [], []  # the time of the timeline's beginning, according to each rank
    for barrier in slices(job.timeline()):
        if barrier["name"] == "barrier":
            began_us, ended_us = json.loads((tmp_path / f"{barrier['tid']}.json").read_text())
            earliest.append(began_us - barrier["ts"])
            latest.append(ended_us - barrier["ts"] - barrier["dur"])
    assert len(earliest) == 2
    assert max(earliest) <= min(latest) + MAX_SKEW_US


def test_profiler_traces_share_the_clock(tmp_path: Path) -> None:
    job = ran(train_under_the_profiler, (str(tmp_path / "traces"),), 2)
    document = json.loads(job.timeline(tmp_path / "all.json", tmp_path / "traces").read_text())
    events = document["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    for rank in range(2):
        (pid,) = [pid for pid, name in names.items() if name == f"rank {rank}: torch.profiler"]
        passes = [
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["name"] == "backward" and event["tid"] == rank and event["pid"] != pid
        ]
        inside = [event for event in events if event["pid"] == pid and "evaluate_function" in event["name"]]
        assert len(passes) == 4
        assert len(inside) >= len(passes)
        assert all(
            any(
                began - MAX_PROFILE_SKEW_US < event["ts"] < ended + MAX_PROFILE_SKEW_US
                for began, ended in passes
            )
            for event in inside
        )


def test_traces_of_another_time_or_kind_are_rejected(tmp_path: Path) -> None:
    trace = {
        "baseTimeNanoseconds": 0,
        "traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 2}],
    }
    for text, error in (
        (json.dumps(trace), "profile_3.json was not recorded"),
        ("{}", "not a trace"),
        ("", "no trace"),
    ):
        if text:
            (tmp_path / "profile_3.json").write_text(text)
        else:
            (tmp_path / "profile_3.json").unlink()
        with pytest.raises((ValueError, FileNotFoundError), match=error):
            write_timeline(_long_job(num_steps=500), tmp_path / "long.json.gz", "job", tmp_path)
        assert not list(tmp_path.glob("*long*"))


def test_a_notebook_shows_a_typical_and_the_slowest_step(tmp_path: Path) -> None:
    board = Board.create(2)
    blocks = []
    for rank in range(2):
        memory = board.slot(rank).span_memory
        assert memory is not None
        writer, now_s = SpanWriter(memory), 1000.0
        for number in range(1, 12):
            waited_s = 0.5 if number == 7 and rank == 1 else 9.0 if number == 1 else 0.01
            writer.put(SpanKind.DATA, now_s, now_s + waited_s)
            writer.put(SpanKind.OPTIMIZER, now_s + waited_s, now_s + waited_s + 0.01)
            now_s += waited_s + 0.01
        blocks.append((rank, board.spans(rank).read()))
    board.close()
    path = Timeline(tmp_path / "steps.json.gz")
    write_timeline(blocks, path, "job")
    shown = path._repr_html_() or ""
    assert shown.count("rank 0: 20.0 ms") == 2
    typical, _, slowest = shown.partition("slowest step")
    assert "rank 1: 20.0 ms" in typical
    assert "rank 1: 510 ms" in slowest
    assert "step 7: " in slowest
    assert "data, 500 ms" in slowest
    assert Timeline(tmp_path / "none.json")._repr_html_() is None
    assert path.parent._repr_html_() is None


def test_plain_loops_have_a_timeline(tmp_path: Path) -> None:
    job = ran(train_plainly, (5,), 1)
    path = job.timeline(tmp_path / "mine.json")
    assert path == tmp_path / "mine.json"
    counts = Counter(event["name"] for event in slices(path))
    assert {name: counts[name] for name in ("data", "forward", "backward", "optimizer")} == {
        "data": 5, "forward": 5, "backward": 5, "optimizer": 5,
    }  # fmt: skip


def wait_for_file(path: str) -> None:
    train_plainly(3)
    while not Path(path).exists():
        time.sleep(0.01)


def test_a_running_job_has_a_partial_timeline(tmp_path: Path) -> None:
    job = nblaunch.launch(wait_for_file, (str(tmp_path / "go"),), num_processes=1, background=True)
    try:
        counts: Counter[str] = Counter()
        while counts["optimizer"] < 3:
            try:
                counts = Counter(event["name"] for event in slices(job.timeline()))
            except RuntimeError:
                assert job.is_running
    finally:
        (tmp_path / "go").touch()
    job.wait()


def test_a_job_that_trained_nothing_says_so() -> None:
    job = ran(int, (), 1)
    with pytest.raises(RuntimeError, match="has no timeline"):
        job.timeline()
    assert not (job.log_dir / "timeline.json.gz").exists()


def test_errors_name_the_path_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "timeline.json"
    spans = list(_long_job(500))
    with pytest.raises(FileNotFoundError) as raised:
        write_timeline(spans, path, "train")
    assert raised.value.filename == str(path)


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for (batch,) in DataLoader(TensorDataset(torch.ones(5, 4))):
    model(batch).sum().backward()
    sgd.step()
"""


def test_the_command_line_writes_a_timeline(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "nblaunch", "launch", "--num_processes", "1", "--cpu"]
    arguments = ["--timeline", "out.json.gz", "--start_method", "fork", "script.py"]
    ended = subprocess.run(
        [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    counts = Counter((event["tid"], event["name"]) for event in slices(tmp_path / "out.json.gz"))
    assert counts[0, "backward"] == 5
    assert "ui.perfetto.dev" in ended.stderr


def test_the_command_line_rejects_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    command = [sys.executable, "-m", "nblaunch", "launch", "--timeline", "no/where.json", "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2
    assert "--timeline no/where.json" in ended.stderr


def _long_job(num_steps: int = NUM_STEPS) -> Iterator[tuple[int, bytes]]:
    """Yield the spans of 8 ranks with many steps, with realistic durations."""
    board = Board.create(NUM_RANKS)
    steps = torch.rand(num_steps, 4, generator=torch.Generator().manual_seed(0)).mul(1e-3).add(1e-4).tolist()
    for rank in range(NUM_RANKS):
        memory = board.slot(rank).span_memory
        assert memory is not None
        writer, now_s = SpanWriter(memory), 1000.0
        for number, times in enumerate(steps):
            kinds = (SpanKind.DATA, SpanKind.BACKWARD, SpanKind.OPTIMIZER, SpanKind.COLLECTIVE)
            for kind, duration_s in zip(kinds, times, strict=True):
                writer.put(kind, now_s, now_s + duration_s, value=512 if number % 8 == 0 else 0)
                now_s += 1.1 * duration_s
            if number % 500 == 499:
                yield rank, board.spans(rank).read()
    board.close()


def test_8_ranks_with_10_000_steps_take_less_than_20_mb(tmp_path: Path) -> None:
    num_slices = write_timeline(_long_job(), tmp_path / "long.json.gz", "job")
    assert num_slices >= NUM_RANKS * NUM_STEPS * 5 - NUM_RANKS
    assert (tmp_path / "long.json.gz").stat().st_size < MAX_BYTES


def test_spans_that_were_overwritten_are_left_out(tmp_path: Path) -> None:
    board = Board.create(1)
    memory = board.slot(0).span_memory
    assert memory is not None
    writer, reader = SpanWriter(memory), board.spans(0)
    for number in range(5000):
        writer.put(SpanKind.DATA, number, number + 0.5)
    assert reader.read() == b""
    assert reader.num_lost == 5000
    writer.put(SpanKind.SAVE, 6000, 6001, value=3)
    (span,) = unpack(reader.read())
    assert (span.kind, span.began_s, span.ended_s, span.value) == (SpanKind.SAVE, 6000, 6001, 3)
    board.close()


def test_half_written_blocks_are_left_out(tmp_path: Path) -> None:
    board = Board.create(1)
    memory = board.slot(0).span_memory
    assert memory is not None
    writer = SpanWriter(memory)
    writer.put(SpanKind.DATA, 1.0, 2.0)
    block = to_blocks({0: board.spans(0).read()})
    board.close()
    (tmp_path / "spans").write_bytes(block + block[:-1])
    with open(tmp_path / "spans", "rb") as file:
        assert [rank for rank, _ in read_blocks(file)] == [0]
