"""What a function takes from its surroundings, as far as that is in plain sight."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any


def captured_variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Closure variables and globals that the function's own code names, each with its value; those that have one."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            continue  # the variable has no value yet
        yield name, value
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
