"""A job as one piece of HTML that stands alone: no scripts, no style sheet, nothing fetched.

Owns layout. Everything a worker can influence is escaped. Styles are inline, because GitHub and untrusted
notebooks drop style sheets; where they drop inline styles and SVG too, a plain table with words and numbers is left.
Text takes the colour of its surroundings and lines and tints are half-transparent greys, so that the same HTML reads
well in light and dark themes, which a kernel can't know. A colour never stands without its word.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nblaunch.dashboard import colours
from nblaunch.dashboard.chart import charts, sparkline
from nblaunch.dashboard.notices import Notice
from nblaunch.dashboard.table import Table, tabulate
from nblaunch.dashboard.table_rows import GRID_COLUMNS, GridCell, Row
from nblaunch.dashboard.text import render_text
from nblaunch.dashboard.view import JobView
from nblaunch.events import WorkerState

# Repeated in every cell of every update: what can be inherited stands in the table's and the rows' styles.
_CELL = "border:0;padding:3px 14px 3px 0"
_LEFT, _RIGHT = f"{_CELL};text-align:left", f"{_CELL};text-align:right"
_HEAD = "font-weight:normal;opacity:.65"
_TABLE = "border-collapse:collapse;border:0;margin:4px 0;width:auto;white-space:nowrap"
_ROW = "background:none;border:0;border-bottom:1px solid rgba(128,128,128,.2)"
_MUTED = "opacity:.65"
_MONO = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px"


def mimebundle(view: JobView, *, with_output: bool = False) -> dict[str, str]:
    """``{"text/html": ..., "text/plain": ...}`` of the same table, for ``display(..., raw=True)``."""
    return {
        "text/html": render_html(view, with_output=with_output),
        "text/plain": render_text(view, with_output=with_output),
    }


def render_html(view: JobView, *, with_output: bool = False) -> str:
    """The table as an HTML fragment.

    Args:
        view: what to render.
        with_output: add the notes and the last lines of output of all ranks, where nothing else shows them.
    """
    table = tabulate(view)
    parts = [title(view, table)]
    if table.rows:
        parts.append(table_of(table))
    parts += [grid(table.grid)] if table.grid else []
    parts.append(remarks(table))
    parts += [line(table.metrics)] if table.metrics else []
    parts += [charts(view)] if view.is_over else []
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
    """What runs, how it is doing, on what; another line where it had to be started in another way than usual."""
    colour = colours.of_outcome(view.outcome)
    name = f"<b>{escape(table.name)}</b> " if view.is_started else ""
    why = f' title="{escape(f"{view.start_method}: {view.reason}")}"' if view.reason else ""
    setting = f' <span style="{_MUTED}"{why}>on {escape(table.setting)}</span>' if view.is_started else ""
    detour = line(table.detour) if table.detour else ""
    return f"<div>{_dot(colour)}{name}{escape(table.headline)}{setting}</div>{detour}"


def remarks(table: Table) -> str:
    """What went wrong or may go wrong; empty where nothing did."""
    failures = [_marked(label, text, colours.BAD) for label, text in table.failures]
    warnings = [_marked("warning", text, colours.CAUTION) for text in table.warnings]
    return "".join([*failures, *map(_notice, table.notices), *warnings])


def _dot(colour: str) -> str:
    return f'<span style="color:{colour}">&#9679;</span> '


def table_of(table: Table) -> str:
    """A row per rank, or for each of the extremes."""
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
    state = f"{_dot(colours.OF_STATE[row.state])}{escape(row.state_text)}"
    cells = [_cell(row.label, _RIGHT), _cell(state, _LEFT)]
    if "progress" in names:
        cells.append(_cell(_bar(row.fraction, colours.OF_STATE[row.state]), _LEFT))
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
    """Ranks without a row: a tile each, with number, state or progress in words, and a bar."""
    rows = "".join(
        f'<tr style="background:none">{"".join(map(_tile, cells[start : start + GRID_COLUMNS]))}</tr>'
        for start in range(0, len(cells), GRID_COLUMNS)
    )
    return f'<table style="{_TABLE};font-size:11px"><tbody>{rows}</tbody></table>'


def _tile(cell: GridCell) -> str:
    colour = colours.OF_STATE[cell.state]
    width = 100 * (cell.fraction if cell.fraction is not None else 1.0 if cell.state.is_final else 0.0)
    bar = f'<div style="width:{width:.0f}%;height:3px;background:{colour}"></div>'
    return (
        f'<td style="border:0;padding:1px 8px 3px 0;text-align:left;min-width:72px">'
        f'<span style="{_MUTED}">{cell.rank}</span> <span>{escape(cell.text)}</span>'
        f'<div style="height:3px;background:rgba(128,128,128,.25)">{bar}</div></td>'
    )


def _marked(label: str, text: str, colour: str) -> str:
    return (
        f'<div style="margin:2px 0"><span style="color:{colour}">{escape(label)}</span> '
        f'<span style="{_MONO}">{escape(text)}</span></div>'
    )


def _notice(notice: Notice) -> str:
    colour = colours.CAUTION if notice.kind == "slow" else colours.BAD
    lines = "".join(f'<div style="{_MONO};padding-left:2em">{escape(line)}</div>' for line in notice.lines)
    return f'<div style="margin:2px 0">{_dot(colour)}{escape(notice.text)}{lines}</div>'


def line(text: str) -> str:
    """Words that need no attention."""
    return f'<div style="{_MUTED};font-size:12px">{escape(text)}</div>'


def _tail(tail: Sequence[tuple[int, str]]) -> str:
    lines = "\n".join(f"[{rank}] {line}" for rank, line in tail)
    style = "margin:4px 0;padding:4px 8px;border-left:2px solid rgba(128,128,128,.3);background:none;color:inherit"
    return f'<pre style="{style};{_MONO};white-space:pre-wrap">{escape(lines)}</pre>'
