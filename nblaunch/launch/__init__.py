"""The parent side of a launch: checking, supervising, diagnosing, and the job that the caller holds.

    preflight               can it work here, and how?
    job                     what the caller holds: a future
      course                its attempts, one after the other, until one counts; then the trained weights
        attempt             one start of the workers: their store (rendezvous), pipes, engine and logs (joblog)
          supervisor        the one wait loop while they run: requests, escalation of stops, SIGTERM
                            (termination), what they take of the host (memory_watch) and its devices (device_watch)
    diagnosis/              why it failed, or makes no progress

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
        function = _public_function()
        with importlib.import_module("nblaunch.launch.diagnosis.rendering").ShownAtCall():
            return function(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_public_function())


def _public_function() -> Any:
    return importlib.import_module(sys.modules["nblaunch"]._PUBLIC["launch"]).launch


sys.modules[__name__].__class__ = _CallablePackage
