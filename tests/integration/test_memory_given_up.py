"""An ended job keeps no reference to its call: ``del model`` frees the model, however the job ended."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

PREPARED = """
import gc, threading, weakref
class Big(nn.Linear):
    pass
def made():
    model = Big(300, 300)
    function_keeps = nn.Linear(300, 300)
    def train(model, how="return"):
        function_keeps.weight.sum()
        if how == "raise":
            raise ValueError("no")
        if how == "die":
            os._exit(3)
        if how == "wait":
            print("waits", flush=True)
            threading.Event().wait()
        return {"tensor": torch.zeros(1000)}
    return model, train, [weakref.ref(model), weakref.ref(function_keeps), weakref.ref(model.weight)]
model, train, refs = made()
def left():
    gc.collect()
    return [ref() is not None for ref in refs]
"""
GONE = [False, False, False]


@pytest.mark.parametrize(
    ("method", "dashboard"),
    [("fork", "auto"), ("fork", "widgets"), ("forkserver", "auto"), thorough("spawn", "auto")],
)
def test_blocking_jobs_free_memory(shared: Kernel, method: str, dashboard: str) -> None:
    shared.run(PREPARED)
    shared.run(
        f"value = notebook_launcher(train, (model,), 2, start_method={method!r}, dashboard={dashboard!r})",
        allow_stdin=True,
    )
    cell = shared.run(
        """
del model, train
job = nblaunch.last_job()
(left(), job.result() is value, job.status, job.logs(), job.spec.function_name, job.spec.args, dict(job.plan.modules),
 repr(job), job.weights())
"""
    )
    assert cell.value == (
        GONE, True, "done", "", "made.<locals>.train", (), {},
        "<Job made.<locals>.train on 2 cpu workers, done>", {},
    )  # fmt: skip


@pytest.mark.parametrize("dashboard", ["none", "widgets"])
def test_background_jobs_free_memory(shared: Kernel, dashboard: str) -> None:
    shared.run(PREPARED)
    shared.run(
        f"job = notebook_launcher(train, (model,), 2, background=True, dashboard={dashboard!r}); job.wait()",
        allow_stdin=True,
    )
    cell = shared.run(
        "del model, train; refs.append(weakref.ref(job)); refs.append(weakref.ref(job.result()['tensor'])); left()"
    )
    assert cell.value == [*GONE, True, True]
    # The last job and its result are kept; the job before is not.
    assert shared.run("del job; left()").value == [*GONE, True, True]
    shared.run("notebook_launcher(print, (), 1)")
    assert shared.run("left()").value == [*GONE, False, False]


ENDS = {
    "failed": ("notebook_launcher(train, (model, 'raise'), 2)", "ValueError"),
    "failed by a forkserver": (
        "notebook_launcher(train, (model, 'raise'), 2, start_method='forkserver')",
        "ValueError",
    ),
    "died": ("notebook_launcher(train, (model, 'die'), 2)", "WorkerDied"),
    "could not start": (
        "notebook_launcher(train, (model, threading.Lock()), 2, start_method='spawn')",
        "PayloadError",
    ),
    "cancelled": (
        "job = notebook_launcher(train, (model, 'wait'), 2, background=True); job.cancel(); job.result()",
        "JobCancelled",
    ),
    "inline": ("notebook_launcher(train, (model,), engine='inline')", None),
}


@pytest.mark.parametrize("end", ENDS)
def test_unsuccessful_jobs_free_memory(shared: Kernel, end: str) -> None:
    """IPython keeps the traceback of the last error."""
    source, error = ENDS[end]
    shared.run(PREPARED)
    shared.run(source, raises=error)
    assert shared.run("del model, train; left()").value == GONE


def test_interrupted_jobs_free_memory(shared: Kernel) -> None:
    shared.run(PREPARED)
    cell = shared.submit("notebook_launcher(train, (model, 'wait'), 2)")
    cell.wait_for_text("waits")
    shared.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert shared.run("del model, train; left()").value == GONE


def test_ended_jobs_release_the_call(shared: Kernel) -> None:
    shared.run(PREPARED)
    cell = shared.run(
        """
def train(model):
    print("printed")
    model.extra = nn.Linear(2, 2)
    nblaunch.Accelerator().log({"loss": 1.0})
    return torch.zeros(1000)
value = notebook_launcher(train, (model,), 2)
job = nblaunch.last_job()
kept = [weakref.ref(value), weakref.ref(job.weights()[0]["extra.weight"])]
del value
gc.collect()
before = [ref() is not None for ref in kept]
job.release()
job.release()
gc.collect()
before, [ref() is not None for ref in kept], job.status, job.logs(), len(job.metrics), job.exception()
"""
    )
    assert cell.value == ([True, True], [False, False], "done", "printed\n", 1, None)
    for method in ("result", "results", "weights"):
        gone = shared.run(f"job.{method}()", raises="RuntimeError")
        assert "release() was called" in gone.raised.value


def test_what_a_failed_job_releases(shared: Kernel) -> None:
    shared.run(PREPARED)
    shared.run("notebook_launcher(lambda: [threading.Lock(), torch.zeros(1000)])", raises="ResultError")
    cell = shared.run(
        """
job = nblaunch.last_job()
had = job.exception().partial[1].numel()
job.release()
had, job.exception().partial, job.status
"""
    )
    assert cell.value == (1000, None, "done")
    shared.run("job.result()", raises="ResultError")
    shared.run("notebook_launcher(train, (model, 'raise'), engine='inline')", raises="ValueError")
    # The traceback holds the function's variables for pdb; IPython keeps the traceback until the next error.
    shared.run("nblaunch.last_job().release(); 1 / 0", raises="ZeroDivisionError")
    assert shared.run("del model, train; left()").value == GONE


def test_a_running_job_is_not_released(shared: Kernel) -> None:
    shared.run(PREPARED)
    shared.run("job = notebook_launcher(train, (model, 'wait'), 1, background=True)")
    rejected = shared.run("job.release()", raises="RuntimeError")
    assert "cancel()" in rejected.raised.value
    assert shared.run("job.cancel(); job.wait(); job.release(); job.status").result == "'cancelled'"
