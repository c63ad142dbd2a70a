"""Whether a ``backward()`` would still work in a forked child of this process, found out by forking one.

The first ``backward`` of a process on a machine with accelerators starts one engine thread per device. A fork copies
the engine's tables but not its threads, and torch then refuses every ``backward`` in the child. No flag of torch can
be asked for that, and nothing can be undone, so a throw-away child tries.

Source: torch/csrc/autograd/engine.cpp (``in_bad_autograd_fork``, ``forked_autograd_child``).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import warnings
from collections.abc import Callable

_TIMEOUT_S = 20.0
_GOOD = b"+"


def fork_failure(attempt: Callable[[], None] | None = None, timeout_s: float = _TIMEOUT_S) -> str | None:
    """What goes wrong in a forked child that runs a small ``backward``; None where nothing does.

    Args:
        attempt: what the child tries; None: a ``backward`` of one number on the CPU.
        timeout_s: how long it may take until it counts as hanging.

    A process that never imported torch never ran a ``backward``: no child is forked then.
    """
    if attempt is None:
        if "torch" not in sys.modules:
            return None
        attempt = small_backward
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns about forking with threads; this child touches nothing that threads may hold, and ends at once.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _be_probe(attempt, writer)
    os.close(writer)
    try:
        return _answer(reader, timeout_s)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still the child's
        os.waitpid(pid, 0)


def _answer(reader: int, timeout_s: float) -> str | None:
    # Not select.select(), which takes no descriptor from 1024 on: a kernel may have many files open.
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    if not poller.poll(timeout_s * 1000):
        return f"backward() does not end within {timeout_s:g} s in a forked process"
    message = os.read(reader, 65536)
    if message == _GOOD:
        return None
    return message.decode(errors="replace") or "a forked process dies in backward()"


def _be_probe(attempt: Callable[[], None], writer: int) -> None:
    """In the child. Never returns; writes nothing but its answer, runs none of the parent's exit handlers."""
    try:
        warnings.simplefilter("ignore")  # a warning would appear in the user's cell
        attempt()
        os.write(writer, _GOOD)
    except BaseException as error:
        os.write(writer, f"{type(error).__name__}: {error}"[:4000].encode())
    finally:
        os._exit(0)


def small_backward() -> None:
    """The least that shows it. Called in a probing child."""
    import torch

    # One number: too small for OpenMP, whose threads a fork does not copy either.
    torch.ones((), requires_grad=True).backward()
