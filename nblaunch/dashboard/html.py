"""The HTML for a job: one fragment without scripts, style sheets or resources to load. Charts are SVG (``charts.py``).

All text from workers is escaped. Styles are inline, because style sheets are removed on GitHub and in untrusted
notebooks. If a front end also removes inline styles and SVG, a plain table with numbers and captions remains. Colours
of text are inherited and tints are half-transparent greys, so the HTML is legible in light and dark themes. Colours
only repeat what the text next to them says.

The same rows are shown while a job runs and after its end, so nothing moves when it ends. For screen readers, tables
have labels, header cells have header roles, and bars have the progress bar role.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from nblaunch.dashboard.charts import charts
from nblaunch.dashboard.columns import COLUMNS, full_length
from nblaunch.dashboard.notices import Notice
from nblaunch.dashboard.palette import (
    BAD,
    CALM,
    CAUTION,
    COLOURS,
    MUTED,
    STATE_LOOKS,
    ink,
    outcome_look,
    shape_of,
)
from nblaunch.dashboard.result import Failure
from nblaunch.dashboard.table import EpochTable, Row, Table, tabulate
from nblaunch.dashboard.text import Tail, render_text, shows_rows
from nblaunch.dashboard.view import JobView
from nblaunch.events import WorkerState

_CELL = "border:0;padding:3px 12px 3px 0;font-weight:inherit;white-space:nowrap"
_ROW = "background:none;border:0;border-bottom:1px solid rgba(128,128,128,.2)"
MONO = "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px"
_STYLES = {
    "table": "border-collapse:collapse;border:0;margin:4px 0;width:auto;white-space:nowrap;font-size:13px",
    "row": f"{_ROW};font-weight:normal",
    "calm": f"{_ROW};font-weight:normal;{MUTED}",
    "whole": f"{_ROW};font-weight:600",
    "left": f"{_CELL};text-align:left",
    "right": f"{_CELL};text-align:right",
    "wrapped": "display:inline-block;width:0;min-width:100%;white-space:normal",
    "muted": MUTED,
    "detail": f"{MONO};{MUTED};max-width:36em;overflow:hidden;text-overflow:ellipsis;white-space:pre",
    "track": "width:80px;background:rgba(128,128,128,.25)",
    **{f"ink{number}": ink(colour) for number, colour in enumerate(COLOURS)},
    **{f"bar{number}": f"height:6px;background:{colour}" for number, colour in enumerate(COLOURS)},
}
_USUAL = {"right", "row"}  # styles of all elements of a table that have no class
_CLASS = "nbl-"


@dataclass(frozen=True)
class Markup:
    """The styles of elements: inline, or as class names, which make each update much smaller.

    Args:
        is_inline: styles are inline; otherwise :data:`STYLE_SHEET` must be on the page.
    """

    is_inline: bool = True

    def of(self, name: str, more: str = "") -> str:
        """Return a space and the attributes of an element that has the style ``name`` and the properties ``more``."""
        if self.is_inline:
            return f' style="{_STYLES[name]}{";" if more else ""}{more}"'
        named = "" if name in _USUAL else f' class="{_CLASS}{name}"'
        return f'{named} style="{more}"' if more else named


INLINE = Markup()

STYLE_SHEET = (
    "<style>"
    + f".{_CLASS}table td{{{_STYLES['right']}}}.{_CLASS}table tr{{{_STYLES['row']}}}"
    + "".join(
        f":is(.{_CLASS}{name}, .{_CLASS}table .{_CLASS}{name}){{{style}}}" for name, style in _STYLES.items()
    )
    + "</style>"
)
"""The styles as a style sheet; if the front end removes it, a plain table remains."""


def mimebundle(view: JobView, *, tail: Tail | None = None, has_logs: bool = True) -> dict[str, str]:
    """Return the table as ``{"text/html": ..., "text/plain": ...}``, for ``display(..., raw=True)``.

    With ``has_logs=False``, the log folder is left to :func:`log_bundle`.
    """
    table = tabulate(view)
    table = table if has_logs else replace(table, log_dir="")
    return {
        "text/html": render_html(view, tail=tail, table=table),
        "text/plain": render_text(view, tail=tail, table=table),
    }


def log_bundle(view: JobView) -> dict[str, str]:
    """Return the log folder, for ``display(..., raw=True)``."""
    text = f"logs: {view.start.log_dir}" if view.start.log_dir else ""
    return {"text/html": line(text), "text/plain": text}


def render_html(
    view: JobView, *, tail: Tail | None = None, table: Table | None = None, is_last_known: bool = False
) -> str:
    """Return the table as an HTML fragment.

    Args:
        view: the job.
        tail: the last lines of output, shown with the notes; None if another output shows them.
        table: table of this view, if the caller has it.
        is_last_known: whether the job may have ended by the time the user sees this; if so, charts and the time are
            added.
    """
    table = table or tabulate(view)
    parts = [title(view, table), cards(table, is_over=view.is_over), figures(table)]
    parts += [_rows_or_summary(view, table)] if table.rows else []
    parts.append(remarks(table))
    parts.append(line(table.metrics))
    parts += [f"<div>{''.join(charts(view))}</div>"] if view.is_over or is_last_known else []
    parts.append(epochs(table.epochs))
    if tail is not None:
        parts += [line(f"note: {text}") for text in table.notes]
        parts += [_tail(tail, is_live=not view.is_over)] if tail else []
    parts.append(runs(table))
    parts.append(line(f"logs: {table.log_dir}" if table.log_dir else ""))
    parts.append(line(last_known(view)) if is_last_known else "")
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;'
        f'font-variant-numeric:tabular-nums;color:inherit;padding:2px 0">{"".join(parts)}</div>'
    )


def runs(table: Table) -> str:
    """Return one line that lists the trackers' runs, as links if they have an address; empty if there are no runs."""
    shown = ", ".join(f"{escape(tracker)} {_link(location)}" for tracker, location in table.runs)
    return f'<div style="font-size:12px"><span style="{MUTED}">runs:</span> {shown}</div>' if shown else ""


def _link(location: str) -> str:
    if not location.startswith(("http://", "https://")):
        return f'<span style="{MONO}">{escape(location)}</span>'
    return f'<a href="{escape(location)}" target="_blank" rel="noopener">{escape(location)}</a>'


def last_known(view: JobView) -> str:
    """Return a sentence that says when a view was up to date."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.now_s)) if view.now_s else "its start"
    return f"last known at {at}; the result replaces this once the job has ended"


def title(view: JobView, table: Table) -> str:
    """Return the name, progress, state and setting of the job, and a second line if its start method is unusual."""
    look = outcome_look(view.outcome)
    still = table.stall
    is_failing = bool(table.failures) and not view.is_over
    shape = _glyph("✗", BAD) if is_failing else _glyph(look.shape, look.colour)
    if still is not None:
        shape = _glyph(*(("✗", BAD) if still.is_certain else ("▲", CAUTION)))
    name = f"<b>{escape(table.name)}</b> " if view.is_started else ""
    why = f' title="{escape(f"{view.start.start_method}: {view.start.reason}")}"' if view.start.reason else ""
    setting = f' <span style="{MUTED}"{why}>on {escape(table.setting)}</span>' if view.is_started else ""
    progress = f'{escape(table.progress)} <span style="{MUTED}">·</span> ' if table.progress else ""
    if still is not None:
        colour = BAD if still.is_certain else CAUTION
        return f'<div>{shape} {name}<b style="{ink(colour)}">{escape(still.text)}</b></div>{line(table.fallback)}'
    return f"<div>{shape} {name}{progress}{escape(table.headline)}{setting}</div>{line(table.fallback)}"


_NEXT = (
    "The traceback follows. post_mortem=True keeps the ranks where they are, so that nblaunch.debug() can inspect "
    "them."
)


def cards(table: Table, *, is_over: bool) -> str:
    """Return the failures: a card for each cause, and a line for its consequences; empty if there are none."""
    return "".join(
        _consequence(failure) if failure.is_secondary else _card(failure, is_last=is_over)
        for failure in table.failures
    )


def _card(failure: Failure, *, is_last: bool) -> str:
    where = (
        f'<div style="{MONO};overflow-wrap:anywhere">{escape(failure.where)}</div>' if failure.where else ""
    )
    lines = failure.advice or ((_NEXT,) if is_last and failure.where else ())
    advice = "".join(f"<div>{escape(text)}</div>" for text in lines)
    return (
        f'<div style="margin:4px 0;padding:4px 10px;border-left:3px solid {BAD};background:rgba(224,86,86,.09)">'
        f'<div style="overflow-wrap:anywhere">{_glyph("✗", BAD)} <b>{escape(failure.who)}</b> '
        f"<b>{escape(failure.text)}</b></div>{where}{advice}</div>"
    )


def _consequence(failure: Failure) -> str:
    return f'<div style="margin:2px 0;{MUTED}">{escape(f"{failure.who} {failure.text}")}</div>'


_FIGURE = "border:0;background:none;text-align:left;padding:0 22px 0 0;white-space:nowrap"
_FIGURE_TEXTS = (f"{MUTED};font-size:12px", "font-size:17px;font-weight:600", f"{MUTED};font-size:12px")


def figures(table: Table) -> str:
    """Return the figures of a job that has ended, side by side, with their names and notes; empty if there are none."""
    rows = (
        "".join(
            '<tr style="border:0;background:none">'
            + "".join(
                f'<td style="{_FIGURE}"><span style="{style}">{escape(text)}</span></td>' for text in texts
            )
            + "</tr>"
            for texts, style in zip(zip(*table.figures, strict=True), _FIGURE_TEXTS, strict=True)
            if any(texts)
        )
        if table.figures
        else ""
    )
    style = "border-collapse:collapse;border:0;margin:6px 0"
    scrolls = '<div style="overflow-x:auto">'
    return f'{scrolls}<table aria-label="result" style="{style}">{rows}</table></div>' if rows else ""


def _rows_or_summary(view: JobView, table: Table) -> str:
    """Return the rows, collapsed under a summary if they add nothing; no rows for a single rank that has ended."""
    if shows_rows(view, table):
        return rows_html(table)
    if not table.alike:
        return ""
    if len(table.columns) == 0:
        return line(table.alike)
    style = f"{MUTED};font-size:12px;cursor:pointer"
    return f'<details><summary style="{style}">{escape(table.alike)}</summary>{rows_html(table)}</details>'


def remarks(table: Table) -> str:
    """Return notices and warnings; empty if there are none."""
    warnings = [_labelled("warning", text, "▲", CAUTION) for text in table.warnings]
    advice = table.stall.advice if table.stall is not None else ""
    advice = f'<div style="padding-left:2em">{escape(advice)}</div>' if advice else ""
    return "".join([*map(_notice, table.notices), advice, *warnings])


def _labelled(label: str, text: str, shape: str, colour: str) -> str:
    return (
        f'<div style="margin:2px 0">{_glyph(shape, colour)} <b>{escape(label)}</b> '
        f'<span style="{MONO};overflow-wrap:anywhere">{escape(text)}</span></div>'
    )


def _notice(notice: Notice) -> str:
    shape, colour = ("▲", CAUTION) if notice.kind == "slow" else ("✗", BAD)
    lines = "".join(f'<div style="{MONO};padding-left:2em">{escape(line)}</div>' for line in notice.lines)
    return f'<div style="margin:2px 0">{_glyph(shape, colour)} {escape(notice.text)}{lines}</div>'


def epochs(table: EpochTable) -> str:
    """Return the table of epochs; empty if there are none."""
    if not table.columns:
        return ""
    right = INLINE.of("right")
    heads = "".join(_head(name) for name in table.columns)
    rows = "".join(
        f"<tr{INLINE.of('row')}>{''.join(f'<td{right}>{escape(text)}</td>' for text in row)}</tr>"
        for row in table.rows
    )
    return (
        f'<table aria-label="epochs"{INLINE.of("table")}>'
        f"<tr{INLINE.of('row')}>{heads}</tr>{rows}</table>{line(table.note)}"
    )


def _head(name: str, style: str = "right", more: str = "", markup: Markup = INLINE) -> str:
    """Return the header of a column."""
    return f'<td role="columnheader"{markup.of(style, more)}><span{markup.of("muted")}>{escape(name)}</span></td>'


def line(text: str) -> str:
    """Return a line of muted text; empty for empty text."""
    return f'<div style="{MUTED};font-size:12px">{escape(text)}</div>' if text else ""


def _tail(tail: Tail, *, is_live: bool) -> str:
    """Return lines of output; while the job runs, they are in a frame of fixed height that shows the last ones."""
    lines = "\n".join(f"[{rank}] {line}" for rank, line in tail)
    style = "margin:4px 0;padding:4px 8px;border-left:2px solid rgba(128,128,128,.3);background:none;color:inherit"
    frame = ";height:153px;overflow:auto;display:flex;flex-direction:column-reverse" if is_live else ""
    pre = f"margin:0;{MONO};line-height:17px;white-space:pre-wrap;background:none;color:inherit"
    return f'<div style="{style}{frame}"><pre style="{pre}">{escape(lines)}</pre></div>'


# --- rows ----------------------------------------------------------------------------------------------------------

_STATE_WIDTH = 20  # in digits, like the usual widths of the other columns


def rows_html(table: Table, markup: Markup = INLINE) -> str:
    """Return the rows, and the line about the ranks in lockstep, as HTML."""
    trains = "step" in table.columns
    heads = [("rank", "right"), ("state", "left")]
    heads += [("progress", "left")] if trains or any(row.fraction is not None for row in table.rows) else []
    heads += [(name, "right") for name in table.columns]
    heads += [("output", "left")] if any(row.detail for row in table.rows) else []
    numbers = {"state": _STATE_WIDTH, **{name: column.usual_width for name, column in COLUMNS.items()}}
    widths = {name: f"min-width:{number}ch" for name, number in numbers.items()}
    if trains:
        at = table.columns.index("step")
        widths["step"] = f"min-width:{max(full_length(row.cells[at]) for row in table.rows)}ch"
    head = "".join(_head(name, style, widths.get(name, ""), markup) for name, style in heads)
    names = [name for name, _ in heads]
    body = "".join(_row(row, names, markup) for row in table.rows)
    collapsed = f"<div>{escape(table.collapsed)}</div>" if table.collapsed else ""
    return (
        f'<table aria-label="ranks of {escape(table.name)}"{markup.of("table")}>'
        f"<tr{markup.of('row')}>{head}</tr>{body}</table>{collapsed}"
    )


def _row(row: Row, names: Sequence[str], markup: Markup) -> str:
    def cell(content: str, style: str = "left") -> str:
        return f"<td{markup.of(style)}>{content}</td>"

    cells = [f'<td role="rowheader"{markup.of("right")}>{escape(row.label)}</td>']
    cells.append(cell(_state(row, markup)))
    cells += [cell(_bar(row, markup))] if "progress" in names else []
    cells += [cell(escape(text), "right") for text in row.cells]
    cells += [cell(_detail(row.detail, markup))] if "output" in names else []
    is_calm = row.is_secondary or row.state in (WorkerState.STOPPED, WorkerState.STARTING)
    style = "whole" if row.rank is None else "calm" if is_calm else "row"
    return f"<tr{markup.of(style)}>{''.join(cells)}</tr>"


def _state(row: Row, markup: Markup) -> str:
    differs = row.is_marked and row.rank is not None
    look = shape_of(row.state, is_marked=differs)
    if row.is_secondary or row.is_stuck:
        look = "✗", CALM if row.is_secondary else BAD
    glyph = _glyph(*look, markup)
    text = escape(row.state_text)
    shown = f"{glyph} <b>{text}</b>" if differs else f"{glyph} {text}"
    # Text that is too long wraps onto a second line, so the columns next to it keep their places.
    return f"<div{markup.of('wrapped')}>{shown}</div>"


def _glyph(shape: str, colour: str, markup: Markup = INLINE) -> str:
    return f'<span aria-hidden="true"{markup.of(f"ink{COLOURS.index(colour)}")}>{shape}</span>'


def _detail(text: str, markup: Markup) -> str:
    return f"<div{markup.of('detail')}>{escape(text)}</div>" if text else ""


def _bar(row: Row, markup: Markup) -> str:
    if row.fraction is None:
        return ""
    width = f"width:{_percent(row.fraction)}"
    about = "the job" if row.rank is None else f"rank {row.rank}"
    colour = CALM if row.is_secondary else BAD if row.is_stuck else STATE_LOOKS[row.state].colour
    bar = f"<div{markup.of(f'bar{COLOURS.index(colour)}', width)}></div>"
    return (
        # The value is in a progress bar's default range, 0 to 100 (WAI-ARIA 1.2).
        f'<div role="progressbar" aria-label="{about}" aria-valuenow="{int(100 * row.fraction)}"'
        f"{markup.of('track')}>{bar}</div>"
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}".removesuffix(".0") + "%"
