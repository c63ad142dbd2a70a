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
from nblaunch.dashboard.notices import Notice
from nblaunch.dashboard.table import GRID_COLUMNS, GridCell, Row, Table, tabulate
from nblaunch.dashboard.text import render_text
from nblaunch.dashboard.view import JobView
from nblaunch.events import WorkerState

LIVE, GOOD, BAD, CALM = "#3b82d6", "#2f9e6e", "#d64545", "#8a8f98"
CAUTION = "#b97c12"

STATE_COLOURS = {
    WorkerState.STARTING: CALM,
    WorkerState.RUNNING: LIVE,
    WorkerState.TRAINING: LIVE,
    WorkerState.EVALUATING: "#8b6fd6",
    WorkerState.WAITING: CAUTION,
    WorkerState.COMPILING: "#8b6fd6",
    WorkerState.FINISHING: GOOD,
    WorkerState.DONE: GOOD,
    WorkerState.FAILED: BAD,
    WorkerState.STOPPED: CALM,
}


def outcome_colour(outcome: str) -> str:
    """Return the colour of a job; ``outcome`` as in :class:`nblaunch.events.JobEnded`, empty while it runs."""
    return {"": LIVE, "done": GOOD, "failed": BAD}.get(outcome, CALM)


_SPARK_WIDTH, _SPARK_HEIGHT = 72, 16
_SPARK_POINTS = 24  # a point for 3 pixels


def sparkline(history: Sequence[float]) -> str:
    """Return the losses of the whole job as a curve of the height of text; empty for less than two values."""
    if len(history) < 2:
        return ""
    shown = history if len(history) <= _SPARK_POINTS else _thinned(history)
    low, high = min(shown), max(shown)
    scale = (_SPARK_HEIGHT - 3) / (high - low) if high > low else 0.0
    step = (_SPARK_WIDTH - 3) / (len(shown) - 1)
    points = " ".join(
        f"{1.5 + index * step:.0f},{_SPARK_HEIGHT - 1.5 - (value - low) * scale:.1f}"
        for index, value in enumerate(shown)
    )
    label = f"loss from {history[0]:.4g} to {history[-1]:.4g}"
    return (
        f'<svg width="{_SPARK_WIDTH}" height="{_SPARK_HEIGHT}" role="img" style="vertical-align:middle;opacity:.75">'
        f'<title>{label}</title><polyline points="{points}" fill="none" stroke="currentColor"></polyline></svg>'
    )


def _thinned(history: Sequence[float]) -> list[float]:
    """Return evenly spaced values including the last one, at most :data:`_SPARK_POINTS`."""
    stride = -(-len(history) // (_SPARK_POINTS - 1))
    kept = list(history[::stride])
    return kept if (len(history) - 1) % stride == 0 else [*kept, history[-1]]


# These are repeated in every cell of every update; styles that cells inherit are set on the table and the rows.
_CELL = "border:0;padding:3px 14px 3px 0"
_LEFT, _RIGHT = f"{_CELL};text-align:left", f"{_CELL};text-align:right"
_HEAD = "font-weight:normal;opacity:.65"
_TABLE = "border-collapse:collapse;border:0;margin:4px 0;width:auto;white-space:nowrap"
_ROW = "background:none;border:0;border-bottom:1px solid rgba(128,128,128,.2)"
_MUTED = "opacity:.65"
_MONO = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px"


def mimebundle(view: JobView, *, with_output: bool = False) -> dict[str, str]:
    """Return ``{"text/html": ..., "text/plain": ...}`` of the table, for ``display(..., raw=True)``."""
    return {
        "text/html": render_html(view, with_output=with_output),
        "text/plain": render_text(view, with_output=with_output),
    }


def render_html(view: JobView, *, with_output: bool = False) -> str:
    """Return the table as an HTML fragment.

    Args:
        view: the job.
        with_output: add the notes and the last lines of output of all ranks, if nothing else shows them.
    """
    table = tabulate(view)
    parts = [title(view, table)]
    if table.rows:
        parts.append(table_of(table))
    parts += [grid(table.grid)] if table.grid else []
    parts.append(remarks(table))
    parts += [line(table.metrics)] if table.metrics else []
    parts += [charts(view, has_values=True)] if view.is_over else []
    parts.append(epochs(table.epochs))
    if with_output:
        parts += [line(f"note: {text}") for text in table.notes]
        parts += [_tail(view.tail)] if view.tail else []
    parts += [line(table.memory)] if table.memory else []
    if table.log_dir:
        parts.append(line(f"logs: {table.log_dir}"))
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;'
        f'font-variant-numeric:tabular-nums;color:inherit;padding:2px 0">{"".join(parts)}</div>'
    )


def title(view: JobView, table: Table) -> str:
    """Return name, state and setting of the job, and a second line if its start method is not the usual one."""
    colour = outcome_colour(view.outcome)
    name = f"<b>{escape(table.name)}</b> " if view.is_started else ""
    why = f' title="{escape(f"{view.start_method}: {view.reason}")}"' if view.reason else ""
    setting = f' <span style="{_MUTED}"{why}>on {escape(table.setting)}</span>' if view.is_started else ""
    fallback = line(table.fallback) if table.fallback else ""
    return f"<div>{_dot(colour)}{name}{escape(table.headline)}{setting}</div>{fallback}"


def remarks(table: Table) -> str:
    """Return failures, notices and warnings; empty if there are none."""
    failures = [_labelled(label, text, BAD) for label, text in table.failures]
    warnings = [_labelled("warning", text, CAUTION) for text in table.warnings]
    return "".join([*failures, *map(_notice, table.notices), *warnings])


def _dot(colour: str) -> str:
    return f'<span style="color:{colour}">&#9679;</span> '


def table_of(table: Table) -> str:
    """Return the rows of the table."""
    has_bar = any(row.fraction is not None for row in table.rows)
    has_spark = any(len(row.loss_history) > 1 for row in table.rows)
    has_detail = any(row.detail for row in table.rows)
    heads = [("rank", _RIGHT), ("state", _LEFT), *([("progress", _LEFT)] if has_bar else [])]
    for name in table.columns:
        heads.append((name, _RIGHT))
        heads += [("trend", _LEFT)] if name == "loss" and has_spark else []
    heads += [("output", _LEFT)] if has_detail else []
    head = "".join(f'<th style="{style};{_HEAD}">{name}</th>' for name, style in heads)
    names = [name for name, _ in heads]
    rows = "".join(_row(row, table.columns, names) for row in table.rows)
    return (
        f'<table style="{_TABLE};font-size:13px">'
        f'<thead><tr style="{_ROW}">{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _row(row: Row, columns: Sequence[str], names: Sequence[str]) -> str:
    is_calm = row.rank is None or row.state in (WorkerState.STOPPED, WorkerState.STARTING)
    state = f"{_dot(STATE_COLOURS[row.state])}{escape(row.state_text)}"
    cells = [_cell(row.label, _RIGHT), _cell(state, _LEFT)]
    if "progress" in names:
        cells.append(_cell(_bar(row.fraction, STATE_COLOURS[row.state]), _LEFT))
    for name, text in zip(columns, row.cells, strict=True):
        cells.append(_cell(escape(text), _RIGHT))
        if name == "loss" and "trend" in names:
            cells.append(_cell(sparkline(row.loss_history), _LEFT))
    if "output" in names:
        cells.append(_cell(_detail(row.detail), _LEFT))
    style = f"{_ROW};{_MUTED}" if is_calm else _ROW
    return f'<tr style="{style}">{"".join(cells)}</tr>'


def _cell(content: str, style: str) -> str:
    return f'<td style="{style}">{content}</td>'


def _detail(text: str) -> str:
    if not text:
        return ""
    cut = "max-width:36em;overflow:hidden;text-overflow:ellipsis;white-space:pre"
    return f'<div style="{_MONO};{_MUTED};{cut}">{escape(text)}</div>'


def _bar(fraction: float | None, colour: str) -> str:
    if fraction is None:
        return ""
    return (
        '<div style="width:96px;background:rgba(128,128,128,.25)">'
        f'<div style="width:{100 * fraction:.0f}%;height:6px;background:{colour}"></div></div>'
    )


def grid(cells: Sequence[GridCell]) -> str:
    """Return the grid of ranks without a row: a tile each, with rank, state or progress, and a bar."""
    rows = "".join(
        f'<tr style="background:none">{"".join(map(_tile, cells[start : start + GRID_COLUMNS]))}</tr>'
        for start in range(0, len(cells), GRID_COLUMNS)
    )
    return f'<table style="{_TABLE};font-size:11px"><tbody>{rows}</tbody></table>'


def _tile(cell: GridCell) -> str:
    colour = STATE_COLOURS[cell.state]
    width = 100 * (cell.fraction if cell.fraction is not None else 1.0 if cell.state.is_final else 0.0)
    bar = f'<div style="width:{width:.0f}%;height:3px;background:{colour}"></div>'
    return (
        f'<td style="border:0;padding:1px 8px 3px 0;text-align:left;min-width:72px">'
        f'<span style="{_MUTED}">{cell.rank}</span> <span>{escape(cell.text)}</span>'
        f'<div style="height:3px;background:rgba(128,128,128,.25)">{bar}</div></td>'
    )


def epochs(table: EpochTable) -> str:
    """Return the table of epochs; empty without any."""
    if not table.columns:
        return ""
    free = ("&nbsp;",) * len(table.columns)
    heads = "".join(f'<th scope="col" style="{_RIGHT};{_HEAD}">{escape(name)}</th>' for name in table.columns)
    cells = [[escape(text) for text in row] for row in table.rows] + [list(free)] * table.num_free
    rows = "".join(f'<tr style="{_ROW}">{"".join(_cell(text, _RIGHT) for text in row)}</tr>' for row in cells)
    note = line(table.note) if table.note else ""
    return (
        f'<table style="{_TABLE};font-size:13px">'
        f'<thead><tr style="{_ROW}">{heads}</tr></thead><tbody>{rows}</tbody></table>{note}'
    )


def _labelled(label: str, text: str, colour: str) -> str:
    return (
        f'<div style="margin:2px 0"><span style="color:{colour}">{escape(label)}</span> '
        f'<span style="{_MONO}">{escape(text)}</span></div>'
    )


def _notice(notice: Notice) -> str:
    colour = CAUTION if notice.kind == "slow" else BAD
    lines = "".join(f'<div style="{_MONO};padding-left:2em">{escape(line)}</div>' for line in notice.lines)
    return f'<div style="margin:2px 0">{_dot(colour)}{escape(notice.text)}{lines}</div>'


def line(text: str) -> str:
    """Return a line of muted text."""
    return f'<div style="{_MUTED};font-size:12px">{escape(text)}</div>'


def _tail(tail: Sequence[tuple[int, str]]) -> str:
    lines = "\n".join(f"[{rank}] {line}" for rank, line in tail)
    style = "margin:4px 0;padding:4px 8px;border-left:2px solid rgba(128,128,128,.3);background:none;color:inherit"
    return f'<pre style="{style};{_MONO};white-space:pre-wrap">{escape(lines)}</pre>'
