"""Removes from a worker what belongs to the kernel alone: exit handlers, interactive mode, ``input()``, messages to
the front end, open figures, child processes, torch's process group.

A fork copies all of these, but not the threads or the other ends of sockets. A fresh interpreter has some of
them once the call is loaded. Only libraries that have been imported are reset, to the state that they have in a freshly
started process.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import getpass
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

from nblaunch.backends import process_group
from nblaunch.wire import accelerate_states
from nblaunch.worker import libraries
from nblaunch.worker.inheritance import pools, threads_and_children

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
_abandoned: list[Any] = []
"""Objects of the kernel that this worker has replaced. Freeing them could write to files, and would copy the pages of
the kernel's memory that hold them."""


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
    libraries.show_plain_text()
    _disown_processes()
    threads_and_children.watch_children()
    _leave_event_loop()
    pools.renew_at_use()
    os.register_at_fork(after_in_child=_renew_in_child)
    threads_and_children.watch_threads()
    accelerate_states.reset_in_worker()
    libraries.renew_objects()
    process_group.forget_inherited()


def _renew_in_child() -> None:
    """Adapt the child processes and pools that a process inherits when the function forks it from this worker."""
    threads_and_children.watch_children(is_forked_here=True)
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
    """Drop the records that the kernel's log handlers hold in memory, because the kernel writes them.

    Args:
        references: weak references to all log handlers of the kernel.

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
                "broadcast the answer, or pass it as an argument of the script"
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

    Since Python 3.12, the function could not start its own profiler while ``cProfile`` is running. Other
    profilers continue in forks.
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
    """Disown the kernel's pools and data loaders; otherwise ``multiprocessing`` ends them at exit.

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
        loader_signals._SIGCHLD_handler_set = False  # the handler was removed with the kernel's others


def _disown_forkserver(server: Any) -> None:
    """Forget the kernel's forkserver, which is not a child of this worker, so that ``multiprocessing`` starts another.

    The object is changed in place, since the module's functions are bound to it.
    """
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)  # an open descriptor would keep the kernel's server alive
    preload = server._preload_modules
    server.__init__()
    server._preload_modules = preload
