"""Converters of the values of settings: each converts and checks a value of a command line, a file or a Python call."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nblaunch.env import as_flag
from nblaunch.spec import parse_num_nodes

COMPILERS = (
    "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
    "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "ipex", "tvm", "hpu_backend",
    "neuron", "tpu",
)  # fmt: skip
"""Compilers that Accelerate lists, and TorchTPU's. Some register with torch when the script imports their library."""


class Converter(ABC):
    """Conversion of a value to the type of a setting."""

    metavar = ""

    @abstractmethod
    def convert(self, value: Any) -> Any:
        """Convert ``value``, a text or a value parsed by YAML, to the type of the setting.

        Raises:
            ValueError: ``value`` is invalid. The message ends a sentence, as in ``must be a whole number``.
        """


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
        if number < self.least or (self.most is not None and number > self.most):
            most = f" and at most {self.most}" if self.most is not None else ""
            raise ValueError(f"must be at least {self.least}{most}")
        return int(number)


@dataclass(frozen=True)
class Machines(Converter):
    """A number of machines, or ``min:max``."""

    metavar = "N|MIN:MAX"

    def convert(self, value: Any) -> int | str:
        try:
            return parse_num_nodes(int(value) if isinstance(value, float) and value == int(value) else value)
        except (TypeError, ValueError):
            raise ValueError("must be a whole number of at least 1, or min:max as in 1:4") from None


@dataclass(frozen=True)
class Number(Converter):
    """A number of at least ``least``; with ``is_optional`` also ``none``."""

    least: float = 0.0
    is_optional: bool = False
    metavar = "X"

    def convert(self, value: Any) -> float | None:
        if self.is_optional and (value is None or str(value).strip().lower() == "none"):
            return None
        number = _number(value)
        if number is None:
            raise ValueError("must be a number" + (" or none" if self.is_optional else ""))
        if number < self.least:
            raise ValueError(f"must be at least {self.least:g}")
        return number


@dataclass(frozen=True)
class Flag(Converter):
    """True or false; accepts yes, no, on, off, 1 and 0 as well."""

    metavar = "true|false"

    def convert(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        with suppress(ValueError):
            if isinstance(value, str) and value.strip():
                return as_flag(value)
        raise ValueError("must be true or false")


@dataclass(frozen=True)
class Switch(Flag):
    """A flag that takes no value on the command line; its presence means true."""


@dataclass(frozen=True)
class Choice(Converter):
    """One of ``choices``, case ignored."""

    choices: tuple[str, ...] = ()

    @property
    def metavar(self) -> str:  # type: ignore[override]
        """Return the choices."""
        return "|".join(self.choices)

    def convert(self, value: Any) -> str:
        # YAML reads unquoted no and yes as booleans.
        text = {False: "no", True: "yes"}.get(value, value) if isinstance(value, bool) else value
        by_lower = {choice.lower(): choice for choice in self.choices}
        found = by_lower.get(str(text).strip().lower())
        if found is None:
            raise ValueError(f"must be one of {', '.join(self.choices)}")
        return found


@dataclass(frozen=True)
class Text(Converter):
    """Any non-empty text."""

    metavar: str = "TEXT"

    def convert(self, value: Any) -> str:
        if isinstance(value, (bool, Mapping, list)) or not str(value).strip() or "\0" in str(value):
            raise ValueError("must be a text")
        return str(value)


@dataclass(frozen=True)
class Compiler(Converter):
    """The name of a ``torch.compile`` backend in lower case, or ``no`` for none."""

    metavar = "NAME"

    def convert(self, value: Any) -> str:
        # YAML reads an unquoted no as false.
        name = "no" if value is False else str(value).strip().lower()
        if value is True or not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError("must be a name")
        reason = compiler_refusal(name)
        if reason:
            raise ValueError(reason)
        return name


@dataclass(frozen=True)
class FlagOrName(Converter):
    """True, false, or a name in capitals, for settings that took names before they took flags."""

    metavar = "true|false|NAME"

    def convert(self, value: Any) -> bool | str:
        try:
            return Flag().convert(value)
        except ValueError:
            if isinstance(value, str) and value.strip().replace("_", "").isalpha():
                return value.strip().upper()
            raise ValueError("must be true, false or a name such as FULL_SHARD") from None


@dataclass(frozen=True)
class Pairs(Converter):
    """``key=value,key=value``, or a mapping in a file."""

    metavar = "KEY=VALUE,..."

    def convert(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return {str(key): _as_number(content) for key, content in value.items()}
        pairs = [part.partition("=") for part in str(value).split(",") if part.strip()]
        if not pairs or any(not (key.strip() and equals) for key, equals, _ in pairs):
            raise ValueError("must be pairs such as timeout=900,join_timeout=600")
        return {key.strip(): _as_number(content.strip()) for key, _, content in pairs}


def compiler_refusal(name: str) -> str:
    """Return why ``name`` is not a compiler, as ``must be no, or one of ...``; empty if it is one.

    Imports torch only if ``name`` is not well known.
    """
    if name in COMPILERS:
        return ""
    torch_compiler = importlib.import_module("torch.compiler")
    if name in torch_compiler.list_backends(exclude_tags=()):
        return ""
    usual = sorted({"eager", "aot_eager", *torch_compiler.list_backends()})
    return f"must be no, or one of torch's compilers: {', '.join(usual)}"


def _as_number(value: Any) -> Any:
    """Return the number that a text holds; any other value as it is."""
    number = _number(value) if isinstance(value, str) else None
    return value if number is None else int(number) if number == int(number) else number


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
