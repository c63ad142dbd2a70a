"""Interrupts at any line of a wait for a background job, and of reading its result: nothing is lost."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nblaunch
from nblaunch import Job, notebook_launcher
from tests.signals_at_lines import with_signal_at_line

pytestmark = [pytest.mark.usefixtures("first_store")]

VALUE = {"accuracy": 0.5}


ATTACH_STRIDE = 61
"""Lines between two interrupts of ``attach``; a prime, because otherwise the same lines of a loop would be hit."""


def work(model: torch.nn.Module, gate: str) -> dict[str, float]:
    """Wait for the gate; return a value and weights of 1."""
    with open(gate):
        pass
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    return VALUE


def _interrupted_everywhere(
    call: Callable[[], Any], ends_with: type[BaseException] | None = None, stride: int = 1
) -> Iterator[str]:
    """Interrupt ``call`` before each line of Python that it runs, and yield the line."""
    for number in itertools.count(1, stride):
        place, error = with_signal_at_line(number, signal.SIGINT, call, folder="")
        if not place:
            assert error is None or type(error) is ends_with, error
            assert number > 10, "few lines have run"
            return
        assert type(error) is KeyboardInterrupt, (place, error)
        yield place


@pytest.mark.leaves_behind("an interrupt between two lines may leave a file open that was opened for reading")
@pytest.mark.parametrize("is_detached", [False, True], ids=["of this process", "detached"])
def test_an_interrupt_at_any_line_of_a_wait_loses_nothing(
    is_detached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBLAUNCH_LOG_DIR", str(tmp_path))
    gate, model = str(tmp_path / "gate"), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    os.mkfifo(gate)
    job: Job[Any] = notebook_launcher(
        work, (model, gate), 1, backend="cpu", background=True, detach=is_detached, dashboard="none"
    )
    list(_interrupted_everywhere(lambda: job.result(0.01), TimeoutError))
    open(gate, "w").close()
    assert job.result(200) == VALUE
    list(_interrupted_everywhere(job.result))
    assert job.result() == VALUE
    if not is_detached:
        assert all(parameter.eq(1).all() for parameter in model.parameters())
        return
    list(_interrupted_everywhere(job.weights))
    model[1].register_load_state_dict_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        job.load_weights(model)
    assert all(parameter.eq(1).all() for parameter in model.parameters())


def test_an_interrupt_at_any_line_of_attach_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBLAUNCH_LOG_DIR", str(tmp_path))
    gate, model = str(tmp_path / "gate"), torch.nn.Linear(2, 2)
    os.mkfifo(gate)
    job: Job[Any] = notebook_launcher(
        work, (model, gate), 1, backend="cpu", background=True, detach=True, dashboard="none"
    )
    for place in _interrupted_everywhere(
        lambda: nblaunch.attach(job.id, dashboard="none"), None, ATTACH_STRIDE
    ):
        nblaunch.attach(job.id, dashboard="none").detach()  # the next call starts again
        assert not [thread for thread in threading.enumerate() if thread.name == f"nblaunch-{job.id}"], place
    open(gate, "w").close()
    assert nblaunch.attach(job.id, dashboard="none").result(180) == VALUE
