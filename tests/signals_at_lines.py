"""Sends a signal between two given lines of nblaunch."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import nblaunch

_FOLDER = str(Path(nblaunch.__file__).parent)


def with_signal_at_line(
    number: int, signum: int, call: Callable[[], Any], folder: str = _FOLDER
) -> tuple[str, BaseException | None]:
    """Call ``call``, and send this process a signal before the ``number``-th executed line, counted from 1.

    Each line of the main thread counts once, except lines of ``__del__`` and of callbacks of the garbage collector,
    whose exceptions Python does not raise.

    Args:
        folder: count only lines of files below it; empty = all lines.

    Returns: The line, empty if fewer lines ran; the exception that ``call`` raised.
    """
    seen: set[tuple[CodeType, int]] = set()
    place = ""
    pid = os.getpid()
    of_collector = {getattr(callback, "__code__", None) for callback in gc.callbacks}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal place
        code = frame.f_code
        if place or not code.co_filename.startswith(folder):
            return None
        if code.co_name == "__del__" or code in of_collector:
            return None
        if event == "line" and os.getpid() == pid:
            seen.add((code, frame.f_lineno))
            if len(seen) == number:
                place = f"{code.co_filename.removeprefix(_FOLDER)}:{frame.f_lineno} {code.co_name}"
                signal.raise_signal(signum)
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
    except BaseException as error:
        return place, error
    return place, None
