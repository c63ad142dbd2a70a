"""One output of a notebook, updated in place through its display id.

What is published is complete in itself, so that the last update is also what a saved notebook keeps. Updates reach
the right output from any thread. The same output can be shown in several cells: all follow.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

Bundle = Mapping[str, Any]
"""MIME type -> data, as for ``display(..., raw=True)``."""

Publish = Callable[[Bundle, str, bool], None]
"""``publish(bundle, display_id, is_update)``."""


class Output:
    """One output.

    Args:
        publish: how; default through IPython.
    """

    def __init__(self, publish: Publish | None = None) -> None:
        self._publish = publish or publish_in_notebook
        self._display_id = f"nblaunch-{os.urandom(8).hex()}"
        self._cells: set[str | None] = set()
        # A background job updates it in one thread while a cell shows it again in another.
        self._lock = threading.Lock()
        self.shown: Bundle | None = None

    def show(self, bundle: Bundle, *, even_if_same: bool = False) -> bool:
        """Make the output show ``bundle``; the first call creates it in the running cell.

        Returns:
            Whether anything was published: not if the output shows that already, unless ``even_if_same``.
        """
        with self._lock:
            if bundle == self.shown and not even_if_same:
                return False
            is_update, self.shown = self.shown is not None, bundle
            if not is_update:
                self._cells.add(running_cell())
            self._publish(bundle, self._display_id, is_update)
        return True

    def show_again(self) -> bool:
        """Show it in the running cell, too. False where there is nothing to show, or where that cell shows it."""
        cell = running_cell()
        with self._lock:
            if self.shown is None or cell in self._cells:
                return False
            self._cells.add(cell)
            self._publish(self.shown, self._display_id, False)
        return True


def publish_in_notebook(bundle: Bundle, display_id: str, is_update: bool) -> None:
    """Show or update an output through IPython."""
    from IPython.display import display, update_display

    if is_update:
        update_display(dict(bundle), display_id=display_id, raw=True)
    else:
        display(dict(bundle), display_id=display_id, raw=True)


def running_cell() -> str | None:
    """The id of the request that this thread's cell runs for; None outside of a kernel."""
    request = running_request()
    return request.get("header", {}).get("msg_id")


def running_request() -> Mapping[str, Any]:
    """The request that this thread's cell runs for, as the front end sent it; empty outside of a kernel."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return getattr(shell, "parent_header", None) or {}
