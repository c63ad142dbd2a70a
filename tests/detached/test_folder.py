"""The folder and the socket of a detached job, both private to their user."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nblaunch
from nblaunch import cli
from nblaunch.dashboard.fold import fold
from nblaunch.dashboard.view import JobView
from nblaunch.detached import follower, listing, requests
from nblaunch.detached.folder import JobFolder, Launch, Snapshot, open_home, own_layout
from nblaunch.detached.record import FORMAT, Record
from nblaunch.detached.recorder import Recorder
from nblaunch.detached.requests import Endpoint
from nblaunch.errors import JobLost, NblaunchError, ResultError
from nblaunch.events import AttemptStarted, Event, Fact, HostMemory, JobEnded, LogLines, Started
from nblaunch.host import files
from nblaunch.host.machine import ProcessMark, ProcessState
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.requests import JobRequests
from nblaunch.spec import LaunchSpec
from nblaunch.wire import exceptions, schema
from nblaunch.wire.board import SlotReading
from nblaunch.wire.channel import EventReceiver
from tests.no_descriptors import no_descriptor_left


def _record(job_id: str = "train-3f9a2c", **changes: Any) -> Record:
    settings = {
        "format": FORMAT, "version": "0.1.0", "layout": own_layout(), "id": job_id,
        "function_name": "train", "num_processes": 1, "backend": "cpu",
        "process": ProcessMark.own(), "address": "", "started_s": 1.0,
    }  # fmt: skip
    return Record(**{**settings, **changes})


def _launch() -> Launch:
    spec = LaunchSpec(print, num_processes=1, backend="cpu")
    return Launch(spec.without_call(), b"", plan_launch(spec).settings, {})


@contextmanager
def recorded(
    outcome: JobOutcome | None = None,
    job_id: str = "train-3f9a2c",
    requests: JobRequests | None = None,
    **changes: Any,
) -> Iterator[tuple[JobFolder, Recorder]]:
    """Yield the folder of a job and its writer, as the job process uses them."""
    home = open_home()
    log = JobLog(str(home.path), job_id)
    requests = requests or JobRequests()
    recorder = Recorder(
        JobFolder(log.path), log, _record(job_id, **changes), _launch(), lambda: outcome, requests
    )
    recorder.publish()
    try:
        yield recorder._folder, recorder
    finally:
        recorder.close()
        log.end()
        requests.close()


def _ended(outcome: JobOutcome, job_id: str = "train-3f9a2c") -> JobFolder:
    """Return the folder of a job with this outcome."""
    with recorded(outcome, job_id) as (folder, recorder):
        recorder.on_event(AttemptStarted(-1, 1.0, "train", 1))
        recorder.on_event(JobEnded(-1, 2.0, outcome.status, message=outcome.message))
    return folder


def _outcome(folder: JobFolder) -> JobOutcome:
    end = folder.load_end()
    assert end is not None
    return follower._outcome_of(folder, end)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBLAUNCH_LOG_DIR", str(tmp_path))
    return tmp_path


def test_the_list_of_jobs_starts_empty() -> None:
    assert nblaunch.jobs() == []
    with pytest.raises(LookupError, match="no job"):
        nblaunch.attach()


def test_a_folder_that_is_open_to_others_is_rejected() -> None:
    open_home().path.chmod(0o750)
    for look in (nblaunch.jobs, nblaunch.attach, open_home):
        with pytest.raises(PermissionError, match="chmod 700"):
            look()


def test_a_folder_of_another_user_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _ended(JobOutcome("done"))
    monkeypatch.setattr(files.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="not a folder of this user"):
        folder.load_end()


def test_a_link_as_the_jobs_folder_is_rejected(own_folder: Path) -> None:
    folder = _ended(JobOutcome("done"))
    folder.path.parent.rename(own_folder / "elsewhere")
    folder.path.parent.symlink_to(own_folder / "elsewhere")
    with pytest.raises(PermissionError):
        nblaunch.jobs()


RAN: list[str] = []


class Hostile:
    """An object of another user that leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RAN.append, ("this ran",)


def test_swapped_folder_is_not_read(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users may rename entries of the parent folder: nblaunch reads only what it checked, whenever they
    rename.
    """
    folder = _ended(JobOutcome("done", values={0: 7}))
    hostile = own_folder / "hostile"
    (hostile / folder.id).mkdir(parents=True)
    for name in ("record.json", "end.json"):
        shutil.copy(folder.path / name, hostile / folder.id / name)
    for name in ("launch", "snapshot", "events", "result", "error"):
        (hostile / folder.id / name).write_bytes(pickle.dumps(Hostile()))
    hostile.chmod(0o755)
    status = os.fstat

    def swap_after(fd: int) -> os.stat_result:
        result = status(fd)
        if folder.path.parent.exists() and hostile.exists():
            folder.path.parent.rename(own_folder / "before")
            hostile.rename(folder.path.parent)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fstat", swap_after)
        (listed,) = nblaunch.jobs() or [None]
    for look in (nblaunch.jobs, nblaunch.attach):
        with pytest.raises(PermissionError):
            look()
    assert RAN == []
    assert listed is None or listed.status in ("done", "damaged")


@pytest.mark.parametrize("name", ["launch", "events"])
def test_a_job_without_a_file_is_rejected(name: str) -> None:
    (_ended(JobOutcome("done", values={0: 7})).path / name).unlink()
    with pytest.raises(LookupError, match=name):
        nblaunch.attach(dashboard="none")


@pytest.mark.parametrize("name", ["launch", "snapshot", "events", "result", "error"])
def test_unsigned_pickles_are_not_read(name: str) -> None:
    """This holds even in the right folder, for example one that was restored from another user's archive."""
    error = None if name == "result" else ValueError("nan")
    folder = _ended(JobOutcome("done" if error is None else "failed", error, values={0: 7}))
    (folder.path / name).write_bytes(bytes(32) + pickle.dumps(Hostile()))
    assert [one.status for one in nblaunch.jobs()] == ["done" if error is None else "failed"]
    with suppress(LookupError, NblaunchError, ValueError):
        job = nblaunch.attach(dashboard="none")
        job.wait(180)
        job.exception(), job.weights(), job.result()
    assert RAN == []


def test_signed_pickles_cannot_be_moved() -> None:
    first, second = (
        _ended(JobOutcome("done", values={0: one}, unloaded_weights={0: {}}), f"train-{one}")
        for one in (1, 2)
    )
    shutil.copy(first.path / "result", second.path / "result")
    shutil.copy(first.path / "result", first.path / "weights")
    for job_id, load in ((second.id, lambda job: job.result()), (first.id, lambda job: job.weights())):
        job = nblaunch.attach(job_id, dashboard="none")
        with pytest.raises(ResultError, match="damaged"):
            load(job)
    assert nblaunch.attach(first.id, dashboard="none").result() == 1


CUT = b'{"format":1,"id":"tra'
DAMAGES = {
    "record.json": [b"", CUT, b"[]", b"\xff\xfe", b"[" * 100_000],
    "end.json": [b"", CUT, b"7"],
    "launch": [b"", b"x" * 100],
    "snapshot": [b"", b"x" * 100],
    "events": [b"", bytes(10_000), b"x" * 10_000],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_job_does_not_hide_others(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = _ended(JobOutcome("done", values={0: 7}), "whole-1")
    damaged = [_ended(JobOutcome("done", values={0: 8}), f"hurt-{i}") for i, _ in enumerate(DAMAGES[name])]
    for folder, data in zip(damaged, DAMAGES[name], strict=True):
        (folder.path / name).write_bytes(data)
    listed = {one.id: one for one in nblaunch.jobs()}
    assert listed[whole.id].status == "done"
    assert len(listed) == 1 + len(damaged)
    assert nblaunch.attach(whole.id, dashboard="none").result() == 7
    assert cli.main(["jobs"]) == 0
    assert cli.main(["attach", whole.id]) == 0
    printed = capsys.readouterr().out
    for folder in damaged:
        one = listed[folder.id]
        if name in ("record.json", "end.json"):
            assert (one.status, name in one.problem) == ("damaged", True)
            assert f"{one.id}: {name} can't be read" in printed
        else:
            assert one.status == "done"
        if name in ("snapshot", "events"):
            assert nblaunch.attach(one.id, dashboard="none").result() == 8
        else:
            with pytest.raises(LookupError, match=f"{one.id} is damaged: {name} .*{one.log_dir}"):
                nblaunch.attach(one.id)
        assert cli.main(["stop", one.id]) == 2
        assert cli.main(["logs", one.id]) in (0, 2)


def test_a_job_of_another_version_is_listed_and_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    folder = _ended(JobOutcome("done", values={0: 7}))
    record = json.loads((folder.path / "record.json").read_text())
    (folder.path / "record.json").write_text(json.dumps({"format": FORMAT + 1, "what": record}))
    (listed,) = nblaunch.jobs()
    assert (listed.id, listed.function_name, listed.status) == ("train-3f9a2c", "train", "other version")
    assert "worker" not in repr(listed)
    with pytest.raises(LookupError, match="another version"):
        nblaunch.attach()
    assert cli.main(["jobs"]) == 0
    assert cli.main(["attach"]) == 2
    printed = capsys.readouterr()
    assert "other version" in printed.out
    assert "another version" in printed.err


def test_only_attachable_jobs_count_as_newest() -> None:
    whole = _ended(JobOutcome("done", values={0: 7}))
    hurt = _ended(JobOutcome("done", values={0: 8}), "hurt-1")
    (hurt.path / "record.json").write_bytes(b"")
    assert nblaunch.attach(dashboard="none").id == whole.id


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"name": "laptop-on-a-train"}, "running"),
        ({"boot_id": "before"}, "on here"),  # it wrote after this machine was started
        ({"id": "another", "boot_id": "other"}, "on here"),
        ({"pid_namespace": "1"}, "lost"),  # in a container whose processes can't answer
    ],
)
def test_machines_are_identified_by_id(changes: dict[str, str], status: str) -> None:
    own = ProcessMark.own()
    process = replace(own, machine=replace(own.machine, **{"name": "here", **changes}))
    with recorded(process=process) as (_, recorder):
        recorder.on_readings([])
        assert [one.status for one in nblaunch.jobs()] == [status]
        if status.startswith("on "):
            with pytest.raises(LookupError, match="another machine, here: attach to it there"):
                nblaunch.attach()


def test_job_processes_are_queried_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "ask", partial(listing.ask, timeout_s=30.0))
    all_asked = threading.Barrier(3)

    def describe(folder: JobFolder) -> str:
        try:
            all_asked.wait(180)
        except threading.BrokenBarrierError:
            return ""
        served = listing.Served(str(folder.path), "", "it waits for room", folder.load_record())
        return schema.dump(served).decode()

    with ExitStack() as stack:
        for number in range(3):
            folder, _ = stack.enter_context(recorded(job_id=f"train-{number}"))
            made = _Requests()
            answer = {"describe": partial(describe, folder)}
            server = requests.RequestServer(Endpoint(folder.path), made, answer)
            stack.callback(made.close)
            stack.callback(server.close)
        assert {job.status for job in nblaunch.jobs()} == {"waiting"}


def test_a_job_runs_once_its_first_worker_starts() -> None:
    with recorded() as (folder, recorder):
        statuses = [nblaunch.jobs()[0].status]
        recorder.on_event(Started(0, 1.0, pid=1))
        statuses.append(nblaunch.jobs()[0].status)
        shutil.rmtree(folder.path)  # before the first reading of the board
        assert recorder.restore() == ""
        statuses.append(nblaunch.jobs()[0].status)
    assert statuses == ["starting", "running", "running"]


def test_a_job_lost_by_a_reboot_says_so() -> None:
    own = ProcessMark.own()
    process = replace(own, machine=replace(own.machine, boot_id="before"))
    with recorded(process=process) as (folder, _):
        pass
    for name in ("record.json", "events"):
        os.utime(folder.path / name, (1.0, 1.0))
    (listed,) = nblaunch.jobs()
    assert (listed.status, listed.problem) == ("lost", "the machine was restarted")
    with pytest.raises(JobLost, match="machine was restarted while"):
        nblaunch.attach(dashboard="none").result(180)


def test_removed_files_of_an_ended_job_are_not_a_kill() -> None:
    with recorded(process=replace(ProcessMark.own(), started=1)) as (folder, _):
        job = follower.JobFollower(folder)
        (folder.path / "record.json").unlink()
        job.start()
        with pytest.raises(JobLost, match="files of train-3f9a2c were removed"):
            job.result(200)


def test_reused_pid_is_not_the_job_process() -> None:
    with recorded(process=replace(ProcessMark.own(), started=1)):
        assert [one.status for one in nblaunch.jobs()] == ["lost"]


def test_job_pruned_during_listing_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("train-3f9a2c", "pruned-4f9a2c"):
        _ended(JobOutcome("done"), name)
    load = JobFolder.load_record

    def prune(folder: JobFolder) -> Record:
        if folder.id == "pruned-4f9a2c":
            shutil.rmtree(folder.path)
        return load(folder)

    monkeypatch.setattr(JobFolder, "load_record", prune)
    assert [one.id for one in nblaunch.jobs()] == ["train-3f9a2c"]


def test_error_contains_picklable_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part is too large to be sent with the error itself."""
    monkeypatch.setattr(exceptions, "_MAX_BYTES", 1000)
    value = {"weights": torch.arange(1000), "lock": "<Unpicklable>"}
    error = ResultError("rank 1's return value can't be pickled: ...", partial=value)
    read = _outcome(_ended(JobOutcome("done", error, values={0: None, 1: value}))).error
    assert isinstance(read, ResultError)
    assert torch.equal(read.partial["weights"], value["weights"])
    assert read.partial["lock"] == value["lock"]


class _Ticks:
    """Records the order in which lines and ticks reach a listener."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, LogLines):
            self.order.append("lines")

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        self.order.append("tick")

    def close(self) -> None:
        self.order.append("close")


def test_a_long_log_is_shown_while_it_is_read() -> None:
    """Otherwise listeners would hold the whole log until its end."""
    folder = _ended(JobOutcome("done"))
    folder.log_path(0).parent.mkdir()
    folder.log_path(0).write_text("a line\n" * 500_000)  # read in portions of 1 MiB
    listener = _Ticks()
    followed = follower.follow(folder, [listener])
    assert followed.ends_within(30)
    first = listener.order.index("lines")
    assert listener.order[first : first + 6] == ["lines", "tick"] * 3


class _Requests(JobRequests):
    """Records that a stop was requested."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = threading.Event()

    def stop(self) -> None:
        super().stop()
        self.stopped.set()


@pytest.fixture
def server(own_folder: Path) -> Any:
    made = _Requests()
    server = requests.RequestServer(Endpoint(own_folder), made)
    yield made
    server.close()
    made.close()


def test_requests_are_served_through_paths_of_any_length(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    made = _Requests()
    server = requests.RequestServer(Endpoint(folder), made)
    remote = requests.RemoteRequests(Endpoint(folder))
    remote.stop()
    assert made.stopped.wait(180)
    assert remote.ask_stacks().result(180) == "no worker of the job is running"
    remote.interrupt()
    assert made.interrupts == remote.interrupts == 1
    server.close()
    made.close()
    assert not Endpoint(folder).is_served()
    remote.stop()  # has no further effect


def test_requests_of_another_user_are_ignored(
    own_folder: Path, server: _Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests.os, "getuid", lambda: os.geteuid() + 1)
    assert not Endpoint(own_folder).is_served()  # a client accepts no reply from another user's process
    with socket.socket(socket.AF_UNIX) as client, requests.address_in(own_folder) as address:
        client.connect(address)
        with suppress(BrokenPipeError):  # the request was already rejected
            client.sendall(b"stop")
        client.settimeout(10)
        assert _read(client) == b""
    assert not server.stopped.is_set()
    monkeypatch.undo()


def _read(client: socket.socket) -> bytes:
    try:
        return client.recv(100)
    except ConnectionResetError:  # closed before the sent bytes were read
        return b""


def test_invalid_requests_do_not_end_the_server(own_folder: Path, server: _Requests) -> None:
    for request in (b"stop now", b"\xff\xfe", b"format c:"):
        with socket.socket(socket.AF_UNIX) as client, requests.address_in(own_folder) as address:
            client.connect(address)
            client.sendall(request)
            client.settimeout(10)
            assert b"ok" not in _read(client)
    requests.RemoteRequests(Endpoint(own_folder)).stop()
    assert server.stopped.wait(180)


class _SlowRequests(_Requests):
    """Returns the positions of the ranks only after a stop was requested."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.stacks: Future[str] = Future()

    def ask_stacks(self) -> Future[str]:
        self.asked.set()
        return self.stacks

    def stop(self) -> None:
        super().stop()
        self.stacks.set_result("in the loop")


def test_a_stop_does_not_wait_for_stacks(own_folder: Path) -> None:
    made = _SlowRequests()
    server = requests.RequestServer(Endpoint(own_folder), made)
    remote = requests.RemoteRequests(Endpoint(own_folder))
    stacks = remote.ask_stacks()
    assert made.asked.wait(180)
    remote.stop()
    assert stacks.result(180) == "in the loop"
    server.close()
    made.close()


def test_requests_are_served_after_descriptors_have_run_out(
    own_folder: Path, server: _Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected = threading.Event()

    def reject(listening: socket.socket) -> None:
        rejected.set()
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", reject)
        # the server already waits for this descriptor
        with pytest.warns(UserWarning, match="did not reply"):
            requests.RemoteRequests(Endpoint(own_folder)).interrupt()
        assert rejected.wait(180)
    requests.RemoteRequests(Endpoint(own_folder)).stop()
    assert server.stopped.wait(180)


def test_a_job_with_a_busy_server_still_runs(own_folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, requests.address_in(own_folder) as address:
        listening.bind(address)
        listening.listen(0)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(address)
            assert Endpoint(own_folder).is_served()


def test_a_request_waits_while_too_many_others_wait(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected = threading.Event()
    sleep = time.sleep

    def sleep_noted(duration_s: float) -> None:
        rejected.set()
        sleep(duration_s)

    monkeypatch.setattr(requests.time, "sleep", sleep_noted)
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as other:
        with requests.address_in(own_folder) as address:
            listening.bind(address)
            listening.listen(0)
            listening.settimeout(10)
            other.connect(address)
        asking = threading.Thread(target=requests.RemoteRequests(Endpoint(own_folder)).stop)
        asking.start()
        assert rejected.wait(180)
        listening.accept()[0].close()
        connection, _ = listening.accept()
        with connection:
            assert connection.recv(100) == b"stop"
            connection.sendall(b"ok")
        asking.join(180)


def test_weights_and_values_come_back_unchanged() -> None:
    weight = torch.arange(2048.0)
    states = {0: {"weight": weight, "tied": weight, "_extra_state": {"seen": 3}}, "args[1]['a']": {}}
    folder = _ended(JobOutcome("done", values={0: 7}, unloaded_weights=states))
    path = folder.path / "weights"
    assert 8192 < path.stat().st_size < 16384, "what is tied is written once"
    outcome = _outcome(folder)
    assert (outcome.error, dict(outcome.values)) == (None, {0: 7})
    state = outcome.unloaded_weights[0]
    assert torch.equal(state["weight"], weight)
    assert state["tied"] is state["weight"]
    assert state["_extra_state"] == {"seen": 3}
    assert outcome.unloaded_weights["args[1]['a']"] == {}
    path.unlink()
    with pytest.raises(ResultError, match="weights was removed"):
        dict(_outcome(folder).unloaded_weights)
    (folder.path / "result").unlink()
    with pytest.raises(ResultError, match="result was removed"):
        nblaunch.attach(dashboard="none").result()
    before = _outcome(folder)
    shutil.rmtree(folder.path)
    for stored in (before.values, before.unloaded_weights):
        with pytest.raises(ResultError):
            dict(stored)


class _Unreadable:
    """An object whose own code raises the error of a full disk."""

    def __reduce__(self) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")


class _Removing:
    """Removes a folder when it is first pickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        if (self._folder / "result").exists():
            shutil.rmtree(self._folder)
        return str, ("pickled",)


def test_a_result_removed_during_saving_is_not_lost(own_folder: Path) -> None:
    folder = open_home().path / "train-3f9a2c"
    weights: Any = {0: {"weight": _Removing(folder)}}
    _ended(JobOutcome("done", values={0: 7}, unloaded_weights=weights))
    outcome = _outcome(JobFolder(folder))
    assert outcome.values[0] == 7
    assert outcome.unloaded_weights[0] == {"weight": "pickled"}


class _Growing:
    """A value for which the disk has no room at first, and during whose writing a user stops the job."""

    requests: JobRequests | None = None

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        requests, _Growing.requests = _Growing.requests, None
        if requests is not None:
            requests.stop()
            raise OSError(errno.ENOSPC, "No space left on device")
        return str, ("written",)


def test_a_stop_before_the_disk_is_known_to_be_full_does_not_discard_the_result() -> None:
    requests = _Growing.requests = JobRequests()
    outcome = JobOutcome("done", values={0: _Growing()})
    with recorded(outcome, requests=requests) as (folder, recorder):
        recorder.on_event(JobEnded(-1, 2.0, "done"))
        assert dict(_outcome(folder).values) == {0: "written"}


def test_an_unwritable_value_keeps_the_rest() -> None:
    states = {0: {"weight": _Unreadable()}}
    outcome = _outcome(_ended(JobOutcome("done", values={0: 7}, unloaded_weights=states)))
    assert (outcome.error, dict(outcome.values)) == (None, {0: 7})
    with pytest.raises(ResultError, match="the trained weights could not be written: OSError"):
        dict(outcome.unloaded_weights)


def test_a_lack_of_descriptors_does_not_end_a_job(server: _Requests, own_folder: Path) -> None:
    with recorded() as (folder, recorder):
        recorder.on_readings([])
        mark, names = ProcessMark.own(), [folder.path / "events", folder.path / "snapshot"]
        looks: list[Callable[[], Any]] = [
            lambda: folder.load(Snapshot),
            lambda: folder.modified("snapshot"),
            lambda: [os.close(folder.opener(str(name), os.O_RDONLY)) for name in names],
        ]
        with ThreadPoolExecutor(len(looks)) as pool:
            assert all(future.result(180) for future in [pool.submit(look) for look in looks])
            with no_descriptor_left():
                assert Endpoint(own_folder).is_served()
                assert mark.state(0.0) is ProcessState.RUNS
                futures = [pool.submit(look) for look in looks]
                assert not wait(futures, 0.1).done
            assert all(future.result(180) for future in futures)


def test_late_followers_see_the_memory_peak() -> None:
    with recorded() as (folder, recorder):
        for time_s, taken in ((1.0, 50), (2.0, 5)):
            recorder.on_event(HostMemory(0, time_s, taken, peak_bytes=50, job_peak_bytes=50))
        recorder.on_readings([])
    snapshot = folder.load(Snapshot)
    assert snapshot is not None
    view = fold(JobView(), AttemptStarted(-1, 1.0, "train", 1))
    for event in snapshot.samples:
        view = fold(view, event)
    assert (view.ranks[0].host_bytes, view.ranks[0].host_peak_bytes, view.host_peak_bytes) == (5, 50, 50)


def _facts(folder: JobFolder) -> list[str]:
    fd = os.open(folder.path / "events", os.O_RDONLY)
    receiver = EventReceiver(fd, key=folder.key("events"))
    names = [event.name for event in receiver.receive()[0] if isinstance(event, Fact)]
    receiver.close()
    return names


def test_events_are_written_when_the_disk_has_space_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with recorded() as (folder, recorder):
        recorder.on_event(Fact(-1, 0.0, "first", "x"))
        write = os.write
        room = [10]

        def write_a_little(fd: int, data: bytes) -> int:
            if not room[0]:
                raise OSError(28, "No space left on device")
            count = write(fd, data[: room[0]])
            room[0] -= count
            return count

        with monkeypatch.context() as patch:
            patch.setattr("nblaunch.wire.channel.os.write", write_a_little)
            recorder.on_event(Fact(-1, 0.0, "second", "y"))
        assert _facts(folder) == ["first"]
        recorder.on_event(Fact(-1, 0.0, "last", "z"))
        assert _facts(folder) == ["first", "second", "last"]


def test_files_that_a_request_restores_while_they_are_written_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process may list jobs before the files of a new one exist."""
    with recorded() as (folder, recorder):
        (folder.path / "record.json").unlink()
        sync = os.fsync
        others: list[threading.Thread] = []

        def restore_first(fd: int) -> None:
            if not others:
                others.append(threading.Thread(target=recorder.restore))
                others[0].start()
                others[0].join(0.3)  # it waits for this thread
            sync(fd)

        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", restore_first)
            recorder.publish()
        others[0].join(180)
        assert folder.load_record() == _record()


def test_events_are_restored_once_the_disk_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded() as (folder, recorder):
        recorder.on_event(Fact(-1, 0.0, "first", "x"))
        (folder.path / "events").unlink()

        def reject(fd: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr("nblaunch.detached.recorder.os.write", reject)
            assert all(recorder.restore() for _ in range(3))
        assert len(os.listdir("/proc/self/fd")) == before
        assert recorder.restore() == ""
        assert _facts(folder) == ["first"]


def test_jobs_are_stored_elsewhere_once_the_home_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("can't mount")
    try:
        monkeypatch.delenv("NBLAUNCH_LOG_DIR")
        monkeypatch.setenv("XDG_STATE_HOME", str(disk))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        before = open_home()
        assert before.path.is_relative_to(disk)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        after = open_home()
        assert not after.path.is_relative_to(disk)
        assert f"{before.path} is not writable" in after.why_temporary
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
