"""Simulated jobs, for tests that need a view, or events for a dashboard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nblaunch.dashboard.fold import fold, fold_readings
from nblaunch.dashboard.view import JobView
from nblaunch.events import (
    AttemptStarted,
    Event,
    ExceptionInfo,
    Exited,
    ExitStatus,
    Failed,
    FrameInfo,
    JobEnded,
    Returned,
    Started,
    WorkerState,
)
from nblaunch.wire.board import MAX_BINS, LossCurve, SlotReading

START_S = 1_000.0


@dataclass
class Clock:
    """A clock that tests advance."""

    now_s: float = 50.0

    def __call__(self) -> float:
        return self.now_s


def started(num_processes: int, **fields: object) -> list[Event]:
    """Return the events of a job whose workers have all started."""
    job = {"function_name": "train", "backend": "cpu", "start_method": "fork", "log_dir": "/logs/train-1"}
    begin = AttemptStarted(-1, START_S, num_processes=num_processes, **{**job, **fields})  # type: ignore[arg-type]
    return [begin, *(Started(rank, START_S, pid=100 + rank) for rank in range(num_processes))]


def ended(num_processes: int, seconds: float = 12.0) -> list[Event]:
    """Return the events with which all workers return and exit."""
    at_s = START_S + seconds
    events: list[Event] = [Returned(rank, at_s) for rank in range(num_processes)]
    events += [Exited(rank, at_s) for rank in range(num_processes)]
    return [*events, JobEnded(-1, at_s)]


def raised(rank: int, message: str = "bad shape", **fields: object) -> Failed:
    frame = FrameInfo("/tmp/ipykernel_1/2.py", 9, "train", "loss = model(batch)")
    info = ExceptionInfo("builtins.ValueError", message, (frame,))
    return Failed(rank, START_S + 3, info=info, **fields)  # type: ignore[arg-type]


def killed(rank: int, code: int) -> Exited:
    return Exited(rank, START_S + 4, status=ExitStatus(code))


def view_of(events: Iterable[Event], view: JobView | None = None) -> JobView:
    view = view or JobView()
    for event in events:
        view = fold(view, event)
    return view


def trained(num_processes: int, steps: int = 100, total: int = 1000) -> JobView:
    """Return a job within its first epoch: 10 steps a second, 32 samples a step, a falling loss."""
    view = view_of(started(num_processes))
    for step in range(0, steps + 1, 5):
        view = fold_readings(
            view, [sample(rank, step, total) for rank in range(num_processes)], START_S + step / 10
        )
    return view


def sample(rank: int, step: int, total: int = 1000, **fields: object) -> SlotReading:
    width = 1
    while step // width > MAX_BINS:
        width *= 2
    values = {
        "state": WorkerState.TRAINING,
        "samples": 32 * step,
        "loss": 1.0 / (step + 1),
        "losses": LossCurve(step, width, tuple(1.0 / end for end in range(width, step + width, width))),
        "step_time_s": 5.0 + step / 10,
        "epoch": 1,
        "num_epochs": 1,
        "loop": 1,
    }
    return SlotReading(rank, step=step, total=total, **{"steps_done": step, **values, **fields})  # type: ignore[arg-type]
