"""The parent side of a launch: checking, supervising, diagnosing, and the job that a person holds.

The package shares its name with the public function ``nblaunch.launch(function, ...)``, which stands on a floor above
(:mod:`nblaunch.scripts`). Importing a module of this folder makes ``nblaunch.launch`` the package, so the package can
be called like the function.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """Hands a call on to the public function, which ``nblaunch`` has in its table of names."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        public = importlib.import_module(sys.modules["nblaunch"]._PUBLIC["launch"])
        return public.launch(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
