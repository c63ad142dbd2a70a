"""HTML of a job: one fragment without scripts, style sheets or resources to load. Charts are SVG (``charts.py``).

All text from workers is escaped. Styles are inline, because GitHub and untrusted notebooks remove style sheets. Where
inline styles and SVG are removed too, a plain table with numbers and captions is left. Colours of text are inherited
and tints are half-transparent greys, so that the HTML is legible in light and dark themes. Colours only repeat what
the text next to them states.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nblaunch.dashboard.charts import charts
from nblaunch.dashboard.epochs import EpochTable
from nblaunch.dashboard.html_rows import INLINE, MONO, collapsed_html, rows_html, tiles_html
from nblaunch.dashboard.notices import Notice
from nblaunch.dashboard.palette import BAD, CAUTION, MUTED, ink, outcome_look
from nblaunch.dashboard.table import Table, tabulate
from nblaunch.dashboard.text import render_text
from nblaunch.dashboard.view import JobView


def mimebundle(view: JobView, *, with_output: bool = False) -> dict[str, str]:
    """Return ``{"text/html": ..., "text/plain": ...}`` of the table, for ``display(..., raw=True)``."""
    table = tabulate(view)
    return {
        "text/html": render_html(view, with_output=with_output, table=table),
        "text/plain": render_text(view, with_output=with_output, table=table),
    }


def render_html(view: JobView, *, with_output: bool = False, table: Table | None = None) -> str:
    """Return the table as an HTML fragment.

    Args:
        view: the job.
        with_output: add the notes and the last lines of output of all ranks, if nothing else shows them.
        table: of this view, where it is at hand.
    """
    table = table or tabulate(view)
    parts = [title(view, table)]
    parts += [rows_html(table, table.rows)] if table.rows else []
    parts += [_collapsed(view, table)] if table.collapsed else []
    parts.append(remarks(table))
    parts += [line(table.metrics)] if table.metrics else []
    parts += [f"<div>{''.join(charts(view, has_values=True))}</div>"] if view.is_over else []
    parts.append(epochs(table.epochs))
    if with_output:
        parts += [line(f"note: {text}") for text in table.notes]
        parts += [_tail(view.tail, is_live=not view.is_over)] if view.tail else []
    parts += [line(table.memory)] if table.memory else []
    if table.log_dir:
        parts.append(line(f"logs: {table.log_dir}"))
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;'
        f'font-variant-numeric:tabular-nums;color:inherit;padding:2px 0">{"".join(parts)}</div>'
    )


def title(view: JobView, table: Table) -> str:
    """Return name, state and setting of the job, and a second line if its start method is not the usual one."""
    look = outcome_look(view.outcome)
    shape = _shape(look.shape, look.colour)
    name = f"<b>{escape(table.name)}</b> " if view.is_started else ""
    why = f' title="{escape(f"{view.start_method}: {view.reason}")}"' if view.reason else ""
    setting = f' <span style="{MUTED}"{why}>on {escape(table.setting)}</span>' if view.is_started else ""
    fallback = line(table.fallback) if table.fallback else ""
    return f"<div>{shape}{name}{escape(table.headline)}{setting}</div>{fallback}"


def remarks(table: Table) -> str:
    """Return failures, notices and warnings; empty if there are none."""
    failures = [_labelled(label, text, "✗", BAD) for label, text in table.failures]
    warnings = [_labelled("warning", text, "▲", CAUTION) for text in table.warnings]
    return "".join([*failures, *map(_notice, table.notices), *warnings])


def _collapsed(view: JobView, table: Table) -> str:
    """Return the ranks in lockstep. While the job runs, each update closes what a user has opened, so it is open."""
    if view.is_over:
        return collapsed_html(table)
    return f"<div>{escape(table.collapsed)}</div>{tiles_html(table.tiles)}"


def _shape(shape: str, colour: str) -> str:
    return f'<span aria-hidden="true" style="{ink(colour)}">{shape}</span> '


def _labelled(label: str, text: str, shape: str, colour: str) -> str:
    return (
        f'<div style="margin:2px 0">{_shape(shape, colour)}<b>{escape(label)}</b> '
        f'<span style="{MONO};overflow-wrap:anywhere">{escape(text)}</span></div>'
    )


def _notice(notice: Notice) -> str:
    shape, colour = ("▲", CAUTION) if notice.kind in ("slow", "memory") else ("✗", BAD)
    lines = "".join(f'<div style="{MONO};padding-left:2em">{escape(line)}</div>' for line in notice.lines)
    return f'<div style="margin:2px 0">{_shape(shape, colour)}{escape(notice.text)}{lines}</div>'


_FREE_ROW = (
    '<tr style="background:none;border:0;border-bottom:1px solid transparent">'
    '<td style="border:0;padding:3px 0">&nbsp;</td></tr>'
)
"""As high as any other row; with the fewest bytes, since it is sent with each update."""


def epochs(table: EpochTable) -> str:
    """Return the table of epochs; empty without any."""
    if not table.columns:
        return ""
    right = INLINE.of("right")
    heads = "".join(
        f'<td role="columnheader" {right}><span style="{MUTED}">{escape(name)}</span></td>'
        for name in table.columns
    )
    rows = "".join(
        f"<tr {INLINE.of('row')}>{''.join(f'<td {right}>{escape(text)}</td>' for text in row)}</tr>"
        for row in table.rows
    )
    rows += _FREE_ROW * table.num_free
    note = line(table.note) if table.note else ""
    return (
        f'<table aria-label="epochs" {INLINE.of("table")}>'
        f"<tr {INLINE.of('row')}>{heads}</tr>{rows}</table>{note}"
    )


def line(text: str) -> str:
    """Return a line of muted text."""
    return f'<div style="{MUTED};font-size:12px">{escape(text)}</div>'


def _tail(tail: Sequence[tuple[int, str]], *, is_live: bool) -> str:
    """Return lines of output; while the job runs in a frame of constant height, at its end."""
    lines = "\n".join(f"[{rank}] {line}" for rank, line in tail)
    style = "margin:4px 0;padding:4px 8px;border-left:2px solid rgba(128,128,128,.3);background:none;color:inherit"
    frame = ";height:153px;overflow:auto;display:flex;flex-direction:column-reverse" if is_live else ""
    pre = f"margin:0;{MONO};line-height:17px;white-space:pre-wrap;background:none;color:inherit"
    return f'<div style="{style}{frame}"><pre style="{pre}">{escape(lines)}</pre></div>'
