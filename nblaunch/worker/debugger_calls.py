"""Makes ``pdb.set_trace()`` and the ``set_trace()`` of IPython and ipdb act as ``breakpoint()`` in a worker.

Their prompts would read from a terminal, which a worker does not have.
"""

from __future__ import annotations

import sys
from types import FrameType, ModuleType

from nblaunch import packages

_DEBUGGERS = ("pdb", "ipdb.__main__", "IPython.core.debugger", __name__)


def redirect() -> None:
    """Redirect the calls once pdb, from which the other debuggers inherit, is imported."""
    packages.observe_when_imported("pdb", _redirect)


def own_pdb(module: ModuleType) -> type:
    """Return Python's own ``Pdb`` class, which a kernel replaces in the module with IPython's."""
    return next(cls for cls in module.Pdb.__mro__ if cls.__module__ == "pdb")


def caller(frame: FrameType) -> FrameType:
    """Return the innermost frame that is not in a debugger, beginning with ``frame``."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_globals.get("__name__") in _DEBUGGERS:
        outer = outer.f_back
    return outer or frame


def _redirect(module: ModuleType) -> None:
    def set_trace(self: object, *args: object, **options: object) -> None:
        sys.breakpointhook()  # noqa: T100 a worker's hook

    own_pdb(module).set_trace = set_trace  # type: ignore[attr-defined]
