"""Code for a kernel that feeds dashboards with the events of simulated jobs, without starting a process."""

from __future__ import annotations

FEED = """
import threading, time
from nblaunch import dashboard
from nblaunch.events import *
from nblaunch.wire.board import SlotReading
from nblaunch.wire.board import MAX_BINS, LossCurve

def begin(n):
    return [AttemptStarted(-1, time.time(), "train", n, "cpu", "fork", log_dir="/logs/train-1"),
            *(Started(rank, time.time(), pid=1) for rank in range(n))]

def end(n):
    now = time.time()
    return [*(Returned(rank, now) for rank in range(n)), *(Exited(rank, now) for rank in range(n)),
            JobEnded(-1, now)]

def emit(listeners, events):
    for event in events:
        for listener in listeners:
            listener.on_event(event)

def look(listeners, samples):
    for listener in listeners:
        listener.on_readings(samples)

def close(listeners):
    for listener in listeners:
        listener.close()

def run_in_background(listeners):
    # The job ends when the event is set.
    stop = threading.Event()
    def supervise():
        emit(listeners, begin(2))
        step = 0
        while not stop.wait(0.05):
            step += 1
            look(listeners, [SlotReading(rank, WorkerState.TRAINING, step, 1000, step_time_s=time.monotonic(),
                                         steps_done=step) for rank in (0, 1)])
        emit(listeners, end(2))
        close(listeners)
    thread = threading.Thread(target=supervise)
    thread.start()
    return stop, thread
"""
