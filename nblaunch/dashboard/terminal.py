"""The dashboard for scripts and terminals: progress, and a table at the end.

On a terminal, progress is a table that rich redraws in place. Elsewhere, and on dumb terminals (which can't move
the cursor up), a line is written at intervals. Only terminals get colours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, final

from nblaunch import env
from nblaunch.dashboard.base import Pace, ViewingDashboard, uptime
from nblaunch.dashboard.palette import paint, unpainted
from nblaunch.dashboard.text import progress_line, render_text
from nblaunch.dashboard.view import JobView
from nblaunch.events import Event, InputAwaited, InputRead

if TYPE_CHECKING:
    from rich.live import Live

_FIRST_LIVE_S, _LIVE_S = 0.5, 0.2  # seconds before the table is first drawn, and between redraws
_FIRST_LINE_S = 2.0  # before the first line; a short job only writes its last table

_DEFAULT_SIZE = (80, 24)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # not a file, or closed
        return False


def moves_cursor(stream: Any) -> bool:
    """Return whether rich considers a stream a terminal that understands escape sequences."""
    return is_terminal(stream) and env.read("TERM").lower() not in ("dumb", "unknown")


def has_colour(stream: Any) -> bool:
    """Return whether to write colours to a stream: only to a terminal, unless NO_COLOR or FORCE_COLOR is set.

    Source: https://no-color.org and https://force-color.org; NO_COLOR wins, as in Python itself.
    """
    if env.read("NO_COLOR"):
        return False
    return bool(env.read("FORCE_COLOR")) or moves_cursor(stream)


def size_of(stream: Any) -> tuple[int, int]:
    """Return the columns and lines of a terminal; 80 and 24 if they are unknown."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AttributeError):
        columns, lines = 0, 0
    return columns or _DEFAULT_SIZE[0], lines or _DEFAULT_SIZE[1]


def encodable(stream: TextIO, text: str) -> str:
    """Return the text with ``?`` in place of characters that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"  # encodes all but lone surrogates
    return text if text.isascii() else text.encode(encoding, "replace").decode(encoding)


def write(stream: TextIO, text: str) -> None:
    """Write text in one call, with ``?`` in place of characters that the stream's encoding lacks."""
    stream.write(encodable(stream, text))


@final
class LiveTable:
    """Progress at the bottom of a terminal, redrawn in place; the terminal must be able to move its cursor.

        train: running for 12 s on 2 processes (cpu, fork)
        rank  state       progress          epoch         step  steps/s    loss
           0  training    ━━━━━━━╸            1/4    450/1,000     10.0  0.5321
           1  waiting     ━━━━━━━╸            1/4    450/1,000     10.0  0.5330

    Args:
        stream: default: ``sys.stderr``, looked up at each use.
    """

    latest: ClassVar[LiveTable | None] = None
    """The display that was opened last; a terminal has room for only one."""

    def __init__(self, stream: TextIO | None = None) -> None:
        LiveTable.latest = self
        self._stream = stream
        self._render: Callable[[int], str] | None = None
        self._live: Live | None = None

    def draw(self, view: JobView) -> None:
        """Show the progress of a job."""
        self.draw_text(lambda width: render_text(view, paint=paint, width=width, is_live=True))

    def draw_text(self, render: Callable[[int], str]) -> None:
        """Show the text that ``render`` returns for the terminal's width, cut to the terminal's height."""
        from rich.text import Text  # rich takes 100 ms and is only for terminals

        self._render = render
        live = self._live or self._start()
        live.console.size = size = size_of(self._to)
        live.update(Text.from_ansi(encodable(self._to, render(size[0]))), refresh=True)

    def clear(self) -> None:
        """Remove the table; the cursor is then at the beginning of an empty line."""
        self._render = None
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the table while the block writes whole lines to the terminal."""
        render = self._render
        self.clear()
        try:
            yield
        finally:
            if render is not None:
                self.draw_text(render)

    @property
    def _to(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _start(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        # Don't use a thread, because a forked process would not have it, and don't replace streams, because workers'
        # output is written around the table.
        self._live = Live(
            console=Console(
                file=self._to,
                force_terminal=True,
                color_system="standard" if has_colour(self._to) else None,
                highlight=False,
                markup=False,
                emoji=False,
            ),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        return self._live


@contextmanager
def live_hidden() -> Iterator[None]:
    """Hide the live table, if there is one, while the block asks the user a question."""
    live = LiveTable.latest
    with live.hidden() if live is not None else nullcontext():
        yield


@final
class TextDashboard(ViewingDashboard):
    """Progress, and a table at the end.

    On a terminal, a table is redrawn in place. Elsewhere (a file, a pipe, the log of a batch job) a line is written
    every few seconds.

    Args:
        stream: default: ``sys.stderr``, looked up at each write.
        live: the table that is redrawn on the terminal, shared with other writers; None writes lines instead.
        clock: seconds on a clock that never jumps.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        live: LiveTable | None = None,
        clock: Callable[[], float] = uptime,
    ) -> None:
        self._stream = stream
        self._live = live
        if live is not None:
            pace = Pace(first_s=_FIRST_LIVE_S, interval_s=_LIVE_S, slow_s=_LIVE_S, clock=clock)
        else:
            pace = Pace(first_s=_FIRST_LINE_S, interval_s=5.0, slow_s=25.0, slow_after_s=60.0, clock=clock)
        super().__init__(pace)
        self._last_line = ""
        self._is_user_typing = False

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if isinstance(event, InputAwaited):
            self._is_user_typing = event.rank >= 0
        elif isinstance(event, InputRead):
            self._is_user_typing = False

    def _draw(self) -> None:
        self._pace.note_published()
        if self._is_user_typing:
            return
        if self._live is not None:
            self._live.draw(self._view)
            return
        line = progress_line(self._view)
        if line != self._last_line:
            self._last_line = line
            self._write(line + "\n")

    def _draw_last(self, view: JobView) -> None:
        if self._live is not None:
            self._live.clear()
        if view.is_started:
            # The hang report has already been printed.
            text = render_text(
                replace(view, hang=()),
                paint=paint if has_colour(self._to) else unpainted,
                width=size_of(self._to)[0] if is_terminal(self._to) else None,
            )
            self._write(f"{text}\n")

    @property
    def _to(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _write(self, text: str) -> None:
        stream = self._to
        write(stream, text)
        stream.flush()
