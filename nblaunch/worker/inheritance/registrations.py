"""Registrations that cells make in libraries and modules, repeated in workers that import these modules again.

    AutoModel.register(MyConfig, MyModel)     a call with functions or classes from the notebook
    @registry.register("mine")                the same, as a decorator
    ACT2FN["mine"] = MyActivation             an item of a dictionary
    @area.register                            a dictionary within a function of a module: ``functools.singledispatch``

A fresh process imports the library without these registrations. If the registry is a dictionary within a function, its
entries are sent, because a later cell may have reused the names in the call. Once it has imported the module,
the worker repeats other calls if three conditions hold. The function's name says that it registers something.
The call is a top-level statement in a cell, and is not in a branch such as ``if USE_MINE:`` that was not taken. The
call registers a function or class from the notebook, or calls Python's standard library. The last condition excludes
calls such as ``mlflow.register_model("runs:/1")``, which would write to a server.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from nblaunch.user_code import content_of, is_standard_file, is_user_module
from nblaunch.worker.inheritance import cell_text
from nblaunch.worker.inheritance.cell_assignments import MAX_BYTES, OF_PROCESS
from nblaunch.worker.inheritance.plain_values import has_own_class, is_plain
from nblaunch.worker.inheritance.sent_changes import Place, SentChange

_REGISTERS = re.compile(
    r"(un)?register|add_?(type|level_?name|safe_globals|extension)|pickle$", re.IGNORECASE
)
_LEFT_OUT = {
    *(*OF_PROCESS, "ipywidgets", "traitlets", "builtins"),
    *("atexit", "signal", "weakref", "faulthandler", "multiprocessing", "concurrent", "asyncio"),
    *("torch.multiprocessing", "torch.autograd.graph", "torch.nn.modules.module", "torch.optim.optimizer"),
}
"""Modules and packages whose registries are specific to a process, or are sent to workers as settings."""

_MAX_ENTRIES = 10_000
_NO_VALUE = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
"""Expressions that could have side effects if they were evaluated again."""


class _Call(NamedTuple):
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    decorated: tuple[Any, ...]
    """The function or class below a decorator; empty for a call without one."""
    is_called: bool
    """Whether the decorator is itself the result of a call."""

    def names_notebook(self) -> bool:
        """Return whether a function or class from the notebook is registered."""
        values = (*self.args, *self.keywords.values(), *self.decorated)
        return any(
            _is_of_notebook(part)
            for value in values
            for part in (value if type(value) in (list, tuple, set) else (value,))
        )


class _Entry(NamedTuple):
    cell: int
    """Position of the registry in the function's closure; -1 if the registrar itself is the dictionary."""
    key: Any
    value: Any


def read(sources: Iterable[str]) -> tuple[list[SentChange], list[str]]:
    """Return the registrations made by cells, and a message for each that can't be sent to another process.

    Args:
        sources: the text of the cells.
    """
    sent: dict[tuple[Place, bytes], SentChange] = {}
    left: dict[str, None] = {}
    for statement in (each for text in sources for each in _statements(text)):
        target = _target(statement.path)
        if target is None or any(condition.excludes() for condition in statement.conditions):
            continue
        registrar, function = target
        try:
            entries = list(
                _entries(function) if statement.key is None else _entry_at(function, statement.key)
            )
        except _NotKnown:
            continue
        if statement.key is not None and not entries:
            continue
        if not entries and is_user_module(sys.modules[registrar.module]):
            continue  # cell_assignments.py sends the registry
        try:
            content: _Call | list[_Entry] = entries or _call(statement)
            if isinstance(content, _Call) and not (
                content.names_notebook() or _is_standard(registrar.module)
            ):
                continue
            change = SentChange.of(
                f"registration with {registrar}",
                registrar.module,
                content,
                partial(_write, registrar),
                MAX_BYTES,
            )
        except _NotKnown as error:
            left[f"{'.'.join(statement.path)}(...) in a cell ({error})"] = None
        except Exception as error:
            left[f"{'.'.join(statement.path)}(...) in a cell ({type(error).__name__}: {error})"] = None
        else:
            sent[registrar, change.content] = change
    return list(sent.values()), list(left)


def _write(registrar: Place, module: Any, content: _Call | list[_Entry]) -> None:
    if isinstance(content, _Call):
        _repeat(registrar.find(), content)
    else:
        _add(registrar.find(), content)


def _repeat(function: Callable[..., Any], call: _Call) -> None:
    if not call.decorated:
        function(*call.args, **call.keywords)
    elif call.is_called:
        function(*call.args, **call.keywords)(*call.decorated)
    else:
        function(*call.decorated)


def _add(holder: Any, entries: Sequence[_Entry]) -> None:
    for cell, key, value in entries:
        registry = holder if cell < 0 else holder.__closure__[cell].cell_contents
        registry[key] = value


# --- what cells have registered -------------------------------------------------------------------------------------


class _Statement(NamedTuple):
    """A statement that registers something.

    Args:
        path: path of the function that it calls.
        call: the call; None for a decorator without arguments.
        decorated: name of the function or class below the decorator; "" for other calls.
        key: the item's key, for an assignment to an item of the dictionary at ``path``; otherwise None.
        conditions: the tests of the ``if`` statements around it.
    """

    path: cell_text.Path
    call: ast.Call | None
    decorated: str
    key: ast.expr | None = None
    conditions: tuple[cell_text.Condition, ...] = ()


class _NotKnown(Exception):
    """Some arguments of a registration can't be evaluated again; the message says which ones."""


@lru_cache(maxsize=4096)
def _statements(text: str) -> tuple[_Statement, ...]:
    return tuple(
        statement._replace(conditions=conditions)
        for node, conditions in cell_text.statements(text)
        for statement in _calls(node)
        if statement.key is not None or _REGISTERS.match(statement.path[-1])
    )


def _calls(node: ast.stmt) -> Iterator[_Statement]:
    for target in node.targets if isinstance(node, ast.Assign) else ():
        if isinstance(target, ast.Subscript):
            for path in cell_text.paths(target.value):
                yield _Statement(path, None, "", target.slice)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        for path in cell_text.paths(node.value.func):
            yield _Statement(path, node.value, "")
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            for path in cell_text.paths(decorator if call is None else call.func):
                yield _Statement(path, call, node.name)


def _target(path: cell_text.Path) -> tuple[Place, Any] | None:
    """Return the function at the end of a path that starts in the notebook, as a :class:`Place` and as an object.

    Return None if no module contains it.
    """
    values = cell_text.values_on(path)
    if len(values) != len(path):
        return None
    registrar: Place | None = None
    for position, value in enumerate(values):
        if isinstance(value, ModuleType):
            registrar = None
        elif registrar is not None:
            registrar = Place(registrar.module, f"{registrar.path}.{path[position]}")
        else:
            owner = values[position - 1] if position else None
            registrar = _registrar_of(value, owner, path[position])
            if registrar is None:
                return None
    if registrar is None or {registrar.module, registrar.module.partition(".")[0]} & _LEFT_OUT:
        return None
    return registrar, values[-1]


def _registrar_of(value: Any, owner: Any, name: str) -> Place | None:
    if isinstance(owner, ModuleType):
        return Place(owner.__name__, name) if sys.modules.get(owner.__name__) is owner else None
    qualified = getattr(value, "__qualname__", None)
    module_name = getattr(value, "__module__", None)
    names = [
        (module_name, qualified),
        (module_name, name),
        *((each, name) for each in _modules_with(name, value)),
    ]
    for module, path in names:
        if (
            isinstance(module, str)
            and isinstance(path, str)
            and module != "__main__"
            and module in sys.modules
        ):
            registrar = Place(module, path)
            try:
                if registrar.find() is value:
                    return registrar
            except Exception:  # a module that imports its parts lazily may raise any exception
                continue
    return None


def _modules_with(name: str, value: Any) -> Iterator[str]:
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and vars(module).get(name) is value:
            yield module_name


def _entries(function: Any) -> Iterator[_Entry]:
    """Yield the dictionary entries in a function's closure whose key or value is a notebook function or class."""
    if not isinstance(function, FunctionType):
        return
    for position, cell in enumerate(function.__closure__ or ()):
        registry = content_of(cell)
        if type(registry) is dict and len(registry) <= _MAX_ENTRIES:
            for key, value in registry.items():
                if _is_of_notebook(key) or _is_of_notebook(value):
                    yield _Entry(position, key, value)


def _is_standard(module: str) -> bool:
    file = getattr(sys.modules[module], "__file__", None)
    return file is None or is_standard_file(file)


def _entry_at(registry: Any, key: ast.expr) -> Iterator[_Entry]:
    """Yield the entry that a cell has set in a library's dictionary, if its value is plain."""
    wanted = _value(key)
    if isinstance(registry, dict) and isinstance(wanted, Hashable) and wanted in registry:
        entry = dict.__getitem__(registry, wanted)
        if is_plain(entry):
            yield _Entry(-1, wanted, entry)


def _is_of_notebook(value: Any) -> bool:
    return has_own_class(value) and isinstance(value, (type, FunctionType)) and value.__module__ == "__main__"


def _call(statement: _Statement) -> _Call:
    names = vars(sys.modules["__main__"])
    decorated = (names[statement.decorated],) if statement.decorated in names else ()
    if statement.decorated and not decorated:
        raise _NotKnown(f"{statement.decorated} no longer exists")
    if statement.call is None:
        return _Call((), {}, decorated, False)
    call = statement.call
    if any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(argument, ast.Starred) for argument in call.args
    ):
        raise _NotKnown("it unpacks arguments with * or **")
    args = tuple(_value(argument) for argument in call.args)
    keywords = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    return _Call(args, keywords, decorated, True)


def _value(expression: ast.expr) -> Any:
    """Evaluate an argument again, unless doing so could have side effects."""
    bodies = {
        id(node)
        for function in ast.walk(expression)
        if isinstance(function, ast.Lambda)
        for node in ast.walk(function.body)
    }
    if any(isinstance(node, _NO_VALUE) and id(node) not in bodies for node in ast.walk(expression)):
        raise _NotKnown(f"the argument {ast.unparse(expression)} can't be evaluated again")
    code: CodeType = compile(ast.Expression(expression), "<cell>", "eval")
    return eval(code, vars(sys.modules["__main__"]))
