"""Experiment-tracker runs and studies that a cell has started, and what the function logs to them.

wandb        reaches its run from any process, through the service that the kernel started
MLflow       forgets the active run in a fork; a worker adopts the kernel's until the function starts another
trackio      sends a worker's logs from a thread, which the worker must wait for before it exits
TensorBoard  writes from a kernel thread, so a worker begins a new file
Comet        sends from a kernel thread, so what a worker logs is lost, and a note says so
Optuna       keeps a study without a storage in an object, of which each worker has a copy. A note says that the study
             does not receive what the function reports. Studies in files or databases are shared

ClearML and Neptune detect a fork themselves, and SwanLab raises an error. Nothing here imports a tracker.
"""

from __future__ import annotations

import atexit
import inspect
import os
import string
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from nblaunch import packages

_FLUSH_TIMEOUT_S = 30.0
_LOST_BY_COMET = (
    "the Comet experiment that a cell has started never gets what the function logs, because the thread that sends "
    "it runs only in the kernel. Return the values and log them in the kernel, or start the experiment inside the "
    "function on rank 0"
)
_LOST_BY_STUDIES = (
    "an optuna study in the kernel's memory never gets the function's trials, or its calls to report(), "
    "set_user_attr() and suggest_float(). Return the values and record them in the kernel, or store the study "
    "in a file"
)
_STUDY_WRITES = (
    "create_new_study",
    "create_new_trial",
    "set_study_user_attr",
    "set_trial_intermediate_value",
    "set_trial_param",
    "set_trial_state_values",
    "set_trial_user_attr",
)


def watch(warn: Callable[[str], None]) -> None:
    """Connect this worker to the runs of the kernel that forked it; warn if what it logs is lost.

    Args:
        warn: receives a sentence for the user.
    """
    changes: dict[str, Callable[[Any], None]] = {
        "mlflow.tracking.fluent": lambda fluent: take_over_mlflow_runs(fluent, mlflow_runs(fluent)),
        "trackio.run": lambda module: packages.before_first_use(
            module.Run, ["log"], lambda run: atexit.register(_flush, run), includes_new=True
        ),
        "comet_ml.experiment": lambda module: packages.before_first_use(
            module.CometExperiment, ["_enqueue_message"], lambda _: warn(_LOST_BY_COMET)
        ),
        "tensorboard.summary.writer.event_file_writer": lambda module: packages.before_first_use(
            module.EventFileWriter, ["add_event", "flush", "close"], _begin_event_file
        ),
    }
    for name, change in changes.items():
        if name in sys.modules:  # otherwise, the kernel has no runs
            packages.observe_when_imported(name, change)
    # A fresh process gets copies of studies, too.
    packages.observe_when_imported(
        "optuna.storages._in_memory",
        lambda module: packages.before_first_use(
            module.InMemoryStorage, _STUDY_WRITES, lambda _: warn(_LOST_BY_STUDIES)
        ),
    )


# --- wandb -----------------------------------------------------------------------------------------------------------


def take_over_wandb_run(wandb: Any, run: Any) -> None:
    """Attach this process to one of the kernel's runs."""
    set_global = wandb.sdk.lib.module.set_global
    names = inspect.signature(set_global).parameters  # each release adds some
    set_global(**{name: getattr(run, name) for name in names if hasattr(run, name)} | {"run": run})


# --- MLflow ----------------------------------------------------------------------------------------------------------


def mlflow_runs(fluent: Any) -> list[Any]:
    """Return the active runs of this thread, innermost last; in a fork, the runs of the thread that forked.

    Args:
        fluent: the module ``mlflow.tracking.fluent``.
    """
    stack = fluent._active_run_stack
    if isinstance(stack, list):  # before MLflow 2.13
        return list(stack)
    return list(stack.get_all_thread_values().get(threading.get_ident(), ()))


def take_over_mlflow_runs(fluent: Any, runs: Sequence[Any]) -> None:
    """Make the kernel's active runs active in this process, which never ends them.

    The function may still start a run, as in a process that has no active run.
    """
    start, end = fluent.start_run, fluent.end_run
    _set_mlflow_runs(fluent, runs)

    @packages.replaces(fluent, "start_run", sys.modules.get("mlflow"))
    def start_run(*args: Any, **kwargs: Any) -> Any:
        present = mlflow_runs(fluent)
        if not kwargs.get("nested") and present and _is_among(present[-1], runs):
            _set_mlflow_runs(fluent, ())
        return start(*args, **kwargs)

    def end_own_runs() -> None:
        while (present := mlflow_runs(fluent)) and not _is_among(present[-1], runs):
            end()

    atexit.unregister(fluent._safe_end_run)
    atexit.register(end_own_runs)


def _set_mlflow_runs(fluent: Any, runs: Sequence[Any]) -> None:
    stack = fluent._active_run_stack
    if isinstance(stack, list):
        stack[:] = runs
    else:
        stack.set(list(runs))


def _is_among(run: Any, runs: Sequence[Any]) -> bool:
    return any(run is each for each in runs)


# --- trackio and TensorBoard ------------------------------------------------------------------------------------------


def _flush(run: Any) -> None:
    """Wait until the run's thread has sent everything."""
    run._stop_flag.set()
    thread = run._local_sender_thread if run._is_local else run._client_thread
    if thread is not None:
        thread.join(_FLUSH_TIMEOUT_S)


_kernels_writers: list[Any] = []
"""The kernel's writers, kept because they may write to their files when they are freed."""


def _begin_event_file(file: Any) -> None:
    """Begin a new file next to the kernel's, with the same settings; a thread of this process writes it."""
    writer = file._async_writer
    if writer._closed:
        return
    _kernels_writers.append(writer)
    # events.out.tfevents.<time>.<host>.<pid>.<number><suffix>; the pid is the kernel's
    suffix = file._file_name.partition(f".{os.getppid()}.")[2].lstrip(string.digits)
    file.__init__(file._logdir, writer._byte_queue.maxsize, writer._worker._flush_secs, suffix)
    atexit.register(file.close)  # the cell that created the writer closes only the kernel's file
