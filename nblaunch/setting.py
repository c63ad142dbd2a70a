"""A setting, and converters for its values from a command line, a file or a Python call.

Files are read as text (``config/files.py``), so values have the same form in files and on the command line. Python
calls are checked more strictly: a string is not accepted as a number.
"""

from __future__ import annotations

import math
import operator
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nblaunch import formatting
from nblaunch.env import as_flag

_MACHINES = re.compile(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?")


class Converter(ABC):
    """Converts a value to the type of a setting."""

    metavar = ""

    @abstractmethod
    def convert(self, value: Any) -> Any:
        """Convert text from a command line, or a value from a file, to the type of the setting.

        Raises:
            ValueError: ``value`` is invalid. The message completes a sentence, as in ``must be a whole number``.
        """

    def accept(self, value: Any) -> Any:
        """Convert an argument from a Python call to the type of the setting.

        Raises:
            TypeError: ``value`` has the wrong type. The message completes a sentence.
            ValueError: ``value`` is invalid. The message completes a sentence.
        """
        return self.convert(value)


@dataclass(frozen=True)
class Whole(Converter):
    """A whole number, at least ``least`` and at most ``most``."""

    least: int = 0
    most: int | None = None
    metavar = "N"

    def convert(self, value: Any) -> int:
        number = _number(value)
        if number is None or number != int(number):
            raise ValueError("must be a whole number")
        return self._bounded(int(number))

    def accept(self, value: Any) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            return self._bounded(operator.index(value))  # accepts NumPy's integers
        except TypeError:
            raise TypeError(f"must be a whole number, but is {formatting.kind(value)}") from None

    def _bounded(self, number: int) -> int:
        if number < self.least or (self.most is not None and number > self.most):
            most = f" and at most {self.most}" if self.most is not None else ""
            raise ValueError(f"must be at least {self.least}{most}")
        return number


@dataclass(frozen=True)
class Machines(Converter):
    """A number of machines, or ``min:max``."""

    metavar = "N|MIN:MAX"

    def convert(self, value: Any) -> int | str:
        match = _MACHINES.fullmatch(str(value))
        if match is None:
            raise ValueError("must be a whole number of at least 1, or 'min:max' as in '1:4'")
        low, high = int(match[1]), int(match[2] or match[1])
        if low < 1:
            raise ValueError("must be at least 1")
        if low > high:
            raise ValueError("has a minimum above its maximum; write 'min:max' as in '1:4'")
        return low if low == high else f"{low}:{high}"


@dataclass(frozen=True)
class Number(Converter):
    """A number of at least ``least``; if ``is_optional``, ``none`` is also valid."""

    least: float = 0.0
    is_optional: bool = False
    metavar = "X"

    def convert(self, value: Any) -> float | None:
        if self.is_optional and (value is None or str(value).strip().lower() == "none"):
            return None
        number = _number(value)
        if number is None:
            raise ValueError("must be a number" + (" or none" if self.is_optional else ""))
        return self._bounded(number)

    def accept(self, value: Any) -> float | None:
        if value is None and self.is_optional:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"must be a number, but is {formatting.kind(value)}")
        return self._bounded(value)

    def _bounded(self, number: float) -> float:
        if not number >= self.least:  # also rejects NaN
            raise ValueError(f"must be at least {self.least:g}")
        return number


@dataclass(frozen=True)
class Flag(Converter):
    """True or false; also accepts yes, no, on, off, 1 and 0."""

    metavar = "true|false"

    def convert(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        with suppress(ValueError):
            if isinstance(value, str) and value.strip():
                return as_flag(value)
        raise ValueError("must be true or false")

    def accept(self, value: Any) -> bool:
        # bool("no") would be True. The values are compared as text, so that NumPy booleans are accepted, too.
        if isinstance(value, str) or str(value) not in ("True", "False", "1", "0"):
            raise TypeError(f"must be True or False, but is {formatting.kind(value)}")
        return bool(value)


@dataclass(frozen=True)
class Switch(Flag):
    """A flag that takes no value on the command line; its presence means true."""


@dataclass(frozen=True)
class Choice(Converter):
    """One of ``choices``, in upper or lower case.

    Args:
        word: shown in the help instead of the choices, if there are too many.
    """

    choices: tuple[str, ...] = ()
    word: str = ""

    @property
    def metavar(self) -> str:  # type: ignore[override]
        """The choices."""
        return self.word or "|".join(self.choices)

    def convert(self, value: Any) -> str:
        by_lower = {choice.lower(): choice for choice in self.choices}
        if "no" in by_lower:  # other ways to write "no" in YAML 1.1 and Python
            by_lower |= dict.fromkeys(("false", "off"), by_lower["no"])
        match = by_lower.get(str(value).strip().lower())
        if match is None:
            raise ValueError(f"must be one of {', '.join(self.choices)}")
        return match

    def accept(self, value: Any) -> str:
        match = [choice for choice in self.choices if isinstance(value, str) and choice == value.lower()]
        if not match:
            raise ValueError(f"is unknown; valid values are {', '.join(map(repr, self.choices))}")
        return match[0]


@dataclass(frozen=True)
class Text(Converter):
    """Any non-empty string; in a Python call, an empty string means the default.

    Args:
        metavar: placeholder in the help.
        example: a valid value to show in messages.
    """

    metavar: str = "TEXT"
    example: str = ""

    def convert(self, value: Any) -> str:
        if isinstance(value, (bool, Mapping, list)) or not str(value).strip() or "\0" in str(value):
            raise ValueError("must be a string")
        return str(value)

    def accept(self, value: Any) -> str:
        if not isinstance(value, str):
            like = f" such as {self.example!r}" if self.example else ""
            raise TypeError(f"must be a string{like}, but is {formatting.kind(value)}")
        return value


@dataclass(frozen=True)
class Folder(Text):
    """The path of a folder."""

    metavar: str = "FOLDER"

    def accept(self, value: Any) -> str:
        if not isinstance(value, (str, os.PathLike)):
            raise TypeError(f"must be the path of a folder, but is {formatting.kind(value)}")
        return os.fspath(value)


@dataclass(frozen=True)
class FlagOrName(Converter):
    """True, false, or a name in capitals, for settings that took names before they took flags."""

    metavar = "true|false|NAME"

    def convert(self, value: Any) -> bool | str:
        try:
            return Flag().convert(value)
        except ValueError:
            if isinstance(value, str) and value.strip().isidentifier():
                return value.strip().upper()
            raise ValueError("must be true, false or a name such as FULL_SHARD") from None


@dataclass(frozen=True)
class Pairs(Converter):
    """``key=value,key=value``, or a mapping in a file."""

    metavar = "KEY=VALUE,..."

    def convert(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return {str(key): _as_value(content) for key, content in value.items()}
        pairs = [part.partition("=") for part in str(value).split(",") if part.strip()]
        if not pairs or any(not (key.strip() and equals) for key, equals, _ in pairs):
            raise ValueError("must be pairs such as timeout=900,join_timeout=600")
        return {key.strip(): _as_value(content.strip()) for key, _, content in pairs}

    def accept(self, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError(f"must be a dict such as {{'timeout': 60}}, but is {formatting.kind(value)}")
        return value


@dataclass(frozen=True)
class Names(Converter):
    """A list of non-empty names."""

    metavar = "NAME,..."

    def convert(self, value: Any) -> tuple[str, ...]:
        parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
        names = tuple(str(part).strip() for part in parts)
        if not all(names):
            raise ValueError("must be non-empty names such as a,b")
        return names

    def accept(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
            raise TypeError(f"must be a list of names such as ['a', 'b'], but is {formatting.kind(value)}")
        return self.convert(value)


@dataclass(frozen=True)
class Amounts(Pairs):
    """Names, each with a positive number: ``{"CPU": 8, "GPU": 2}``."""

    def accept(self, value: Any) -> Mapping[str, Any]:
        for name, amount in super().accept(value).items():
            is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
            if not is_number or not amount > 0:
                raise ValueError(f"has {name!r}: {amount!r}, which must be a positive number")
        return value


@dataclass(frozen=True)
class Setting:
    """One row of the settings table: an option, a key in configuration files, and an argument of ``nblaunch.launch``.

    Args:
        name: name of the option, the key and the argument.
        converter: converts and checks values.
        default: None = chosen at launch.
        meaning: one line, for help and for comments in files.
        group: key of ``GROUPS`` in ``config/settings.py``.
    """

    name: str
    converter: Converter
    default: Any
    meaning: str
    group: str


def _as_value(value: Any) -> Any:
    """Return the number or flag that a string contains; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    number = _number(value)
    if number is not None:
        return int(number) if number == int(number) else number
    with suppress(ValueError):
        return as_flag(value)
    return value


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
