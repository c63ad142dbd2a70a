"""Settings that decide which messages a process shows: warning filters, logger levels and handlers.

A filter may name a warning category from a library that the other process has not imported yet, and a logger may belong
to such a library. Such settings are applied after the import, because libraries apply their own at import.
"""

from __future__ import annotations

import logging
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from nblaunch import packages
from nblaunch.wire.pickling import payload


class WarningFilter(NamedTuple):
    """A warning filter whose category is given by name.

    Args:
        action: an action such as ``"ignore"``.
        message: regular expression for messages; "" matches all.
        category_module: module of its category.
        category_name: qualified name of its category.
        module: regular expression for modules; "" matches all.
        lineno: line number; 0 matches all.
    """

    action: str
    message: str
    category_module: str
    category_name: str
    module: str
    lineno: int


def read_warning_filters() -> list[WarningFilter]:
    """Return the filters of this process, in order of precedence."""
    filters: Any = list(warnings.filters)
    return [
        WarningFilter(
            action, _pattern(message), category.__module__, category.__qualname__, _pattern(module), lineno
        )
        for action, message, category, module, lineno in filters
    ]


def write_warning_filters(filters: Sequence[WarningFilter]) -> None:
    """Replace this process's filters. If a filter's category is not imported yet, add the filter once it is."""
    _set_filters(filters)
    for name in {each.category_module for each in filters} - sys.modules.keys():
        packages.when_imported(name, lambda module: _set_filters([*_added_since(filters), *filters]))


def _added_since(filters: Sequence[WarningFilter]) -> list[WarningFilter]:
    """Return the current filters that other code has added, for example a library when it was imported."""
    return [each for each in read_warning_filters() if each not in filters]


def _set_filters(filters: Sequence[WarningFilter]) -> None:
    warnings.resetwarnings()
    for each in reversed(filters):
        category = _find(each.category_module, each.category_name)
        if category is not None:
            action: Any = each.action
            warnings.filterwarnings(action, each.message, category, each.module, each.lineno)


def _pattern(expression: Any) -> str:
    return getattr(expression, "pattern", expression) or ""


def _find(module: str, name: str) -> Any:
    """Return a warning category; None if its module is not imported or no longer contains it."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


class LoggerSetting(NamedTuple):
    """The settings of one logger.

    Args:
        name: name of the logger; "" is the root.
        level: level of the logger; 0 means its parent's level.
        propagate: whether its parents also get its messages.
        is_disabled: whether it drops all messages.
        handlers: its pickled handlers if the user created the logger; otherwise empty.
    """

    name: str
    level: int
    propagate: bool
    is_disabled: bool
    handlers: tuple[bytes, ...]


@dataclass(frozen=True)
class LoggerSettings:
    """The settings of all loggers in a process.

    Args:
        loggers: the loggers that have a setting.
        disabled_level: see ``logging.disable``.
        captures_warnings: see ``logging.captureWarnings``.
        left: handlers that can't be sent to another process, as text.
    """

    loggers: tuple[LoggerSetting, ...]
    disabled_level: int
    captures_warnings: bool
    left: tuple[str, ...]


def read_loggers() -> LoggerSettings:
    """Return the settings of this process's loggers."""
    settings, left = [], []
    for name, logger in [("", logging.root), *logging.root.manager.loggerDict.items()]:
        if not isinstance(logger, logging.Logger) or name == _name_of_kernel():
            continue  # a placeholder for a parent, or the kernel's logger
        handlers = []
        # A library adds its own handlers at import.
        for handler in () if name.partition(".")[0] in sys.modules else logger.handlers:
            if isinstance(handler, logging.NullHandler):
                continue
            try:
                handlers.append(payload.to_bytes(_recipe_of(handler), main_by_reference=False))
            except Exception:
                left.append(f"the handler {handler} of {f'logger {name!r}' if name else 'the root logger'}")
        setting = LoggerSetting(name, logger.level, logger.propagate, logger.disabled, tuple(handlers))
        if setting != LoggerSetting(name, logging.NOTSET, True, False, ()):
            settings.append(setting)
    captures = getattr(logging, "_warnings_showwarning", None) is not None
    return LoggerSettings(tuple(settings), logging.root.manager.disable, captures, tuple(left))


def _name_of_kernel() -> str | None:
    """Return the name of the kernel program's logger; None if this process is not a kernel."""
    traitlets: Any = sys.modules.get("traitlets.config.application")
    program = None if traitlets is None else traitlets.Application._instance
    return None if program is None else program.log.name


def write_loggers(settings: LoggerSettings) -> None:
    """Apply these settings to the loggers of this process; set a library's loggers after its import."""
    logging.disable(settings.disabled_level)
    logging.captureWarnings(settings.captures_warnings)
    for setting in settings.loggers:
        package = setting.name.partition(".")[0]
        _set_logger(setting)
        if package and package not in sys.modules:
            packages.when_imported(package, partial(_set_logger, setting))


def _set_logger(setting: LoggerSetting, module: Any = None) -> None:
    logger = logging.getLogger(setting.name)
    logger.setLevel(setting.level)
    logger.propagate, logger.disabled = setting.propagate, setting.is_disabled
    if not logger.handlers:
        for recipe in setting.handlers:
            logger.addHandler(_made(*pickle.loads(recipe)))


_STREAMS = {"<stdout>": "stdout", "<stderr>": "stderr"}
"""Name of one of the kernel's or Python's streams -> its name in ``sys``."""


_Recipe = tuple[Callable[[], logging.Handler], int, "logging.Formatter | None", list[Any]]
"""Function that creates a handler like the kernel's in a process whose streams differ; the handler's level, formatter
and filters."""


def _recipe_of(handler: logging.Handler) -> _Recipe:
    """Return the recipe that recreates a handler.

    Raises:
        TypeError: the handler does not simply write to a standard stream or a file.
    """
    make: Callable[[], logging.Handler]
    if type(handler) is logging.FileHandler:
        make = partial(logging.FileHandler, handler.baseFilename, encoding=handler.encoding, delay=True)
    elif type(handler) is logging.StreamHandler and (name := _name_of_stream(handler.stream)):
        make = partial(_StandardStreamHandler, name)
    else:
        raise TypeError(f"{type(handler).__name__} does not simply write to a standard stream or a file")
    return make, handler.level, handler.formatter, list(handler.filters)


def _made(
    make: Callable[[], logging.Handler], level: int, formatter: logging.Formatter | None, filters: list[Any]
) -> logging.Handler:
    """Create a recipe's handler in this process."""
    handler = make()
    handler.setLevel(level)
    handler.setFormatter(formatter)
    handler.filters = filters
    return handler


class _StandardStreamHandler(logging.StreamHandler):  # Python 3.10 can't subscript StreamHandler
    """Writes to the current standard stream, because a forkserver's workers do not have the server's streams."""

    def __init__(self, name: str) -> None:
        self._name_in_sys = name
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return getattr(sys, self._name_in_sys)


def _name_of_stream(stream: Any) -> str:
    """Return the name in ``sys`` of a standard stream, whether Python's or the kernel's; "" for others."""
    for name in ("stdout", "stderr"):
        if stream is getattr(sys, name) or stream is getattr(sys, f"__{name}__"):
            return name
    return _STREAMS.get(str(getattr(stream, "name", "")), "")
