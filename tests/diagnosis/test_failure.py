"""The exception of a failed attempt, with everything a user needs to know."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.diagnosis.failure import failure_of
from nblaunch.diagnosis.memory import MemoryRecord
from nblaunch.diagnosis.report import AttemptReport, Hang
from nblaunch.errors import CollectiveMismatch, JobHung, WorkerDied
from nblaunch.events import ExceptionInfo, ExitStatus, Failed, HostMemory, Returned
from nblaunch.launcher.joblog import JobLog
from nblaunch.wire import exceptions
from nblaunch.wire.board import SlotReading
from nblaunch.wire.collective_calls import Call, Group, RankCalls, Site


@pytest.fixture
def log(nothing_left_behind: None, tmp_path: Path) -> Iterator[JobLog]:
    made = JobLog(str(tmp_path))
    made.make_attempt_folder(0, range(2))
    yield made
    made.end()


def died(code: int) -> AttemptReport:
    report = AttemptReport(signalled={0: 3.0})
    report.exits = {1: (ExitStatus(code), 2.0), 0: (ExitStatus(-15), 4.0)}
    return report


def raised(error: Exception) -> AttemptReport:
    report = AttemptReport()
    info = ExceptionInfo(type(error).__name__, str(error), text=f"Traceback ...\n{error}\n")
    report.failed = {1: Failed(1, 2.0, info=info, exception=exceptions.dump(error))}
    report.exits = {0: (ExitStatus(0), 4.0), 1: (ExitStatus(1), 2.1)}
    report.returned = {0: Returned(0, 1.0)}
    return report


CRASH = """Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "/home/me/other.py", line 1 in other

Current thread 0x00007f2 (most recent call first):
  File "/home/me/train.py", line 7 in step
  File "/home/me/train.py", line 3 in train
"""


WATCHDOG = """\
step 5
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: [Rank 1] \
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576, \
Timeout(ms)=600000) ran for 600013 milliseconds before timing out.
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:635 (most recent call \
first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f12 in /site-packages/torch/lib/libc10.so)
frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<>) + 0x23d (0x7f13 in /lib/libtorch_cuda.so)
frame #2: c10d::ProcessGroupNCCL::Watchdog::runLoop() + 0x7a0 (0x7f13 in /lib/libtorch_cuda.so)
frame #3: <unknown function> + 0xdc253 (0x7f15 in /lib/x86_64-linux-gnu/libstdc++.so.6)
frame #4: <unknown function> + 0x94ac3 (0x7f15 in /lib/x86_64-linux-gnu/libc.so.6)
frame #5: clone + 0x44 (0x7f15 in /lib/x86_64-linux-gnu/libc.so.6)

"""


def test_a_native_death_shows_its_message(log: JobLog) -> None:
    """For example, a rank waits in NCCL for other ranks until its group's timeout."""
    log.log_path(1).write_text(WATCHDOG)
    text = str(failure_of(died(-6), {0: 40, 1: 41}, log, 0).error)
    assert "rank 1 (pid 41) was killed by SIGABRT" in text
    assert "OpType=ALLREDUCE" in text
    assert "ran for 600013 milliseconds before timing out." in text
    assert "    step 5" in text
    assert "frame #" not in text


def test_a_crash_shows_its_evidence(log: JobLog) -> None:
    log.log_path(1).write_text("".join(f"step {i}\n\n" for i in range(9)))
    log.stacks_path(1).write_text(CRASH)
    failure = failure_of(died(-11), {0: 40, 1: 41}, log, 0)
    assert isinstance(failure.error, WorkerDied)
    assert (failure.rank, failure.error.rank, failure.error.exitcode) == (1, 1, -11)
    assert failure.sentence == "rank 1 was killed by SIGSEGV"
    assert str(failure.error).splitlines() == [
        "rank 1 (pid 41) was killed by SIGSEGV.",
        "Native code accessed invalid memory; on small hosts this can also mean that memory ran out. The process's "
        "Python stack names the library: update the library, or run the function with num_processes=1 to find the "
        "cause.",
        "Its last lines:",
        *(f"    step {i}" for i in range(4, 9)),
        "Its Python stack, innermost first:",
        "    /home/me/train.py, line 7 in step",
        "    /home/me/train.py, line 3 in train",
        f"rank 1 (pid 41) on {socket.gethostname()}; complete log: {log.log_path(1)}",
        "rank 0: stopped by the launcher",
    ]


def test_an_abort_in_the_functions_own_code_is_no_mismatch(log: JobLog) -> None:
    """A backend aborts in its own threads, which have no Python frames."""
    group = Group((0, 1), 0, True)
    site = Site("all_reduce", group, "float32", filename="train.py", line=9)
    calls = {
        rank: RankCalls(tuple(Call(i, site, i, i, 4, (), 0.0, 0.0) for i in range(1, 3 - rank)), 2 - rank)
        for rank in range(2)
    }
    report = dataclasses.replace(died(-6), calls=calls)
    assert isinstance(failure_of(report, {1: 41}, log, 0).error, CollectiveMismatch)
    log.stacks_path(1).write_text(CRASH.replace("Segmentation fault", "Aborted"))
    error = failure_of(report, {1: 41}, log, 0).error
    assert isinstance(error, WorkerDied)
    assert "/home/me/train.py, line 7 in step" in str(error)


def test_the_crash_is_found_after_requested_stacks(log: JobLog) -> None:
    asked = 'Current thread 0x00007f2 (most recent call first):\n  File "/home/me/train.py", line 1 in earlier\n\n'
    log.stacks_path(1).write_text(asked + CRASH)
    message = str(failure_of(died(-11), {1: 41}, log, 0).error)
    assert "/home/me/train.py, line 7 in step" in message
    assert "earlier" not in message


def test_requested_stacks_do_not_count_as_a_crash(log: JobLog) -> None:
    log.stacks_path(1).write_text(CRASH.partition("\n\n")[2])
    assert "Its Python stack" not in str(failure_of(died(-9), {1: 41}, log, 0).error)


def test_memory_evidence_replaces_guesses(log: JobLog) -> None:
    report = died(-9)
    record = MemoryRecord()
    report.host_memory = {
        rank: HostMemory(rank, 1.0, 1_000_000, peak_bytes=(2 + rank) * 1_000_000_000) for rank in range(2)
    }
    # Pretend that the system counted one kill fewer when the attempt began.
    record.before = dataclasses.replace(record.before, oom_kills=record.before.oom_kills - 1)
    report.memory = record
    report.last_readings = [
        SlotReading(0, built_bytes=1_500_000_000),
        SlotReading(1, built_bytes=1_500_000_000),
    ]
    message = str(failure_of(report, {1: 41}, log, 0).error)
    assert "Memory ran out: the system killed 1 process of this job." in message
    assert "rank 0 2.00 GB, rank 1 3.00 GB" in message
    assert "2 processes each built a model of 1.50 GB" in message
    assert "most often the system" not in message


def test_an_exception_keeps_its_type_and_gets_notes(log: JobLog) -> None:
    failure = failure_of(raised(KeyError("lr")), {1: 41}, log, 0, ["attempt 0: rank 0 raised OSError: x"])
    assert type(failure.error) is KeyError
    assert failure.headline == "KeyError: 'lr'"
    assert failure.sentence == "rank 1 raised KeyError: 'lr'"
    assert failure.error.__notes__ == [  # type: ignore[attr-defined]
        f"rank 1 (pid 41) on {socket.gethostname()}; complete log: {log.log_path(1)}",
        "rank 0: finished",
        "attempt 0: rank 0 raised OSError: x",
    ]


def test_a_rejected_allocation_is_explained_in_the_notes(log: JobLog) -> None:
    report = raised(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    report.memory = MemoryRecord()
    report.host_memory = {1: HostMemory(1, 1.0, 1_000_000, peak_bytes=3_000_000_000)}
    notes = failure_of(report, {1: 41}, log, 0).error.__notes__  # type: ignore[attr-defined]
    assert notes[0] == "Memory ran out: an allocation failed."
    assert "Peak memory of each process: rank 1 3.00 GB." in notes


def test_device_evidence_replaces_host_memory(log: JobLog) -> None:
    report = raised(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    lines = ("GPU memory ran out on cuda:1: 12 GiB allocated.", "Try a smaller batch.")
    report.failed[1] = dataclasses.replace(report.failed[1], evidence=lines)
    report.memory = MemoryRecord()
    notes = failure_of(report, {1: 41}, log, 0).error.__notes__  # type: ignore[attr-defined]
    assert notes[:2] == ["rank 1: GPU memory ran out on cuda:1: 12 GiB allocated.", "Try a smaller batch."]
    assert not any("Host memory" in note for note in notes)


def test_a_stopped_hang_is_reported(log: JobLog) -> None:
    report = died(-15)
    report.signalled = {0: 1.0, 1: 1.0}
    lines = ("rank 0: waiting in barrier, train.py, line 3", "rank 1: train.py, line 9")
    headline = "rank 1 did not enter the collective that rank 0 is waiting in"
    report.hang = Hang((1,), headline, lines, "Look for a branch.")
    failure = failure_of(report, {}, log, 0)
    assert isinstance(failure.error, JobHung)
    assert failure.rank == 1
    assert failure.sentence.startswith(headline)
    assert str(failure.error).splitlines()[1:] == [
        *lines,
        "Look for a branch.",
        f"complete logs: {log.attempt_path(0)}",
    ]


def test_a_rank_killed_by_the_launcher_is_reported(log: JobLog) -> None:
    report = AttemptReport(returned={0: Returned(0, 1.0)}, signalled={1: 1.5})
    report.exits = {0: (ExitStatus(0), 1.0), 1: (ExitStatus(-9), 2.0)}
    failure = failure_of(report, {}, log, 0)
    assert failure.sentence == "rank 1 was killed by SIGKILL"
