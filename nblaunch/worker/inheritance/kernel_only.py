"""Removes from a worker what belongs to the kernel alone: exit handlers, interactive mode, ``input()``, messages to
the front end, open figures, child processes, torch's process group.

A fork copies all of these, but not the threads or the other ends of sockets. A fresh interpreter has some of
them once the call is loaded. Only libraries that have been imported are reset, to the state that they have in a freshly
started process. Objects of the kernel that describe its process, or its child processes, adapt to the worker.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import getpass
import multiprocessing.process
import multiprocessing.util
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nblaunch import packages
from nblaunch.backends import process_group
from nblaunch.host import exhaustion
from nblaunch.wire import accelerate_states
from nblaunch.worker import output
from nblaunch.worker.inheritance import pools, threads

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
_abandoned: list[Any] = []
"""Objects of the kernel that this worker has replaced. If they were freed, they might write to files, and the pages of
the kernel's memory that hold them would be copied.
"""


def leave_kernel(kernel_streams: Iterable[Any]) -> None:
    """Turn this process, forked or not, from a kernel into a worker, and reset the libraries that the kernel had
    imported.

    Args:
        kernel_streams: the kernel's ``sys.stdout`` and ``sys.stderr``, which the worker's streams have already
            replaced.
    """
    _drop_exit_handlers()
    _leave_interactive_mode()
    _redirect_kernel_streams(kernel_streams)
    _drop_kernel_messages()
    _forget_figures()
    _stop_profiler()
    output.show_plain_text()
    _disown_processes()
    _watch_children()
    _leave_event_loop()
    pools.renew_at_use()
    os.register_at_fork(after_in_child=_renew_in_child)
    threads.watch()
    accelerate_states.reset_in_worker()
    _renew_trainers()
    process_group.forget_inherited()


def _renew_in_child() -> None:
    """Adapt the child processes and pools that a process inherits when the function forks it from this worker."""
    _watch_children(is_forked_here=True)
    pools.renew_at_use()


def _drop_exit_handlers() -> None:
    """Drop the kernel's exit handlers and finalizers, but keep Python's own handling of finalizers and logs at exit.

    When the worker exits, Python still runs the finalizers and closes the log handlers that the worker created. Python
    has no public names for any of this.
    """
    atexit._clear()
    # For example, a temporary folder belongs to the kernel, even if the worker frees its copy of the object.
    finalize: Any = weakref.finalize
    _abandoned.append(finalize._registry)  # kept, because freeing it would write to each finalizer
    finalize._registry = {}
    finalize._registered_with_atexit = False  # so that the next finalizer registers the handler again
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        # Create a new list, because clearing the kernel's list would write to each of its handlers.
        handlers: list[Any] = _empty_buffering_handlers(logging._handlerList)
        _abandoned.extend((logging._handlerList, logging.shutdown.__defaults__))
        logging._handlerList = handlers
        logging.shutdown.__defaults__ = (handlers,)  # also applies to calls from the user's code
        atexit.register(logging.shutdown)


def _empty_buffering_handlers(references: Iterable[Any]) -> list[Any]:
    """Drop the records that the kernel's log handlers hold in memory, because the kernel will write them.

    Args:
        references: weak references to all the kernel's log handlers.

    Returns:
        References to the handlers that buffer records. At exit, the worker must write the records that it has added to
        them.
    """
    handlers = sys.modules.get("logging.handlers")
    if handlers is None:
        return []
    buffering = []
    for reference in references:
        handler: Any = reference()
        if isinstance(handler, handlers.BufferingHandler):
            _abandoned.append(handler.buffer)
            handler.buffer = []
            buffering.append(reference)
    return buffering


def _leave_interactive_mode() -> None:
    """Hide that this process was an interactive prompt, because Lightning and other libraries refuse to run in one."""
    for name in ("ps1", "ps2"):
        if hasattr(sys, name):
            delattr(sys, name)
    # Lightning checks once, at import. Search for its modules only if it is imported: looking at every loaded module
    # copies 1,400 pages and takes milliseconds in every worker.
    if not sys.modules.keys().isdisjoint(_LIGHTNING):
        for name, module in list(sys.modules.items()):
            if name.startswith(_LIGHTNING) and "_IS_INTERACTIVE" in vars(module):
                module._IS_INTERACTIVE = False  # type: ignore[attr-defined]
    sys.displayhook = sys.__displayhook__
    sys.excepthook = sys.__excepthook__
    # A kernel's own hook skips breakpoint() if no client is attached.
    sys.breakpointhook = sys.__breakpointhook__
    threading.excepthook = threading.__excepthook__


def reject_input(*, is_script: bool) -> None:
    """Make ``input()`` raise an error, because a front end can't ask for several workers at the same time.

    Args:
        is_script: whether the worker runs a script. Only rank 0 reads the script's input; on other ranks,
            ``input()`` raises an EOFError, as libraries expect from a program without input.
    """

    def reject(prompt: object = "", *args: object, **kwargs: object) -> NoReturn:
        if is_script:
            raise EOFError(
                f"input({str(prompt)!r}) was called, but only rank 0 reads standard input. Ask on rank 0 and "
                "broadcast the answer, or pass it as an argument to the script"
            )
        raise RuntimeError(
            f"input({str(prompt)!r}) was called in a worker process, which has no keyboard. Ask before the launch "
            "and pass the answer as an argument. To use a debugger, call breakpoint(), or launch with post_mortem=True "
            "and call nblaunch.debug() after a failure"
        )

    builtins.input = reject
    getpass.getpass = reject
    kernel = _kernel()
    if kernel is not None:  # for cells with ``from getpass import getpass``, which got the kernel's function
        kernel._input_request = reject


def _redirect_kernel_streams(streams: Iterable[Any]) -> None:
    """Redirect log handlers that hold the kernel's streams, because writes to them are slow and name no rank."""
    for stream in streams:
        # IPython 9 records a cell's output with a method of the stream object. There may be no stream at all.
        getattr(stream, "__dict__", {}).pop("write", None)
    iostream: Any = sys.modules.get("ipykernel.iostream")
    if iostream is None:
        return

    def write(self: Any, text: str) -> int:
        stream = sys.stderr if self.name == "stderr" else sys.stdout
        return stream.write(text)

    def flush(self: Any) -> None:
        (sys.stderr if self.name == "stderr" else sys.stdout).flush()

    _abandoned.extend((iostream.OutStream.write, iostream.OutStream.flush))
    # A property takes precedence over the method that IPython sets on a stream object to capture a cell's output, even
    # if the stream is not sys.stdout at the moment.
    iostream.OutStream.write = property(lambda self: functools.partial(write, self), lambda self, value: None)
    iostream.OutStream.flush = flush


def _drop_kernel_messages() -> None:
    """Drop widget messages, which Jupyter's message session rejects in a fork and logs in full."""
    kernel = _kernel()
    if kernel is not None and kernel.session is not None:
        kernel.session.send = lambda *args, **kwargs: None  # as the original returns in a fork


def _kernel() -> Any:
    """Return the kernel that forked this worker; None if there was none."""
    kernelbase: Any = sys.modules.get("ipykernel.kernelbase")
    # Don't call instance(), which would create a kernel if there is none.
    return None if kernelbase is None else kernelbase.Kernel._instance


def _leave_event_loop() -> None:
    """Forget the kernel's event loop, which waits on descriptors that the kernel reads. Python 3.12 does the same."""
    events: Any = sys.modules.get("asyncio.events")
    if events is None or sys.version_info >= (3, 12):
        return
    policy = events._event_loop_policy
    if policy is not None and hasattr(policy, "_local"):
        _abandoned.append(policy._local)  # freeing a loop would close its descriptors
        policy._local = type(policy._local)()
    events._set_running_loop(None)


def _forget_figures() -> None:
    """Forget the kernel's open figures, because the kernel shows them."""
    helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
    if helpers is not None:
        helpers.Gcf.figs.clear()


def _stop_profiler() -> None:
    """Stop ``cProfile``, which ``%prun`` starts: it slows the function down, and its measurements would be lost.

    Since Python 3.12, the function can't start its own profiler while ``cProfile`` is running. Other profilers continue
    in forks.
    """
    profiler: Any = sys.modules.get("_lsprof")
    if profiler is None:
        return
    if isinstance(sys.getprofile(), profiler.Profiler):
        sys.setprofile(None)
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is not None and monitoring.get_tool(monitoring.PROFILER_ID) == "cProfile":
        monitoring.set_events(monitoring.PROFILER_ID, 0)
        monitoring.free_tool_id(monitoring.PROFILER_ID)


def _disown_processes() -> None:
    """Disown the kernel's pools and data loaders; otherwise, ``multiprocessing`` would end them at exit.

    ``multiprocessing`` does the same in a child that it forks (``BaseProcess._bootstrap``).
    """
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined]
    forkserver: Any = sys.modules.get("multiprocessing.forkserver")
    if forkserver is not None:
        _disown_forkserver(forkserver._forkserver)
    loader_signals: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    if loader_signals is not None:
        loader_signals._SIGCHLD_handler_set = (
            False  # the handler was removed with the kernel's other handlers
        )


def _disown_forkserver(server: Any) -> None:
    """Forget the kernel's forkserver, which is not a child of this worker, so that ``multiprocessing`` starts another.

    The object is changed in place, since the module's functions are bound to it.
    """
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)  # an open descriptor would keep the kernel's server alive
    preload = server._preload_modules
    server.__init__()
    server._preload_modules = preload


# --- programs that the kernel has started -----------------------------------------------------------------------------

# Only a process's parent can wait for it. If a wait fails, ``subprocess`` assumes that the process ended with status 0.
# In a forked worker, a server that the kernel started would then always seem to have ended, and ``kill()`` would do
# nothing. A worker therefore asks the system for the state of the programs that the kernel started.

_POLL_S = 0.05
_STATE, _EXIT_STATUS = 0, 49
"""Indices of fields after the command's name. Source: proc_pid_stat(5), state and exit_code."""

_ENDED = ("Z", "X")

_has_children = False
"""Whether the process that forked this worker had children, which may be programs."""

_are_children_watched = False


def remember_children() -> None:
    """Record whether this process, which is about to fork, has children."""
    global _has_children
    _has_children = True
    if sys.platform != "darwin":  # this system has no waitid()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            _has_children = False


def _watch_children(*, is_forked_here: bool = False) -> None:
    """Make ``subprocess`` in this process report the true state of the programs that the kernel started.

    Args:
        is_forked_here: whether this process was forked from a worker, which may have started programs itself.
    """
    global _are_children_watched
    if _are_children_watched or not (_has_children or is_forked_here):
        return
    _are_children_watched = True
    cls: Any = subprocess.Popen
    poll, try_wait = cls._internal_poll, cls._try_wait

    @packages.replaces(cls, "_internal_poll")
    def poll_here(self: Any, *args: Any, **kwargs: Any) -> int | None:
        if self.returncode is not None or packages.is_own(self):
            result: int | None = poll(self, *args, **kwargs)
            return result
        status = _status(self.pid)
        if status is not None:
            self._handle_exitstatus(status)
        return None if status is None else self.returncode

    @packages.replaces(cls, "_try_wait")
    def try_wait_here(self: Any, wait_flags: int) -> tuple[int, int]:
        if packages.is_own(self):
            result: tuple[int, int] = try_wait(self, wait_flags)
            return result
        while (status := _status(self.pid)) is None:
            if wait_flags & os.WNOHANG:
                return 0, 0
            time.sleep(_POLL_S)
        return self.pid, status

    packages.call_before(cls, "__init__", packages.mark_as_own)


def _status(pid: int) -> int | None:
    """Return the wait status of a process that has ended (0 if only its parent knows it); None while it is running."""
    try:
        os.kill(pid, 0)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except PermissionError:  # the process belongs to another user
        return None
    except ProcessLookupError:
        return 0
    except OSError as error:
        # The process has just ended, unless its file can't be opened or there is no /proc.
        is_unknown = exhaustion.is_exhausted(error) or not os.path.isdir("/proc/self")
        return None if is_unknown else 0
    return int(fields[_EXIT_STATUS]) if fields[_STATE] in _ENDED else None


# --- Trainers that a cell has created ---------------------------------------------------------------------------------

# A transformers ``Trainer`` or ``TrainingArguments`` object that a notebook cell created must adapt to the worker. Both
# store facts about their process: device, number of GPUs, batch size per process, an Accelerator. These attributes are
# recomputed when one of them is first used on an object that another process created.

_MARK = "_nblaunch_worker"
"""Attribute that names the process that computed an object's other attributes. It is plain text, because training
arguments are saved to files.
"""


_ARGUMENT_NAMES = ("_setup_devices", "_n_gpu", "distributed_state")
_TRAINER_NAMES = (
    "accelerator",
    "gather_function",
    "_train_batch_size",
    "is_fsdp_enabled",
    "is_deepspeed_enabled",
)


def _renew_trainers() -> None:
    """Adapt ``Trainer`` and ``TrainingArguments`` to this worker, as soon as they are imported."""
    worker = os.urandom(8).hex()
    packages.observe_when_imported(
        "transformers.training_args", lambda module: _watch_arguments(module, worker)
    )
    packages.observe_when_imported("transformers.trainer", lambda module: _watch_trainers(module, worker))


def _watch_arguments(module: Any, worker: str) -> None:
    cls = module.TrainingArguments
    find_out = getattr(cls._setup_devices, "func", None) or cls._setup_devices.fget

    def renew(arguments: Any) -> None:
        vars(arguments)["_setup_devices"] = find_out(arguments)

    for name in _ARGUMENT_NAMES:
        setattr(cls, name, _Renewed(name, worker, renew, ()))


def _watch_trainers(module: Any, worker: str) -> None:
    def renew(trainer: Any) -> None:
        _ = trainer.args.device  # joins the process group with the arguments' settings
        trainer._train_batch_size = trainer.args.train_batch_size
        trainer.create_accelerator_and_postprocess()

    for name in _TRAINER_NAMES:
        setattr(module.Trainer, name, _Renewed(name, worker, renew, _TRAINER_NAMES))


class _Renewed:
    """An attribute that is recomputed, together with others, on an object that another process created.

    Args:
        name: name of the attribute.
        worker: name of this process.
        renew: recomputes all attributes of an object that belong together.
        evidence: attributes that show that another process created an object; such an object has at least one
            of them. If this is empty, all objects count as created by another process, because their class computes the
            attribute on first use.
    """

    def __init__(self, name: str, worker: str, renew: Callable[[Any], None], evidence: Sequence[str]) -> None:
        self._name = name
        self._worker = worker
        self._renew = renew
        self._evidence = evidence

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        values = vars(instance)
        self._update(instance, values)
        try:
            return values[self._name]
        except KeyError:
            raise AttributeError(
                f"{type(instance).__name__!r} object has no attribute {self._name!r}"
            ) from None

    def __set__(self, instance: Any, value: Any) -> None:
        self._update(instance, vars(instance))
        vars(instance)[self._name] = value

    def _update(self, instance: Any, values: dict[str, Any]) -> None:
        if values.get(_MARK) == self._worker:
            return
        values[_MARK] = self._worker
        if not self._evidence or not values.keys().isdisjoint(self._evidence):
            self._renew(instance)
