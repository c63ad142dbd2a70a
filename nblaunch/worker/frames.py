"""A worker's frames: another thread reads them to find the user's line and variables, and Python's ``traceback`` module
shows them.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from itertools import takewhile
from keyword import iskeyword
from traceback import StackSummary, walk_stack, walk_tb
from types import FrameType, NoneType, TracebackType
from typing import Any

from nblaunch.user_code import is_own_file, is_user_file, module_of
from nblaunch.wire.worker_commands import FrameVariables

_MAX_CHARACTERS = 200
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_VARIABLES = 50
_MAX_ELEMENTS = 20
_QUALIFIED_NAME: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_ARRAY_LIBRARIES = ("torch", "numpy", "pandas", "jax", "jaxlib", "tensorflow")
_SECRET = re.compile(
    r"passw|passphrase|pwd|secret|token(?!s|iz|_id)|credential|bearer|cookie|auth"
    r"|(api|access|account|private|service|wandb)_?key|(^|_)pass$",
    re.IGNORECASE,
)
"""Names of variables, and dictionary keys, whose values may be secret if they are strings."""
_SECRET_TEXT = re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|xox[a-z]-)\w|://[^/\s]*:[^/\s]*@")
"""Strings that are secret under any name: keys for well-known services, and addresses with a password."""


def begin_stacks_at_function() -> None:
    """Make stacks that the function prints begin with the function, without the calls that led to it.

    A forked worker runs inside the kernel's calls, about fifty of them. Anomaly detection would collect them
    for each operation, and its report, usually a few lines, would be too long for a cell. Call this in the nblaunch
    frame that later calls the function; that frame and its callers are left out.
    """
    outside = sys._getframe(1)

    def extract_stack(f: FrameType | None = None, limit: int | None = None) -> StackSummary:
        frame = sys._getframe(1) if f is None else f
        stack = [*walk_stack(frame)]
        inside = [*takewhile(lambda step: step[0] is not outside, stack)]
        while inside and is_own_file(inside[-1][0].f_code.co_filename):
            inside.pop()
        summary = StackSummary.extract(iter(inside or stack), limit=limit)
        summary.reverse()
        return summary

    traceback.extract_stack = extract_stack


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


def shown_frame(frames: Sequence[FrameType]) -> FrameType | None:
    """Return the innermost frame of the user's code, or else the innermost frame; None if there is none."""
    return next(
        (frame for frame in frames if is_user_file(frame.f_code.co_filename)), next(iter(frames), None)
    )


def frame_of_function(frames: Sequence[FrameType], function: tuple[str, int] | None) -> FrameType | None:
    """Return the innermost frame of the function with this name and first line, or else of the user's code."""
    for frame in frames:
        if function is not None and _function_of(frame) == tuple(function):
            return frame
    return shown_frame(frames)


def _function_of(frame: FrameType) -> tuple[str, int]:
    return frame.f_code.co_name, frame.f_code.co_firstlineno


def evaluate(expression: str, frame: FrameType | None) -> Any:
    """Return the value of an expression in a frame, or in ``__main__`` if the frame is None.

    Raises:
        BaseException: whatever the expression raises.
    """
    # Merge all names into one mapping, because comprehensions in the expression see only global names.
    names = vars(sys.modules["__main__"]) if frame is None else {**frame.f_globals, **frame.f_locals}
    return eval(compile(expression, "<inspect>", "eval"), names)


def variables_of(frame: FrameType, line: int, stack: Sequence[FrameType]) -> FrameVariables:
    """Describe the local variables of ``frame``, a frame in ``stack`` that has reached ``line``."""
    is_module = frame.f_locals is frame.f_globals
    aspects = _all_aspects(frame.f_locals, is_module)
    functions = [_function_of(each) for each in stack if is_user_file(each.f_code.co_filename)]
    return FrameVariables(_function_of(frame), frame.f_code.co_filename, line, aspects, functions)


def texts_of_variables(frame: FrameType) -> tuple[tuple[str, str], ...]:
    """Return the names of a frame's local variables, each with a short literal or else a description.

    Values with strings that may be secret are left out.
    """
    is_module = frame.f_locals is frame.f_globals
    variables = _without_names_of_ipython(frame.f_locals, is_module)
    named = [
        (name, value) for name, value in variables.items() if name.isidentifier() and not iskeyword(name)
    ]
    return tuple((name, _text_of(name, value)) for name, value in named[:_MAX_VARIABLES])


def _text_of(name: str, value: Any) -> str:
    """Return a variable's text without running code from the user's classes, which might wait for another rank."""
    kind = type(value)
    if _is_literal(value) and len(text := repr(value)) <= _MAX_CHARACTERS:
        return f"<{kind.__name__}, not shown because it may be secret>" if _is_secret(name, value) else text
    if kind in _SIZED:
        return f"<{kind.__name__} of {len(value):,}>"
    module = module_of(kind)
    if module.partition(".")[0] in _ARRAY_LIBRARIES and hasattr(kind, "shape"):
        with suppress(Exception):  # for example, a parameter that is not initialized has no shape
            return _text_of_array(value)
    return f"<{module}.{_QUALIFIED_NAME(kind)}>".replace("<.", "<")


def _text_of_array(value: Any) -> str:
    dtype, device = getattr(value, "dtype", ""), getattr(value, "device", "")
    form = f"{str(dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"<{type(value).__name__} {form}{f' on {device}' if device else ''}>"


def _is_secret(name: Any, value: Any) -> bool:
    """Return whether a literal may contain a secret string, judging by its name or text."""
    kind = type(value)
    if kind in (str, bytes):
        text = value if kind is str else value.decode(errors="replace")
        return bool((type(name) is str and _SECRET.search(name)) or _SECRET_TEXT.search(text))
    if kind is dict:
        return any(
            _is_secret(key, part) or _is_secret(name, part) or _is_secret("", key)
            for key, part in value.items()
        )
    return kind in (list, tuple) and any(_is_secret(name, part) for part in value)


def _is_literal(value: Any, depth: int = 2) -> bool:
    """Return whether ``repr`` writes a value as a short literal."""
    kind = type(value)
    if kind in (list, tuple, dict):
        parts = [*value, *value.values()] if kind is dict else value
        return (
            depth > 0 and len(value) <= _MAX_ELEMENTS and all(_is_literal(part, depth - 1) for part in parts)
        )
    if kind in (str, bytes):
        return len(value) <= _MAX_CHARACTERS
    return kind in (bool, float, complex, NoneType) or (kind is int and value.bit_length() <= _MAX_CHARACTERS)


def variables_of_main() -> FrameVariables:
    """Describe the variables of ``__main__``, for an idle rank."""
    return FrameVariables(("<module>", 1), "", 0, _all_aspects(vars(sys.modules["__main__"]), is_module=True))


def _all_aspects(variables: Mapping[str, Any], is_module: bool) -> dict[str, str]:
    """Describe variables; in a module, leave out IPython's variables and functions."""
    aspects: dict[str, str] = {}
    for name, value in _without_names_of_ipython(variables, is_module).items():
        aspects |= _aspects(name, value)
    return aspects


def _without_names_of_ipython(variables: Mapping[str, Any], is_module: bool) -> dict[str, Any]:
    def is_left_out(name: str, value: Any) -> bool:
        return is_module and (callable(value) or name.startswith("_") or name in ("In", "Out"))

    return {
        name: value
        for name, value in _items(variables)
        if type(name) is str and not (name.startswith("__") or is_left_out(name, value))
    }


def _items(variables: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a frame's variables.

    In a class body, keys may have any type, and the mapping may be an instance of a user's class.
    """
    kind = type(variables)
    if issubclass(kind, dict):
        return list(dict.items(variables))
    return list(variables.items()) if kind.__module__ == "builtins" else []


def _aspects(name: str, value: Any) -> Mapping[str, str]:
    """Return properties of a value that ranks can compare: a tensor's form, but no contents of device memory.

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
