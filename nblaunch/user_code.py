"""Find the user's code: cells and files, frames of a traceback, variables that a function uses."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from types import CellType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, cast

_OWN_FOLDER = os.path.dirname(__file__) + os.sep
"""nblaunch's folder. Symbolic links are not resolved, as in the file names of code objects."""

_LIBRARY_FOLDERS = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)

_STANDARD_FOLDERS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})

_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")
"""Path components of installed packages, including those in user site-packages, on ``PYTHONPATH``, and in the system
installation that a venv uses.
"""


_MAX_VISITED = 500
_CLASS_MEMBERS = type.__dict__["__dict__"].__get__
_MODULE_OF = type.__dict__["__module__"].__get__
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})  # they refer to nothing


def is_own_file(filename: str) -> bool:
    """Return whether the file is part of nblaunch."""
    return filename.startswith(_OWN_FOLDER)


def is_user_file(filename: str) -> bool:
    """Return whether the file is a notebook cell, or a user's module that is neither installed nor part of Python."""
    if filename.startswith((*_LIBRARY_FOLDERS, _OWN_FOLDER, "<frozen", "<string>")):
        return False
    return not any(folder in filename for folder in _PACKAGE_FOLDERS)


def is_user_function(value: Any) -> bool:
    """Return whether an object is a function that the notebook or a user's module defines."""
    return issubclass(type(value), FunctionType) and is_user_file(value.__code__.co_filename)


def is_user_module(module: object) -> bool:
    """Return whether a module is one of the user's files; False for a notebook, and for None."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_user_file(file)


def module_of(kind: type) -> str:
    """Return the name of a class's module, or an empty string if it has none. Run no metaclass code."""
    module = _MODULE_OF(kind)
    return module if type(module) is str else ""


def has_user_class(value: Any) -> bool:
    """Return whether the class of an object is defined in the notebook or script, or in a user's module."""
    return is_users(module_of(type(value)))


def is_users(module: str) -> bool:
    """Return whether the module with this name is the notebook or script, or one of the user's files."""
    return module == "__main__" or is_user_module(sys.modules.get(module))


def is_standard_file(filename: str) -> bool:
    """Return whether the file is part of Python itself."""
    is_installed = any(folder in filename for folder in _PACKAGE_FOLDERS)
    return not is_installed and filename.startswith(("<frozen ", *_STANDARD_FOLDERS))


_CELL = re.compile(r"^\w+ In ?\[(\d+)\]$")  # "Cell In[5]", in IPython's tracebacks


def cell_name(filename: str) -> str:
    """Return ``cell 5`` for the file name of a compiled notebook cell; return other names unchanged."""
    shell = ipython_shell()
    compiler: Any = getattr(shell, "compile", None)
    if hasattr(compiler, "format_code_name"):
        parts = compiler.format_code_name(filename)
        return _CELL.sub(r"cell \1", " ".join(parts)) if parts else filename
    # IPython 7 does not store the names of cells: it derives them from the cells' text, or gives all cells the same
    # name.
    if compiler is None or not filename.endswith(".py") or compiler.get_code_name("", "", 0) == filename:
        return filename
    cells = shell.history_manager.input_hist_raw  # without newlines at the end
    for number in range(len(cells) - 1, 0, -1):
        texts = (cells[number], f"{cells[number]}\n")
        if any(compiler.get_code_name(text, text, number) == filename for text in texts):
            return f"cell {number}"
    return filename


def running_cell() -> str:
    """Return ``cell 5`` for the cell that is running; an empty string outside a notebook."""
    shell = ipython_shell()
    is_in_notebook = getattr(shell, "kernel", None) is not None
    return f"cell {shell.execution_count}" if is_in_notebook else ""


def ipython_shell() -> Any:
    """Return IPython's shell, or None outside IPython. Never import IPython."""
    # While another thread is importing IPython, the function may be missing.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython() if get_ipython is not None else None


def user_frame_behind(frame: FrameType | None, packages: Collection[str]) -> FrameType | None:
    """Return the user's frame that called ``frame`` through nothing but ``packages``; None if there is none."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in packages:
            return None
        frame = frame.f_back
    return frame


def innermost_user_frame() -> FrameType | None:
    """Return the innermost running frame of the user's code, such as the one that calls a library's ``fit``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def from_first_user_frame(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame outside nblaunch, where the user's function begins.

    Later frames of nblaunch are kept, because the function may call nblaunch.
    """
    while tb is not None and is_own_file(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


def line_of(tb: TracebackType) -> int:
    """Return the line of a traceback entry, or the first line of its function if Python gives no line."""
    return line_in(tb.tb_frame.f_code, tb.tb_lineno)


def line_in(code: CodeType, line: int | None) -> int:
    """Return ``line``, or the first line of ``code`` if Python gave no line.

    An interrupt may arrive at an instruction that belongs to no line, such as the jump in a ``while True: pass``.
    Python then gives None or, in early releases of 3.11, -1.
    """
    return line if line is not None and line > 0 else code.co_firstlineno


def captured_variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each closure variable and global that the function's code refers to.

    Code in nested functions and comprehensions is included.
    """
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if (value := content_of(cell)) is not NO_VALUE:
            yield name, value
    for name in dict.fromkeys(names_in(code)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


NO_VALUE = object()
"""Content of an empty closure cell."""


def content_of(cell: CellType) -> Any:
    """Return the content of a closure cell; :data:`NO_VALUE` if its variable has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return NO_VALUE


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code uses, including code in nested functions and comprehensions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def used_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield objects that a function uses but does not receive as arguments, with their names in the function.

    These are closure variables, globals, the object of a bound method, and the arguments of a ``partial``.
    """
    if isinstance(function, functools.partial):
        for position, value in enumerate(function.args):
            yield f"argument {position} of the partial", value
        yield from function.keywords.items()
        yield from used_by(function.func)
        return
    owner = getattr(function, "__self__", None) if inspect.ismethod(function) else function
    if owner is not None and not inspect.isroutine(owner) and not inspect.isclass(owner):
        yield "self", owner
        yield from ((f"self.{name}", value) for name, value in getattr(owner, "__dict__", {}).items())
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(plain):
        yield from captured_variables(plain)


def reachable_from(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, then the values they refer to, nearest first: variables of user functions, members of objects.

    In any other order, a model with many layers would use up all of the 500 values allowed.
    """
    return islice(_reached(values), _MAX_VISITED)


def _reached(values: Iterable[Any]) -> Iterator[Any]:
    pending = deque(values)
    seen: set[int] = set()
    while pending:
        value = pending.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        # isinstance() would ask a proxy for its class, and vars() a metaclass for its members; both may raise an error.
        kind = type(value)
        if issubclass(kind, FunctionType):
            if is_user_function(value):
                pending.extend(captured for _, captured in captured_variables(value))
        elif issubclass(kind, type):
            pending.extend(filter(is_user_function, _CLASS_MEMBERS(value).values()))
        elif not issubclass(kind, ModuleType):
            pending.append(kind)
            pending.extend(each for each in _members(value) if type(each) not in _ATOMS)


def _members(value: Any) -> Sequence[Any]:
    """Return the objects that an object refers to, without listing a container with millions of elements."""
    for kind in (list, tuple):
        if issubclass(type(value), kind):
            return cast(Sequence[Any], kind.__getitem__(value, slice(_MAX_VISITED)))
    for unordered in (dict, set, frozenset):
        if issubclass(type(value), unordered) and unordered.__len__(value) > _MAX_VISITED:
            return ()
    return gc.get_referents(value)[:_MAX_VISITED]
