"""The folder of a detached job and its socket: private to their user."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
import torch

import nblaunch
from nblaunch import cli
from nblaunch.dashboard.fold import fold
from nblaunch.dashboard.view import JobView
from nblaunch.detached import folder as folders
from nblaunch.detached import follower, requests
from nblaunch.detached.folder import End, JobFolder, Record, Snapshot
from nblaunch.detached.job_process import Recorder
from nblaunch.errors import ResultError
from nblaunch.events import AttemptStarted, Event, Fact, HostMemory, JobEnded, LogLines, Note
from nblaunch.host import descriptors
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.requests import JobRequests
from nblaunch.spec import LaunchSpec
from nblaunch.wire import exceptions
from nblaunch.wire.board import SlotReading
from nblaunch.wire.channel import EventReceiver
from tests.no_descriptors import no_descriptor_left


def _new_folder(parent: Path) -> JobFolder:
    path = parent / "job"
    path.mkdir(mode=0o700)
    return JobFolder(path)


def _bare_record() -> Record:
    """Return a record without any of its fields, as one that had others is loaded."""
    return object.__new__(Record)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBLAUNCH_LOG_DIR", str(tmp_path))
    return tmp_path


def test_there_are_no_jobs_at_first() -> None:
    assert nblaunch.jobs() == []
    with pytest.raises(LookupError, match="no job"):
        nblaunch.attach()


def test_a_folder_that_is_open_to_others_is_refused(own_folder: Path) -> None:
    path = folders.root()
    path.chmod(0o750)
    for look in (nblaunch.jobs, nblaunch.attach):
        with pytest.raises(PermissionError, match="chmod 700"):
            look()


def test_a_folder_of_another_user_is_refused(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folders.root()
    monkeypatch.setattr(folders.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="no folder of this user"):
        JobFolder(path)


def test_a_link_is_no_folder_of_jobs(own_folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (own_folder / "detached").symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        nblaunch.jobs()


@pytest.mark.parametrize(
    "record",
    [
        b"cnblaunch.detached.gone\nRecord\n.",
        b"cnblaunch.detached.folder\nGone\n.",
        pickle.dumps(_bare_record()),
    ],
    ids=["module", "class", "field"],
)
def test_a_job_of_another_version_is_listed_and_refused(
    record: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folders.root() / "train-3f9a2c"
    path.mkdir(mode=0o700)
    (path / "record").write_bytes(record)
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


def test_a_job_that_another_process_prunes_while_jobs_are_listed_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("train-3f9a2c", "pruned-4f9a2c"):
        path = folders.root() / name
        path.mkdir(mode=0o700)
        (path / "record").write_bytes(b"cnblaunch.detached.gone\nRecord\n.")
    check = folders.check_private

    def prune(path: Path) -> None:
        if path.name == "pruned-4f9a2c":
            shutil.rmtree(path)
        check(path)

    monkeypatch.setattr(folders, "check_private", prune)
    assert [one.id for one in nblaunch.jobs()] == ["train-3f9a2c"]


def test_what_could_be_pickled_of_a_large_value_is_in_the_error(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is too large to travel with the error itself."""
    monkeypatch.setattr(exceptions, "_MAX_BYTES", 1000)
    folder = JobFolder(folders.root())
    value = {"weights": torch.arange(1000), "lock": "<Unpicklable>"}
    error = ResultError("rank 1's return value can't be pickled: ...", partial=value)
    recorder = Recorder(folder, lambda: JobOutcome("done", error, values={0: None, 1: value}))
    recorder.on_event(JobEnded(-1, 1.0, "done"))
    descriptors.close(recorder._sender.fd)
    end = folder.load(End)
    assert end is not None
    read = follower._outcome_of(folder, end).error
    assert isinstance(read, ResultError)
    assert torch.equal(read.partial["weights"], value["weights"])
    assert read.partial["lock"] == value["lock"]


class _Ticks:
    """Notes in which order lines and ticks reach a listener."""

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
    """Else listeners would hold all of it until its end."""
    path = folders.root() / "train-3f9a2c"
    path.mkdir(mode=0o700)
    folder = JobFolder(path)
    spec = LaunchSpec(print, num_processes=1, backend="cpu")
    plan = plan_launch(spec).settings
    folder.write(
        Record(spec.without_call(), "cpu", b"", plan, {}, socket.gethostname(), pid=1, started_s=1.0)
    )
    recorder = Recorder(folder, lambda: JobOutcome("done"))
    recorder.on_event(AttemptStarted(-1, 1.0, "print", 1))
    recorder.on_event(JobEnded(-1, 2.0, "done"))
    descriptors.close(recorder._sender.fd)
    folder.log_path(0).parent.mkdir()
    folder.log_path(0).write_text("a line\n" * 500_000)  # read in portions of 1 MiB
    listener = _Ticks()
    followed = follower.JobFollower(folder, [listener])
    followed.follow()
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
    server = requests.RequestServer(own_folder, made)
    yield made
    server.close()
    made.close()


def test_requests_are_served_through_paths_of_any_length(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    made = _Requests()
    server = requests.RequestServer(folder, made)
    remote = requests.RemoteRequests(folder)
    remote.stop()
    assert made.stopped.wait(10)
    assert remote.ask_stacks().result(10) == "no worker of the job runs"
    remote.interrupt()
    assert made.interrupts == remote.interrupts == 1
    server.close()
    made.close()
    assert not requests.is_served(folder)
    remote.stop()  # has no effect any more


def test_requests_of_another_user_are_ignored(
    own_folder: Path, server: _Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests.os, "getuid", lambda: os.geteuid() + 1)
    assert not requests.is_served(own_folder)  # a client takes no answer of another user's process
    with socket.socket(socket.AF_UNIX) as client, requests._address_in(own_folder) as address:
        client.connect(address)
        with suppress(BrokenPipeError):  # it has been refused already
            client.sendall(b"stop")
        client.settimeout(10)
        assert _read(client) == b""
    assert not server.stopped.is_set()
    monkeypatch.undo()


def _read(client: socket.socket) -> bytes:
    try:
        return client.recv(100)
    except ConnectionResetError:  # closed with what was sent unread
        return b""


def test_nonsense_does_not_end_the_service(own_folder: Path, server: _Requests) -> None:
    for request in (b"stop now", b"\xff\xfe", b"format c:"):
        with socket.socket(socket.AF_UNIX) as client, requests._address_in(own_folder) as address:
            client.connect(address)
            client.sendall(request)
            client.settimeout(10)
            assert b"ok" not in _read(client)
    requests.RemoteRequests(own_folder).stop()
    assert server.stopped.wait(10)


class _SlowRequests(_Requests):
    """Answers where the ranks are when a stop is requested, and not before."""

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


def test_a_stop_does_not_wait_until_the_stacks_are_known(own_folder: Path) -> None:
    made = _SlowRequests()
    server = requests.RequestServer(own_folder, made)
    remote = requests.RemoteRequests(own_folder)
    stacks = remote.ask_stacks()
    assert made.asked.wait(10)
    remote.stop()
    assert stacks.result(20) == "in the loop"
    server.close()
    made.close()


def test_requests_are_served_after_descriptors_have_run_out(
    own_folder: Path, server: _Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()

    def refuse(listening: socket.socket) -> None:
        refused.set()
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", refuse)
        requests.RemoteRequests(own_folder).interrupt()  # the server waits for this one already
        assert refused.wait(10)
    requests.RemoteRequests(own_folder).stop()
    assert server.stopped.wait(10)


def test_a_job_process_that_takes_no_requests_for_a_while_still_runs(own_folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, requests._address_in(own_folder) as address:
        listening.bind(address)
        listening.listen(0)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(address)
            assert requests.is_served(own_folder)


def test_weights_and_values_come_back_as_they_were(own_folder: Path) -> None:
    folder = _new_folder(own_folder)
    weight = torch.arange(2048.0)
    states = {0: {"weight": weight, "tied": weight, "_extra_state": {"seen": 3}}, "args[1]['a']": {}}
    recorder = Recorder(folder, lambda: JobOutcome("done", values={0: 7}, unloaded_weights=states))
    recorder.on_event(JobEnded(-1, 1.0, "done"))
    descriptors.close(recorder._sender.fd)
    assert 8192 < folder.weights_path.stat().st_size < 16384, "what is tied is written once"
    end = folder.load(End)
    assert end is not None
    outcome = follower._outcome_of(folder, end)
    assert (outcome.error, dict(outcome.values)) == (None, {0: 7})
    state = outcome.unloaded_weights[0]
    assert torch.equal(state["weight"], weight)
    assert state["tied"] is state["weight"]
    assert state["_extra_state"] == {"seen": 3}
    assert outcome.unloaded_weights["args[1]['a']"] == {}
    folder.weights_path.unlink()
    assert dict(follower._outcome_of(folder, end).unloaded_weights) == {}
    shutil.rmtree(folder.path)
    for stored in (
        follower._outcome_of(folder, end).values,
        follower._outcome_of(folder, end).unloaded_weights,
    ):
        with pytest.raises(ResultError):
            dict(stored)


def test_weights_that_cannot_be_written_do_not_cost_the_result(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _new_folder(own_folder)
    states = {0: {"weight": torch.zeros(8)}}
    recorder = Recorder(folder, lambda: JobOutcome("done", values={0: 7}, unloaded_weights=states))
    replace_file = JobFolder.replace

    def refuse_weights(folder: JobFolder, path: Path, write: Callable[[IO[bytes]], object]) -> None:
        if path == folder.weights_path:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(folder, path, write)

    monkeypatch.setattr(JobFolder, "replace", refuse_weights)
    recorder.on_event(JobEnded(-1, 1.0, "done"))
    descriptors.close(recorder._sender.fd)
    end = folder.load(End)
    assert end is not None
    outcome = follower._outcome_of(folder, end)
    assert (outcome.error, dict(outcome.values)) == (None, {0: 7})
    with pytest.raises(ResultError, match="weights"):
        dict(outcome.unloaded_weights)


def test_a_moment_without_descriptors_is_no_end_of_a_job(own_folder: Path, server: _Requests) -> None:
    folder = _new_folder(own_folder)
    folder.write(Snapshot(1.0, (), ()))
    loaded: list[Snapshot | None] = []
    reader = threading.Thread(target=lambda: loaded.append(folder.load(Snapshot, is_patient=True)))
    with no_descriptor_left():
        assert requests.is_served(own_folder)
        reader.start()
        with pytest.raises(OSError, match="open files"):
            folder.load(Snapshot)
        assert not loaded
    reader.join(10)
    assert loaded == [Snapshot(1.0, (), ())]


def test_one_that_attaches_late_sees_the_peak_of_memory(own_folder: Path) -> None:
    folder = _new_folder(own_folder)
    recorder = Recorder(folder, lambda: None)
    for time_s, taken in ((1.0, 50), (2.0, 5)):
        recorder.on_event(HostMemory(0, time_s, taken, peak_bytes=50, job_peak_bytes=50))
    recorder.on_readings([])
    descriptors.close(recorder._sender.fd)
    snapshot = folder.load(Snapshot)
    assert snapshot is not None
    view = fold(JobView(), AttemptStarted(-1, 1.0, "train", 1))
    for event in snapshot.samples:
        view = fold(view, event)
    assert (view.ranks[0].host_bytes, view.ranks[0].host_peak_bytes, view.host_peak_bytes) == (5, 50, 50)


def test_events_that_the_disk_has_no_room_for_cost_no_others(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _new_folder(own_folder)
    recorder = Recorder(folder, lambda: None)
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
        recorder.on_event(Note.of_job("lost"))
    recorder.on_event(Fact(-1, 0.0, "last", "y"))
    receiver = EventReceiver(os.open(folder.events_path, os.O_RDONLY))
    assert [event.name for event in receiver.receive()[0] if isinstance(event, Fact)] == ["first", "last"]
    receiver.close()
    descriptors.close(recorder._sender.fd)
