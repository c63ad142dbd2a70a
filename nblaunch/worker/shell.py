"""IPython inside a worker: what is displayed travels to the launcher's cell, and nothing asks for a keyboard.

A forked worker has the kernel's shell. A fresh one whose launcher is a kernel gets a small shell of its own, because
``display`` and matplotlib's inline backend only work where there is one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from nblaunch.events import Displayed, Event

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class EventPublisher:
    """Takes the place of IPython's display publisher: mimebundles become events.

    Widgets are sent as text: a front end asks the kernel for what a view shows, and this one lives in a worker.
    """

    def __init__(self, rank: int, emit: Callable[[Event], None]) -> None:
        self._rank = rank
        self._emit = emit

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        """Send what a display shows to the launcher; as IPython calls it."""
        self._emit(
            Displayed(
                rank=self._rank,
                time_s=time.time(),
                data={kind: content for kind, content in data.items() if kind != _WIDGET_VIEW},
                metadata=dict(metadata or {}),
                transient=dict(transient or {}),
                update=update,
            )
        )

    def clear_output(self, wait: bool = False) -> None:
        """Does nothing: one rank must not wipe what the others show in the same cell."""


def connect(rank: int, emit: Callable[[Event], None]) -> None:
    """Send the displays of this process to the launcher; does nothing in a process without IPython."""
    shell = _current_shell()
    if shell is None:
        return
    # tqdm.auto and others take this key as "widgets will work here".
    shell.config.pop("IPKernelApp", None)
    # The shell's trait accepts its own class of publisher only, so the one it has gets our methods. Making another of
    # that class costs a forked worker 200 page faults.
    publisher = EventPublisher(rank, emit)
    shell.display_pub.publish = publisher.publish
    shell.display_pub.clear_output = publisher.clear_output


def ensure_shell() -> None:
    """Make a small shell in a fresh process that has none."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    if not InteractiveShell.initialized():
        config = Config()
        config.HistoryManager.enabled = False
        InteractiveShell.instance(config=config)


def show_pending_figures() -> None:
    """At the end of the function show figures that were not shown yet, as the end of a cell does."""
    inline: Any = sys.modules.get("matplotlib_inline.backend_inline")
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if inline is None or pyplot is None or "inline" not in pyplot.get_backend():
        return
    inline.flush_figures()


def _current_shell() -> Any:
    module: Any = sys.modules.get("IPython.core.interactiveshell")
    return module.InteractiveShell._instance if module is not None else None
