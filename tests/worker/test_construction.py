"""Models built inside workers: counted, and one after the other where memory is tight."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from nblaunch.events import WorkerState
from nblaunch.host import memory
from nblaunch.wire import turns
from nblaunch.wire.board import Slot, create_memory_file, private_slot
from nblaunch.worker import construction
from nblaunch.worker.construction import Construction

MIB = 1 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    made = create_memory_file("turns")
    yield made
    os.close(made)


class _Worker:
    """One of four workers, on a host with so much memory left."""

    def __init__(
        self, fd: int, monkeypatch: pytest.MonkeyPatch, available: int | None, moves: bool = True
    ) -> None:
        monkeypatch.setattr(memory, "limit_and_available", lambda: (available, available))
        self.slot: Slot = private_slot()
        self.notes: list[str] = []
        self.construction = Construction(self.slot, fd, 4, moves, self.notes.append)
        self._fd = fd

    def build(self, mib: int) -> None:
        for _ in range(mib // 16):
            self.construction.add(16 * MIB)

    @property
    def has_turn(self) -> bool:
        """Whether another process can't have it."""
        pid = os.fork()
        if pid == 0:
            os._exit(int(turns.take_building_turn(self._fd, 0)))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_small_models_and_large_hosts_take_no_turns(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small = _Worker(fd, monkeypatch, available=100 * MIB)
    small.build(48)
    assert not small.has_turn
    large = _Worker(fd, monkeypatch, available=100_000 * MIB)
    large.build(2048)
    assert not large.has_turn
    unknown = _Worker(fd, monkeypatch, available=None)
    unknown.build(2048)
    assert not unknown.has_turn
    staying = _Worker(fd, monkeypatch, available=100 * MIB, moves=False)
    staying.build(2048)
    assert not staying.has_turn, "its models stay on the host: one after the other takes as much"
    assert staying.slot.built_bytes == 2048 * MIB


def test_a_big_model_on_a_small_host_takes_the_turn_until_it_has_moved(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = _Worker(fd, monkeypatch, available=1000 * MIB)
    worker.build(64)
    assert not worker.has_turn, "four times 64 MiB more would fit"
    worker.build(64)
    assert worker.has_turn
    assert len(worker.notes) == 1
    assert "notebook_launcher(function, (model,))" in worker.notes[0]
    worker.construction.end()
    assert not worker.has_turn
    worker.build(64)
    assert not worker.has_turn, "the next model is another one"
    worker.build(64)
    assert worker.has_turn
    worker.construction.end()


def _while_another_has_the_turn(fd: int, then: Callable[[], None]) -> None:
    said, saying = os.pipe()
    pid = os.fork()
    if pid == 0:
        turns.take_building_turn(fd, 10)
        os.write(saying, b"x")
        signal.pause()
        os._exit(0)
    os.read(said, 1)
    try:
        then()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(said)
        os.close(saying)


def test_who_waits_in_vain_goes_on(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(construction, "_PATIENCE_S", 0.05)
    worker = _Worker(fd, monkeypatch, available=100 * MIB)
    states: list[WorkerState] = []
    take = turns.take_building_turn

    def watched(fd: int, patience_s: float) -> bool:
        states.append(worker.slot.state)
        return take(fd, patience_s)

    monkeypatch.setattr(turns, "take_building_turn", watched)
    worker.slot.set_state(WorkerState.RUNNING)
    _while_another_has_the_turn(fd, lambda: worker.build(2048))
    assert states == [WorkerState.WAITING], "once is enough"
    assert worker.slot.state is WorkerState.RUNNING
    worker.construction.end()


def test_parameters_are_seen_as_modules_get_them(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = _Worker(fd, monkeypatch, available=None)
    worker.construction.watch()
    hooks = torch.nn.modules.module._global_parameter_registration_hooks
    try:
        nn.Linear(16, 16)
        assert worker.slot.built_bytes == (16 * 16 + 16) * 4
        with torch.device("meta"):
            nn.Linear(1 << 14, 1 << 14)
        assert worker.construction._built == (16 * 16 + 16) * 4, "what is on no device takes no memory"
    finally:
        hooks.popitem()
