"""Displays a job while it runs and after it has ended.

    launcher ──events, board readings──> Dashboard ──fold──> JobView ──tabulate──> Table ──> text | HTML | widgets

base.py            Dashboard: receives events and readings of the progress board from the launcher
fold.py            updates the view of the job after each event or reading
view.py            JobView: the state of a job as it is shown
rates.py           a rank's rates over the last few seconds, and forecasts based on them
table.py           all text of the view: rows of the whole job and of ranks, headline, failures, epochs
columns.py         its columns: when each appears, and its text for a rank and for the whole job
result.py          how a job ended: its figures, whether all ranks did the same, its failures
notices.py         slow and stalled ranks, non-finite losses; sets the rate of a stopped rank to 0
text.py            the table as text, and the progress in one line; the dashboard for scripts and terminals, with a
                   table that is redrawn in place
html.py            the table as HTML
charts.py          losses and logged metrics as curves
palette.py         colours and shapes of states and outcomes
notebook.py        the dashboard for notebooks: a cell output, updated in place, with live widgets or a table
  widget_panel.py      the widgets: headline, buttons, rows, charts, the ranks' last lines
  widget_throttle.py   updates within a budget
lines.py           workers' output in the cell or terminal, labelled, merged, folded and shortened; the last lines

:func:`choose` picks the dashboards for the front end. Importing this package does not import Jupyter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, TextIO, get_args

from nblaunch.dashboard.base import Dashboard, GuardedDashboard, ShownJob
from nblaunch.dashboard.lines import LinesPrinter, publish_in_shell
from nblaunch.dashboard.notebook import NotebookDashboard, is_on_colab, running_request
from nblaunch.dashboard.text import LiveTable, TextDashboard, moves_cursor
from nblaunch.events import JobEnded
from nblaunch.packages import is_installed
from nblaunch.spec import DashboardKind
from nblaunch.user_code import ipython_shell

KINDS: tuple[str, ...] = get_args(DashboardKind)

__all__ = [
    "KINDS",
    "Dashboard",
    "choose",
    "connect",
    "kernel_shell",
    "lines_printer",
    "open_live",
    "show_again",
    "text_dashboards",
]

# The table is published at the first tick after 0.25 s. Lines follow a little later, so that they appear below it.
_FIRST_LINES_S = 0.3


def choose(kind: str = "auto", *, background: bool = False) -> list[Dashboard]:
    """Return the dashboards for a job, in the order in which the launcher must call them.

    In a Jupyter kernel, the display is a set of widgets that a table replaces at the end, or a table that is updated
    in place. The output of the workers appears below the display, unless the job runs in the background. If a user may
    be watching, the display includes only the last lines while the job runs, so that the display stays in sight; all
    lines follow at the end. Elsewhere, progress lines and a final table go to stderr, and the output of the workers
    goes to stdout.

    Args:
        kind: ``"auto"`` and ``"widgets"``: widgets if a user may see them (:func:`is_interactive`), otherwise the
            same as ``"html"``; ``"auto"`` uses widgets only if ipywidgets is installed. ``"html"``: HTML in a kernel,
            text elsewhere. ``"text"``: text everywhere. ``"none"``: no display.
        background: the caller does not wait for the job. In a kernel, the table then includes the last lines of
            output, and this function must be called from the thread of the cell.

    Returns:
        Dashboards whose errors never reach the launcher; an empty list for ``"none"``.

    Raises:
        ValueError: unknown ``kind``.
    """
    if kind not in KINDS:
        raise ValueError(f"dashboard={kind!r} is not one of {', '.join(map(repr, KINDS))}")
    if kind == "none":
        return []
    shell = kernel_shell()
    if shell is None:
        # Other output breaks a table that is redrawn in place, and the caller of a background job may print.
        return text_dashboards(is_live=not background)
    is_watched = is_interactive()
    has_widgets = is_watched and (kind == "widgets" or (kind == "auto" and is_installed("ipywidgets")))
    table = NotebookDashboard(
        background=background, has_widgets=has_widgets, is_html=kind != "text", is_watched=is_watched
    )
    if background:
        return [GuardedDashboard(table)]
    return [
        GuardedDashboard(table),
        lines_printer(first_s=_FIRST_LINES_S, defers_lines=is_watched, omits_hangs=True, folds=True),
    ]


def text_dashboards(*, is_live: bool = True, shortens: bool = True) -> list[Dashboard]:
    """Return dashboards for a terminal or a file: the workers' lines on stdout, all else on stderr.

    Args:
        is_live: redraw the progress in place on a terminal; requires that nothing else writes to the terminal.
        shortens: leave out lines from ranks that print a lot; set it to False if programs may read the output.
    """
    live = open_live() if is_live else None
    return [
        GuardedDashboard(LinesPrinter(live=live, shortens=shortens, notes_to_stderr=True)),
        GuardedDashboard(TextDashboard(live=live)),
    ]


def lines_printer(**options: Any) -> Dashboard:
    """Return a dashboard that prints workers' output and all notes, without a table, in the cell or on stdout.

    Args:
        **options: passed to :class:`LinesPrinter`.
    """
    shell = kernel_shell()
    publish = publish_in_shell(shell) if shell is not None else None
    return GuardedDashboard(LinesPrinter(publish=publish, merges_equal=True, **options))


def open_live(stream: TextIO | None = None) -> LiveTable | None:
    """Return a table that is redrawn in place; None if the cursor can't be moved.

    Args:
        stream: default: ``sys.stderr``.
    """
    return LiveTable(stream) if moves_cursor(sys.stderr if stream is None else stream) else None


def connect(dashboards: Sequence[Dashboard], job: ShownJob) -> None:
    """Connect dashboards to their job, so that their buttons can send requests to it and other cells can show it.

    Args:
        dashboards: from :func:`choose`.
        job: the job; the dashboards get no buttons if the cell waits for the job.
    """
    job.show_with(partial(show_again, dashboards))
    for dashboard in dashboards:
        dashboard.control(job)


def show_again(dashboards: Sequence[Dashboard]) -> bool:
    """Also show the job of ``dashboards`` in the running cell; return False if there is nothing to show."""
    return any(dashboard.show_again() for dashboard in dashboards)


def close_rejected(dashboards: Sequence[Dashboard], error: BaseException) -> None:
    """Show that ``error`` prevented the launch, because no job will report its end to these dashboards."""
    message = f"{type(error).__name__}: {error}"
    for dashboard in dashboards:
        dashboard.on_event(JobEnded(outcome="failed", message=message))
        dashboard.close()


def is_interactive() -> bool:
    """Return whether a user may be looking at the running cell.

    Front ends allow ``input()`` in every request; programs that execute notebooks (nbclient, papermill, nbconvert)
    never do. Colab has its own protocol for input.
    """
    content = running_request().get("content", {})
    return bool(content.get("allow_stdin")) or is_on_colab()


def kernel_shell() -> Any | None:
    """Return the IPython shell if this process is a Jupyter kernel, else None. Never imports IPython."""
    shell = ipython_shell()
    return shell if getattr(shell, "kernel", None) is not None else None
