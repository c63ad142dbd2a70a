"""How a job is shown while it runs and after.

    launcher ──events, samples──> Dashboard ──fold──> JobView ──tabulate──> Table ──> text | HTML

Owns the choice of dashboards for where the code runs. Importing it imports nothing of Jupyter.
"""

from __future__ import annotations

import sys
from typing import Any

from nblaunch.dashboard.base import Dashboard, GuardedDashboard, NullDashboard
from nblaunch.dashboard.lines import LinesPrinter, publish_in_shell
from nblaunch.dashboard.notebook import NotebookDashboard
from nblaunch.dashboard.text import TextDashboard

KINDS = ("auto", "html", "text", "none")

__all__ = ["KINDS", "Dashboard", "choose", "kernel_shell"]

# The table is published at the first tick after 0.25 s; lines wait a little longer, so that they stand below it.
_FIRST_LINES_S = 0.3


def choose(kind: str = "auto", *, background: bool = False) -> list[Dashboard]:
    """The dashboards for a job, in the order in which the launcher must call them.

    In a Jupyter kernel: a table that is updated in place, and for a job that the cell waits for, the workers' output
    below it. Elsewhere: lines of progress and a final table on stderr, and the workers' output on stdout.

    Args:
        kind: ``"auto"`` or ``"html"``: HTML in a kernel, text elsewhere; ``"text"``: text everywhere; ``"none"``:
            nothing at all.
        background: the caller does not wait for the job. In a kernel, its cell then shows the last lines of output
            as part of the table, and this function must be called from that cell's thread.

    Returns:
        Dashboards that never raise into the launcher; none at all for ``"none"``.

    Raises:
        ValueError: unknown ``kind``.
    """
    if kind not in KINDS:
        hint = "; 'widgets' is not available in this version yet" if kind == "widgets" else ""
        raise ValueError(f"dashboard={kind!r} is not one of {', '.join(map(repr, KINDS))}{hint}")
    if kind == "none":
        return [GuardedDashboard(NullDashboard())]
    shell = kernel_shell()
    if shell is None:
        return [GuardedDashboard(TextDashboard()), GuardedDashboard(LinesPrinter())]
    table = GuardedDashboard(NotebookDashboard(background=background, is_html=kind != "text"))
    if background:
        return [table]
    lines = LinesPrinter(publish=publish_in_shell(shell), first_s=_FIRST_LINES_S)
    return [table, GuardedDashboard(lines)]


def kernel_shell() -> Any | None:
    """The IPython shell of the Jupyter kernel that this process is, or None. Never imports IPython."""
    ipython = sys.modules.get("IPython")
    get_ipython = getattr(ipython, "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None
