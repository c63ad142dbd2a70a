"""Variables of the notebook that a fresh process does not have, because the function names them only in text.

A call is sent with the variables that the function's code names. ``numexpr.evaluate("2 * a")``,
``frame.query("x > @a")`` and ``eval("a")``, however, look up a name only when they run.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Collection

_UNDEFINED = re.compile(r"name '(\w+)' is not defined")
_names: frozenset[str] = frozenset()


def names_of_this_process() -> frozenset[str]:
    """Return the names of the notebook's variables."""
    return frozenset(name for name in list(vars(sys.modules["__main__"])) if not name.startswith("_"))


def remember(names: Collection[str]) -> None:
    """Remember the names of the kernel's variables, in a process that has not been forked from the kernel."""
    global _names
    _names = frozenset(names)


def is_fresh_process() -> bool:
    """Return whether this process, or the one that forked it, is an interpreter that was started for the launch."""
    return bool(_names)


def explain(error: BaseException) -> tuple[str, ...]:
    """Return a sentence if ``error`` was raised because this process lacks one of the notebook's variables."""
    name = _missing_name(error)
    if name not in _names or name in vars(sys.modules["__main__"]):
        return ()
    return (
        f"The notebook has a variable {name}, but this fresh process does not, because only variables that the "
        "function's code names are sent, and names in strings do not count. Pass the variable as an argument.",
    )


def explain_in_session(message: str) -> tuple[str, ...]:
    """Return a sentence if ``message``, of a NameError on a session's rank, names one of this kernel's variables."""
    match = _UNDEFINED.match(message)
    if match is None or match[1] not in names_of_this_process():
        return ()
    return (
        f"The notebook has a variable {match[1]}, but this rank does not: ranks have the variables that the notebook "
        f"had when the session started. Send it with session.put({match[1]}={match[1]})",
    )


def _missing_name(error: BaseException) -> str | None:
    if isinstance(error, NameError):
        match = _UNDEFINED.search(str(error))
        return match[1] if match else None
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        names = vars(sys.modules["__main__"])
        if frames and any(value is names for value in frames[-1].f_locals.values()):
            return error.args[0]
    return None
