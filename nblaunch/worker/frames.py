"""The current frames of a worker, read by another of its threads: the user's line and variables."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence, Sized
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any

from nblaunch.user_code import is_user_file
from nblaunch.wire.worker_commands import FrameVariables

_MAX_CHARACTERS = 200
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def frames_of_main_thread() -> list[FrameType]:
    """Return the frames of the thread that runs the function, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [] if frame is None else [each for each, _ in walk_stack(frame)]


def frames_of_traceback(tb: TracebackType | None) -> list[FrameType]:
    """Return the frames that an exception passed through, innermost first."""
    return [frame for frame, _ in walk_tb(tb)][::-1]


def up_to_user_code(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback up to the user's innermost frame; None if it has no frame of the user's code."""
    last, entry = None, tb
    while entry is not None:
        last = entry if is_user_file(entry.tb_frame.f_code.co_filename) else last
        entry = entry.tb_next
    if last is None:
        return None
    last.tb_next = None
    return tb


def innermost_user_frame(frames: Sequence[FrameType]) -> FrameType | None:
    """Return the innermost frame of the user's code, or else the innermost frame; None if there is none."""
    return next(
        (frame for frame in frames if is_user_file(frame.f_code.co_filename)), next(iter(frames), None)
    )


def frame_of_function(frames: Sequence[FrameType], function: tuple[str, int] | None) -> FrameType | None:
    """Return the innermost frame of a function, by name and first line, or else of the user's code."""
    for frame in frames:
        if function is not None and _function_of(frame) == tuple(function):
            return frame
    return innermost_user_frame(frames)


def _function_of(frame: FrameType) -> tuple[str, int]:
    return frame.f_code.co_name, frame.f_code.co_firstlineno


def evaluate(expression: str, frame: FrameType | None) -> Any:
    """Return the value of an expression in a frame, or in ``__main__`` if the frame is None.

    Raises:
        BaseException: whatever the expression raises.
    """
    # One mapping, because comprehensions in the expression see only global names.
    names = vars(sys.modules["__main__"]) if frame is None else {**frame.f_globals, **frame.f_locals}
    return eval(compile(expression, "<inspect>", "eval"), names)


def variables_of(frame: FrameType, line: int, stack: Sequence[FrameType]) -> FrameVariables:
    """Describe the local variables of a frame of ``stack`` whose current line is ``line``."""
    is_module = frame.f_locals is frame.f_globals
    aspects = _all_aspects(frame.f_locals, is_module)
    functions = [_function_of(each) for each in stack if is_user_file(each.f_code.co_filename)]
    return FrameVariables(_function_of(frame), frame.f_code.co_filename, line, aspects, functions)


def variables_of_main() -> FrameVariables:
    """Describe the variables of ``__main__``, for an idle rank."""
    return FrameVariables(("<module>", 1), "", 0, _all_aspects(vars(sys.modules["__main__"]), is_module=True))


def _all_aspects(variables: Mapping[str, Any], is_module: bool) -> dict[str, str]:
    """Describe variables; in a module, leave out IPython's variables and functions."""
    aspects: dict[str, str] = {}
    for name, value in dict(variables).items():
        is_own = is_module and (callable(value) or name.startswith("_") or name in ("In", "Out"))
        if not (name.startswith("__") or is_own):
            aspects |= _aspects(name, value)
    return aspects


def _aspects(name: str, value: Any) -> Mapping[str, str]:
    """Return aspects of a value that ranks can compare: the form of a tensor, but never the contents of device
    memory.

    Reading device memory would wait for the device, which may wait for another rank.
    """
    try:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            aspects = {f"{name}.shape": str(tuple(value.shape)), f"{name}.dtype": str(value.dtype)}
            if hasattr(value, "device"):
                aspects[f"{name}.device.type"] = str(getattr(value.device, "type", value.device))
            return aspects
        if isinstance(value, _PLAIN):
            return {name: _shortened(repr(value))}
        if isinstance(value, (list, tuple, dict, set, frozenset)) and isinstance(value, Sized):
            return {f"type({name})": type(value).__name__, f"len({name})": str(len(value))}
        return {f"type({name})": f"{type(value).__module__}.{type(value).__qualname__}"}
    except Exception as error:  # raised by the user's classes; the other variables are still shown
        return {name: f"<can't be described: {type(error).__name__}>"}


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
