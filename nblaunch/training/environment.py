"""Environment variables for a while: for tests and scripts that start programs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from nblaunch import env

_REFERENCE_PREFIX = "ACCELERATE_"


def patch_environment(**variables: Any) -> AbstractContextManager[None]:
    """Context manager: set variables, by their names in capitals, and put back what was there, also after an error."""
    return env.patched({name.upper(): str(value) for name, value in variables.items()})


def clear_environment() -> AbstractContextManager[None]:
    """Context manager: an empty environment; whatever is set inside is gone afterwards."""
    return _restored(lambda name: True)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorator for tests: what a function, or any test method of a class, does to ``ACCELERATE_*`` is undone after it.

    Args:
        func_or_cls: a function, or a class whose methods called ``test...`` are decorated, inherited ones too.
    """
    if not inspect.isclass(func_or_cls):
        return _purged(func_or_cls)
    for name, member in inspect.getmembers(func_or_cls, inspect.isfunction):
        if name.startswith("test"):
            setattr(func_or_cls, name, _purged(member))
    return func_or_cls


def _purged(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_later(*args: Any, **kwargs: Any) -> Any:
            with _kept():
                return await function(*args, **kwargs)

        return call_later

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _kept():
            return function(*args, **kwargs)

    return call


def _kept() -> AbstractContextManager[None]:
    return _restored(lambda name: False)


@contextmanager
def _restored(is_hidden: Callable[[str], bool]) -> Iterator[None]:
    """Hide some variables; at the end, all of them (or those of the reference) are as they were."""
    before = env.snapshot()
    env.apply({name: None for name in before if is_hidden(name)})
    hides_all = is_hidden("")
    try:
        yield
    finally:
        after = env.snapshot()
        touched = {name for name in {*before, *after} if hides_all or name.startswith(_REFERENCE_PREFIX)}
        env.apply({name: before.get(name) for name in touched})
