"""Imports that workers will need. The kernel performs them before it forks, while it is idle or during the launch.

    plan(*COMPILER)     as nblaunch.training.prepare does when it is imported
    plan_for(call)      before each fork: what the functions of the call will import
    finish()            before each fork

torch imports its compiler when the first optimizer is created, which takes more than a second. Without this module,
each worker of each launch would import the compiler again. The cell that imports nblaunch does not wait for the
imports, because the kernel performs them between cells, in its main thread, one module at a time. No extra thread is
used, so the user's imports never see a half-imported module, and no import lock is held when the kernel forks.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from nblaunch.host import signal_handlers
from nblaunch.user_code import ipython_shell, is_user_function, names_in, reachable_from

COMPILER = ("sympy", "torch._dynamo")
"""torch's compiler, preceded by the library that accounts for half of its import time."""

_ACCELERATOR = "nblaunch.training.accelerator"

_TRAINING = {"backward", "optim", "Trainer", "fit"}
"""Names that a function contains if it creates an optimizer."""

_IDLE_S = 0.1
"""Seconds to wait after the running cell has ended, so that the kernel can send its reply and begin the next cell."""

_planned: list[str] = []
_lock = threading.RLock()
_kernel_pid = os.getpid()


def plan(*modules: str) -> None:
    """Import modules in this order while the kernel is idle; outside a kernel, the next :func:`finish` imports them."""
    _planned.extend(modules)
    # A forked worker inherits the kernel's shell, whose event loop belongs to the kernel.
    loop: Any = getattr(getattr(ipython_shell(), "kernel", None), "io_loop", None)
    if loop is not None and os.getpid() == _kernel_pid:
        loop.add_callback(_wait_for_reply, loop)


def plan_for(call: Iterable[Any]) -> None:
    """Plan early imports for functions that train with torch, if this process has imported torch.

    Args:
        call: a function and its arguments.
    """
    if "torch" not in sys.modules:
        return
    if sys.modules.keys() >= {COMPILER[-1], _ACCELERATOR}:
        plan(*COMPILER)  # another thread may be importing it
        return
    try:
        functions = filter(is_user_function, reachable_from(call))
        names = {name for function in functions for name in names_in(function.__code__)}
    except Exception:  # an unusual object; each worker imports what it needs
        return
    if {"nblaunch", "Accelerator"} <= names:
        plan(_ACCELERATOR)
    if names & _TRAINING:
        plan(*COMPILER)


def finish() -> None:
    """Import the planned modules that are not imported yet; wait for another thread that is importing one of them.

    Ignore a module that can't be imported, because the code that needs it will raise the error.
    """
    with _lock:
        while _planned:
            _import_first()


def _import_first() -> None:
    """Import one planned module. Interrupts are held back, because they would leave the module half imported."""
    with _lock, signal_handlers.held_back(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings would appear in a cell that does not import the module
        if _planned:
            with suppress(Exception):
                # Needed even if sys.modules has the module: a user's thread may still be importing it, and this call
                # waits for it.
                importlib.import_module(_planned.pop(0))


def _wait_for_reply(loop: Any) -> None:
    """Start importing once the loop is free again; the first callback may run before the cell's reply is sent."""
    loop.call_later(_IDLE_S, _import_when_idle, loop)


def _import_when_idle(loop: Any) -> None:
    """Import only one module at a time, so that a cell that is sent in the meantime does not wait for all modules."""
    _import_first()
    if _planned:
        loop.call_later(_IDLE_S, _import_when_idle, loop)
