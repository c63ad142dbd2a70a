"""Judging from evidence whether memory ran out."""

from __future__ import annotations

import dataclasses

import pytest

from nblaunch.diagnosis import memory
from nblaunch.diagnosis.memory import MemoryFacts, MemoryRecord, judge, read_facts, shm_line
from nblaunch.wire.board import SlotReading

GB = 1_000_000_000
BEFORE = MemoryFacts(available=10 * GB, limit=16 * GB, oom_kills=0, shm_used=0, shm_size=64_000_000)


def verdict(
    *, kills: int = 0, lowest: int | None = 5 * GB, is_killed: bool = True, message: str = "", built: int = 0
) -> list[str]:
    record = MemoryRecord(
        dataclasses.replace(BEFORE, oom_kills=read_facts().oom_kills - kills),
        lowest_available=lowest,
    )
    readings = [SlotReading(rank, built_bytes=built) for rank in range(2)]
    return judge(record, {1: 2 * GB, 0: 3 * GB}, readings, is_killed=is_killed, message=message)


def test_no_verdict_without_evidence() -> None:
    assert verdict() == []
    assert verdict(lowest=None) == []
    assert verdict(is_killed=False, message="ValueError: the loss is nan", lowest=0) == []


def test_a_counted_oom_kill_is_evidence() -> None:
    found = verdict(kills=2)
    assert found[0] == "Memory ran out: the system killed 2 processes of this job."
    assert found[1] == "Host memory: limit 16.0 GB, available at the start 10.0 GB, at the lowest 5.00 GB."
    assert found[2] == "Peak memory of each process: rank 0 3.00 GB, rank 1 2.00 GB."
    assert "Use fewer processes" in found[3]


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to",
        "OSError: [Errno 12] Cannot allocate memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "MemoryError: ",
        "RuntimeError: std::bad_alloc",
    ],
)
def test_failed_allocations_are_evidence(message: str) -> None:
    found = verdict(is_killed=False, message=message)
    assert found[0] == "Memory ran out: an allocation failed."


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed. ",
        "RuntimeError: DataLoader worker (pid(s) 9, 10) exited unexpectedly",
        "BrokenProcessPool: A process in the process pool was terminated abruptly while the future was running",
        "TerminatedWorkerError: A worker process managed by the executor was unexpectedly terminated.",
        "CalledProcessError: Command 'sort' died with <Signals.SIGKILL: 9>.",
    ],
)
def test_killed_child_processes_are_evidence(message: str) -> None:
    assert verdict(kills=1, is_killed=False, message=message)[0].startswith(
        "Memory ran out: the system killed 1"
    )
    assert verdict(is_killed=False, message=message) == []


def test_a_kill_elsewhere_in_the_container_explains_no_other_failure() -> None:
    assert verdict(kills=1, is_killed=False, message="ValueError: the loss is nan") == []
    assert verdict(kills=1, is_killed=False) == []


def test_a_kill_with_scarce_memory_is_probably_oom() -> None:
    found = verdict(lowest=GB // 10)
    assert found[0].startswith("Memory probably ran out")
    assert verdict(lowest=GB // 10, is_killed=False) == []


def test_the_lowest_memory_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([8 * GB, 0, 6 * GB])
    record = MemoryRecord(BEFORE)
    monkeypatch.setattr(memory, "read_facts", lambda: dataclasses.replace(BEFORE, available=next(left)))
    for _ in range(3):
        record.update()
    assert record.lowest_available == 0


def test_advice_for_models_built_in_workers() -> None:
    found = verdict(kills=1, built=1_200_000_000)
    assert found[-1] == (
        "2 processes each built a model of 1.20 GB on a host with 16.0 GB: build it once in a cell and pass it as in "
        "notebook_launcher(train, (model,)), so that it is in memory only once."
    )
    small = verdict(kills=1, built=1000)
    assert "built a model" not in small[-1]


def test_many_ranks_stay_one_line() -> None:
    found = judge(
        MemoryRecord(BEFORE), dict.fromkeys(range(11), GB), [], is_killed=False, message="MemoryError: "
    )
    assert found[2].endswith("rank 7 1.00 GB and 3 more.")


def test_a_full_shm_is_named() -> None:
    assert shm_line(dataclasses.replace(BEFORE, shm_used=63_000_000)).startswith(
        "/dev/shm is full (63.0 MB of 64.0 MB)"
    )
    assert shm_line(dataclasses.replace(BEFORE, shm_used=10_000_000)) == ""
    assert shm_line(dataclasses.replace(BEFORE, shm_size=0)) == ""


def test_the_facts_of_this_machine_are_plausible() -> None:
    facts = read_facts()
    assert facts.limit is not None
    assert facts.available is not None
    assert 0 < facts.available <= facts.limit
    assert 0 <= facts.shm_used <= facts.shm_size
