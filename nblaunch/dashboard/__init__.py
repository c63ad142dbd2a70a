"""How a job is shown while it runs and after.

    launcher ──events, samples──> Dashboard ──fold──> JobView ──tabulate──> Table ──> text | HTML

Owns the choice of dashboards for where the code runs. Importing it imports nothing of Jupyter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from nblaunch import env
from nblaunch.dashboard.base import Controls, Dashboard, GuardedDashboard, NullDashboard
from nblaunch.dashboard.lines import LinesPrinter, publish_in_shell
from nblaunch.dashboard.notebook import NotebookDashboard, running_request
from nblaunch.dashboard.text import LiveLine, TextDashboard
from nblaunch.dashboard.widgets import WidgetsDashboard
from nblaunch.host import notebook_service
from nblaunch.packages import is_installed

KINDS = ("auto", "widgets", "html", "text", "none")

__all__ = ["KINDS", "Dashboard", "attach", "choose", "has_widgets", "kernel_shell"]

# The table is published at the first tick after 0.25 s; lines wait a little longer, so that they stand below it.
_FIRST_LINES_S = 0.3


def choose(kind: str = "auto", *, background: bool = False) -> list[Dashboard]:
    """The dashboards for a job, in the order in which the launcher must call them.

    In a Jupyter kernel: widgets that a table replaces at the end, or a table that is updated in place, and for a job
    that the cell waits for, the workers' output below it. Elsewhere: lines of progress and a final table on stderr, and
    the workers' output on stdout.

    Args:
        kind: ``"auto"`` or ``"widgets"``: widgets where a user can see them (:func:`has_widgets`), else
            as ``"html"``; ``"html"``: HTML in a kernel, text elsewhere; ``"text"``: text everywhere; ``"none"``:
            nothing at all.
        background: the caller does not wait for the job. In a kernel, its cell then shows the last lines of output
            as part of the table, and this function must be called from that cell's thread.

    Returns:
        Dashboards that never raise into the launcher; none at all for ``"none"``.

    Raises:
        ValueError: unknown ``kind``.
    """
    if kind not in KINDS:
        raise ValueError(f"dashboard={kind!r} is not one of {', '.join(map(repr, KINDS))}")
    if kind == "none":
        return [GuardedDashboard(NullDashboard())]
    shell = kernel_shell()
    if shell is None:
        # A line that is redrawn needs the terminal for itself: a cell that does not wait for the job may print, too.
        live = None if background else LiveLine()
        return [GuardedDashboard(LinesPrinter(live=live)), GuardedDashboard(TextDashboard(live=live))]
    is_live = (kind == "widgets" and is_interactive()) or (kind == "auto" and has_widgets())
    table: Dashboard = (
        WidgetsDashboard(background=background)
        if is_live
        else NotebookDashboard(background=background, is_html=kind != "text")
    )
    if background:
        return [GuardedDashboard(table)]
    lines = LinesPrinter(
        publish=publish_in_shell(shell), first_s=_FIRST_LINES_S, defers_lines=is_live, merges_equal=True
    )
    return [GuardedDashboard(table), GuardedDashboard(lines)]


def attach(dashboards: Sequence[Dashboard], controls: Controls | None) -> Callable[[], bool]:
    """Connect dashboards with the job that they show.

    Args:
        dashboards: from :func:`choose`.
        controls: acts on a job in the background; None for one that a cell waits for.

    Returns:
        A function that shows the job in the running cell, too; False where there is nothing to show.
    """
    if controls is not None:
        for dashboard in dashboards:
            dashboard.control(controls)
    return lambda: any(dashboard.show_again() for dashboard in dashboards)


def has_widgets() -> bool:
    """Return whether live widgets can be seen: the kernel is interactive, and ipywidgets is installed."""
    return is_interactive() and is_installed("ipywidgets")


def is_interactive() -> bool:
    """Return whether a user may look at the running cell.

    Front ends allow ``input()`` in every request; what executes notebooks by itself (nbclient, papermill, nbconvert)
    never does. Colab has a way of its own to ask.
    """
    content = running_request().get("content", {})
    return bool(content.get("allow_stdin")) or notebook_service.detect(env.snapshot()).name == "colab"


def kernel_shell() -> Any | None:
    """The IPython shell of the Jupyter kernel that this process is, or None. Never imports IPython."""
    ipython = sys.modules.get("IPython")
    get_ipython = getattr(ipython, "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None
