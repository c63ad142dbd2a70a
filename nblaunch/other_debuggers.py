"""Debuggers other than nblaunch's: one attached to the kernel (pydevd, which JupyterLab, VS Code and PyCharm use, or
pdb), and those that code in a worker calls.

A debugger traces the main thread. pydevd also replaces the functions that start processes, so that it can follow the
children. A worker has neither the debugger's threads nor its connection to the front end, and would wait for both
forever. Therefore workers start as if no debugger were attached (:func:`kept_out`), and a forked process drops its copy
of the debugger (:func:`leave`).

This module never imports a debugger. It uses debuggers' private names only if these exist.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any

from nblaunch import packages

_PATCHED = ("os", "subprocess", "_posixsubprocess")
_is_noted = False
_ORIGINAL = (
    "original_"  # pydevd keeps each function that it replaces under the function's name with this prefix
)


def is_attached() -> bool:
    """Return whether a front end's debugger is attached to this process."""
    constants = sys.modules.get("_pydevd_bundle.pydevd_constants")
    return constants is not None and constants.get_global_debugger() is not None


@contextmanager
def untraced() -> Iterator[None]:
    """Stop debuggers from tracing this thread while the block runs."""
    tracer = sys.gettrace()
    if not _is_debugger_trace(tracer):
        yield
        return
    set_trace = _settrace()
    set_trace(None)
    try:
        yield
    finally:
        set_trace(tracer)


@contextmanager
def kept_out() -> Iterator[None]:
    """While the block runs, start processes as if no debugger were attached."""
    with untraced(), ExitStack() as stack:
        monitoring: Any = getattr(sys, "monitoring", None)
        if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
            events = monitoring.get_events(monitoring.DEBUGGER_ID)
            monitoring.set_events(monitoring.DEBUGGER_ID, 0)
            stack.callback(monitoring.set_events, monitoring.DEBUGGER_ID, events)
        monkey: Any = sys.modules.get("_pydev_bundle.pydev_monkey")
        if hasattr(monkey, "skip_subprocess_arg_patch"):
            stack.enter_context(monkey.skip_subprocess_arg_patch())
        yield


def fork() -> int:
    """Fork with the system's function, without warnings; the child keeps this process's warning filters.

    A debugger may have replaced ``os.fork`` to follow the child. Python and jax warn when a process with several
    threads is about to fork; nblaunch stops workers from using what belongs to other threads.
    """
    import posix

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return posix.fork()


def note() -> str | None:
    """Return a note that the attached debugger does not work in workers; None on later calls or without a debugger."""
    global _is_noted
    if _is_noted or not is_attached():
        return None
    _is_noted = True
    return (
        "breakpoints set in the front end do not stop workers; call breakpoint() in the function, which opens "
        "pdb in the cell. With engine='inline', the function runs in the kernel, where both kinds of breakpoints work"
    )


def leave() -> None:
    """Drop the debugger in a forked process, so that it traces nothing and does not follow new processes."""
    if _is_debugger_trace(sys.gettrace()):
        _settrace()(None)
    if _is_debugger_trace(threading._trace_hook):  # type: ignore[attr-defined]  # gettrace() of Python 3.10
        threading.settrace(None)
    if sys.version_info >= (3, 12):
        monitoring: Any = sys.monitoring
        if monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
            _free_monitoring(monitoring)
    constants: Any = sys.modules.get("_pydevd_bundle.pydevd_constants")
    if constants is None or constants.get_global_debugger() is None:
        return
    constants.set_global_debugger(None)
    for name in _PATCHED:
        _restore(sys.modules.get(name))
    monkey, tracing = sys.modules.get("_pydev_bundle.pydev_monkey"), sys.modules.get("pydevd_tracing")
    for module, undo in ((monkey, "undo_patch_thread_modules"), (tracing, "restore_sys_set_trace_func")):
        if hasattr(module, undo):
            getattr(module, undo)()


def _is_debugger_trace(tracer: Any) -> bool:
    """Return whether a trace function belongs to a debugger rather than to a tool such as coverage."""
    if tracer is None:
        return False
    pdb: Any = sys.modules.get("bdb")
    if pdb is not None and isinstance(getattr(tracer, "__self__", None), pdb.Bdb):
        return True
    # pydevd's trace functions are functions, partials and objects of its own classes.
    function = getattr(tracer, "func", tracer)
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).startswith(("pydevd", "_pydevd"))


def _settrace() -> Callable[[Any], object]:
    """Return the original ``sys.settrace``, which pydevd replaces with a function that warns."""
    holder = getattr(sys.modules.get("pydevd_tracing"), "TracingFunctionHolder", None)
    return getattr(holder, "_original_tracing", None) or sys.settrace


def _free_monitoring(monitoring: Any) -> None:
    """Remove the debugger from ``sys.monitoring`` (Python 3.12)."""
    tool = monitoring.DEBUGGER_ID
    monitoring.set_events(tool, 0)
    for event in vars(monitoring.events).values():
        if isinstance(event, int) and event.bit_count() == 1:
            monitoring.register_callback(tool, event, None)
    monitoring.free_tool_id(tool)


def _restore(module: Any) -> None:
    for name, original in list(vars(module).items()) if module is not None else ():
        if name.startswith(_ORIGINAL):
            setattr(module, name.removeprefix(_ORIGINAL), original)


# --- set_trace --------------------------------------------------------------------------------------------------------

# In a worker, ``pdb.set_trace()`` and the ``set_trace()`` of IPython and ipdb act as ``breakpoint()``. Their prompts
# would read from a terminal, which a worker does not have.

_DEBUGGERS = ("pdb", "ipdb.__main__", "IPython.core.debugger", __name__)


def redirect_set_trace() -> None:
    """Make ``set_trace()`` act as ``breakpoint()`` once pdb, from which the other debuggers inherit, is imported."""
    packages.observe_when_imported("pdb", _redirect)


def own_pdb(module: ModuleType) -> type:
    """Return Python's own ``Pdb`` class, which a kernel replaces in the module with IPython's."""
    return next(cls for cls in module.Pdb.__mro__ if cls.__module__ == "pdb")


def caller(frame: FrameType) -> FrameType:
    """Return the innermost frame that is not in a debugger, beginning with ``frame``."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_globals.get("__name__") in _DEBUGGERS:
        outer = outer.f_back
    return outer or frame


def _redirect(module: ModuleType) -> None:
    def set_trace(self: object, *args: object, **options: object) -> None:
        sys.breakpointhook()  # noqa: T100 a worker's hook

    own_pdb(module).set_trace = set_trace  # type: ignore[attr-defined]
