"""An Accelerator of Hugging Face Accelerate that was made in the notebook and is on its way into workers.

It describes the kernel's own process. In a forked worker its state is gone, since that would be of no use there;
pickled into a fresh one it would train alone on each rank, unnoticed. (nblaunch's own notices by itself.)
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from nblaunch.spec import LaunchSpec
from nblaunch.wire.pickle_errors import captured_variables

_TOLD = "which describes the notebook's own process and knows nothing of the workers"


def refuse(spec: LaunchSpec) -> None:
    """Refuse it as an argument.

    Raises:
        ValueError: names the argument, and says what to do.
    """
    for position, arg in enumerate(spec.args):
        if _is_one(arg):
            raise ValueError(
                f"args[{position}] is an accelerate.Accelerator, {_TOLD}; leave it out, and make one inside the "
                "function: accelerator = Accelerator()"
            )


def warnings(spec: LaunchSpec) -> tuple[str, ...]:
    """A sentence where the function takes one from the notebook by itself, as a global name or in its closure."""
    function: Any = spec.function
    while isinstance(function, functools.partial):
        function = function.func
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if _kind() is None or not inspect.isfunction(plain):
        return ()
    return tuple(
        f"{spec.function_name} uses {name} of the notebook, an accelerate.Accelerator, {_TOLD}; make it inside the "
        "function, before its first use: accelerator = Accelerator()"
        for name, value in captured_variables(plain)
        if _is_one(value)
    )


def _kind() -> type | None:
    """The class, where it is imported."""
    module: Any = sys.modules.get("accelerate.accelerator")
    return getattr(module, "Accelerator", None)


def _is_one(value: Any) -> bool:
    kind = _kind()
    return kind is not None and issubclass(type(value), kind)
