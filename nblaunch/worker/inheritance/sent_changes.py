"""Changes that cells have made to modules, for fresh processes, which repeat them once they import the modules."""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from nblaunch import packages
from nblaunch.wire.pickling import payload


class Place(NamedTuple):
    """The location of a value in a module.

    Args:
        module: name of the module.
        path: names of attributes, joined by dots.
    """

    module: str
    path: str

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    def find(self) -> Any:
        """Return the value in this process.

        Raises:
            Exception: the value does not exist, or a module that imports its parts lazily raised an error.
        """
        return attrgetter(self.path)(sys.modules[self.module])


class SentChange(NamedTuple):
    """A change that a process makes once it has imported a module.

    Args:
        name: name that the user knows.
        module: name of the module.
        content: a pickled value; unpickling may import its library.
        write: makes the change, given the module and the value. It can be pickled.
    """

    name: str
    module: str
    content: bytes
    write: Callable[[Any, Any], object]

    @classmethod
    def of(
        cls,
        name: str,
        module: str,
        value: Any,
        write: Callable[[Any, Any], object],
        max_bytes: int | None = None,
    ) -> SentChange:
        """Return a change.

        Raises:
            Exception: the value can't be pickled, or takes more than ``max_bytes``.
        """
        return cls(name, module, payload.to_bytes(value, main_by_reference=False, max_bytes=max_bytes), write)

    def make(self) -> None:
        """Make the change in this process as soon as the module is imported; print an error if that fails."""
        packages.when_imported(self.module, self._make_in)

    def _make_in(self, module: Any) -> None:
        notebook = vars(sys.modules["__main__"])
        before = dict(notebook)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                value = pickle.loads(self.content)
                notebook.update(before)  # unpickling may replace notebook variables that the call has set
                self.write(module, value)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
            else:
                return
        print(f"the kernel's {self.name} can't be set in this worker: {message}", file=sys.stderr)
