"""The parent side of a launch: checking, supervising, diagnosing, and the job that a person holds.

Called as ``nblaunch.launch(function, args, ...)``, it runs a function on every device; see
``help(nblaunch.scripts.launch)``.

For the package shares its name with that public function, which stands on a floor above (:mod:`nblaunch.scripts`), and
importing any module of this folder makes ``nblaunch.launch`` the package. So the package can be called like the
function, shows its signature, and can be pickled by its name, as cloudpickle does with plain modules only.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """Hands a call on to the public function, which ``nblaunch`` has in its table of names."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run a function on every device; see ``help(nblaunch.scripts.launch)``."""
        __tracebackhide__ = True
        return _public_function()(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_public_function())


def _public_function() -> Any:
    return importlib.import_module(sys.modules["nblaunch"]._PUBLIC["launch"]).launch


sys.modules[__name__].__class__ = _CallablePackage
