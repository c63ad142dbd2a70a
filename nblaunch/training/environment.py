"""Environment variables: set for a while, for tests and scripts that start programs, and read by scripts' own names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from nblaunch import env

_REFERENCE_PREFIX = "ACCELERATE_"
_YES = ("y", "yes", "t", "true", "on", "1")
_NO = ("n", "no", "f", "false", "off", "0")


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


def str_to_bool(value: str, to_bool: bool = False) -> int:
    """1 or 0 for a word that means yes or no.

    Args:
        value: ``y``, ``yes``, ``t``, ``true``, ``on``, ``1`` or ``n``, ``no``, ``f``, ``false``, ``off``, ``0``.
        to_bool: True and False instead.

    Raises:
        ValueError: another word.
    """
    word = value.lower()
    if word not in (*_YES, *_NO):
        raise ValueError(f"{value!r} is no truth value; valid are {', '.join((*_YES, *_NO))}")
    return word in _YES if to_bool else int(word in _YES)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The truth value of the variable ``key``; ``default`` where it is not set. ValueError for another word."""
    return bool(str_to_bool(env.snapshot().get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The text of the variable ``key``; that of ``default`` where it is not set."""
    return env.snapshot().get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first number from 0 on among the variables ``env_keys``; ``default`` where there is none."""
    variables = env.snapshot()
    numbers = (int(variables[key]) for key in env_keys if key in variables)
    return next((number for number in numbers if number >= 0), default)
