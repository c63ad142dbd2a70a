"""The function of a launch: its name, and whether a call of it with its arguments can work."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any


class EndedFunction:
    """Stands for the function of a job that is over, by its name."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def __call__(self, *args: Any) -> Any:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"the job that ran {self.__qualname__} has ended, and does not keep the function")


def name_of(function: Any) -> str:
    """The function's own name, also in a :func:`functools.partial`; of other objects, what they or their class say."""
    while isinstance(function, functools.partial):
        function = function.func
    has_words = any("__repr__" in vars(cls) for cls in type(function).__mro__[:-1])
    return getattr(function, "__qualname__", None) or (
        repr(function) if has_words else type(function).__qualname__
    )


def check_call(function: Any, args: Any) -> None:
    """Refuse what is no function, and arguments that do not fit it.

    Raises:
        TypeError: says what to pass instead.
    """
    if not callable(function):
        raise TypeError(
            f"function={function!r} can't be called; pass the training function itself, "
            "as in notebook_launcher(training_function, (model,))"
        )
    _check_runs_when_called(function)
    if not isinstance(args, (tuple, list)):
        remedy = "for one argument write (model,) with a comma"
        if isinstance(args, Mapping):
            remedy = "for keyword arguments pass functools.partial(function, **arguments) as the function"
        raise TypeError(
            f"args must be a tuple of the function's arguments, but is a {type(args).__name__}; {remedy}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some C callables have no signature to check against
    try:
        signature.bind(*args)
    except TypeError as error:
        name = name_of(function)
        given = ", ".join(type(arg).__name__ for arg in args) or "nothing"
        raise TypeError(f"args do not fit {name}{signature}: {error}; args hold ({given})") from None


def _check_runs_when_called(function: Any) -> None:
    """Refuse functions of which a call runs no line, and returns something that can't leave its process."""
    name = name_of(function)
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"{name} is an async function, and calling it only makes a coroutine; "
            f"pass a plain function that runs it: lambda *args: asyncio.run({name}(*args))"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{name} is a generator function (it has a yield), and calling it runs none of its lines; "
            f"pass a plain function that goes through it, such as lambda *args: list({name}(*args))"
        )
