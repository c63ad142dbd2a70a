"""The cell magic ``%%ranks``, which runs a cell on a session's ranks, and ``%ranks``, which controls the session.

%load_ext nblaunch
%%ranks                  runs the cell on every rank; the first use starts a session on all devices
%%ranks 0,2              runs it on some ranks
%ranks start 4 | status | debug | restart | stop
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class

from nblaunch import debugging, formatting
from nblaunch.diagnosis.exceptions import HiddenLauncherFrames
from nblaunch.session.session import Session, execute_and_display
from nblaunch.wire.assignment import restore_sources
from nblaunch.wire.worker_commands import Execute

_USAGE = "%ranks start [number of processes], use VARIABLE, status, debug [rank], restart and stop"
_COMMANDS = ("start", "use", "status", "debug", "restart", "stop")


@magics_class
class RankMagics(Magics):
    """The magics, and the session that they use."""

    session: Session | None = None
    shell: Any

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> Any:
        """Run the cell on the ranks of a session: ``%%ranks``, or ``%%ranks 0,2`` for some of them.

        As a line magic: ``%ranks start 4``, ``%ranks use session`` for a session in a variable, ``%ranks status``,
            ``%ranks debug`` for pdb where a cell failed, ``%ranks restart``, ``%ranks stop``.
        """
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            return self._control(line.split()) if cell is None else self._run(line, cell)

    def _run(self, line: str, cell: str) -> None:
        __tracebackhide__ = True
        session = self._started_or_new()
        chosen = _parsed_ranks(line)
        source = f"%%ranks {line}\n{cell}"
        filename = _name_of_running_cell(self.shell.user_ns)
        restore_sources({filename: source})  # IPython stores only the call to this magic, as one line
        command = Execute(code=cell, filename=filename, first_line=2, source=source, shows_value=True)
        self._show(execute_and_display(session, command, chosen))

    def _control(self, words: Sequence[str]) -> Any:
        __tracebackhide__ = True
        if words[:1] == ["start"] and len(words) <= 2:
            count = _parsed_number("start", words[1]) if words[1:] else None
            self._stop()
            RankMagics.session = Session(count)
            return self.session
        if words[:1] == ["use"] and len(words) == 2:
            RankMagics.session = self._named(words[1])
            return None
        if words == ["status"]:
            return self._started("status").status()
        if words[:1] == ["debug"] and len(words) <= 2:
            rank = _parsed_number("debug", words[1]) if words[1:] else None
            return debugging.debug(rank, job=self._started("debug"))
        if words == ["restart"]:
            self._started("restart").restart()
            return self.session
        if words == ["stop"]:
            return self._stop()
        near = difflib.get_close_matches(" ".join(words[:1]), _COMMANDS, n=1)
        hint = f" Did you mean %ranks {near[0]}?" if near and near[0] != words[0] else ""
        given = " ".join(("%ranks", *words))
        raise ValueError(f"{given} is not a command.{hint} The commands are {_USAGE}")

    def _named(self, name: str) -> Session:
        session = self.shell.user_ns.get(name)
        if not isinstance(session, Session):
            raise ValueError(f"%ranks use {name}: the notebook has no session in a variable called {name}")
        return session

    def _started_or_new(self) -> Session:
        """Return the session; start one if there is none.

        A session that has ended is returned as well, so that its next command raises an error with the reason. A new
        session would lack the old session's variables.
        """
        if self.session is None:
            RankMagics.session = Session()
        assert self.session is not None
        return self.session

    def _started(self, command: str) -> Session:
        """Return the last session, which may have ended.

        Raises:
            ValueError: no session was started, or the last one was stopped.
        """
        if self.session is None:
            raise ValueError(f"%ranks {command}: there is no session; start one with %%ranks or %ranks start")
        return self.session

    def _stop(self) -> None:
        if self.session is not None:
            self.session.close()
        RankMagics.session = None

    def _show(self, bundles: dict[int, dict[str, Any]]) -> None:
        """Show the value of each rank's last expression; if several ranks have the same value, show it only once.

        Text appears after the list of ranks; other displays appear below the list.
        """
        texts = {rank: repr(sorted(bundle.items())) for rank, bundle in bundles.items()}
        for ranks in formatting.ranks_by_text(texts).values():
            bundle, label = bundles[ranks[0]], f"[{formatting.spans(ranks)}]"
            if set(bundle) <= {"text/plain"}:
                text = bundle.get("text/plain", "")
                print(f"{label}\n{text}" if "\n" in text else f"{label} {text}")
            else:
                print(label)
                self.shell.display_pub.publish(data=bundle)


def register(shell: Any) -> None:
    """Add the magics to an IPython shell."""
    shell.register_magics(RankMagics)


def _parsed_ranks(line: str) -> list[int] | None:
    """Parse ranks such as ``0,2``, ``0 2`` or ``1-3``; return None for an empty line.

    Raises:
        ValueError: the line is not a list of ranks.
    """
    if not line.strip():
        return None
    chosen: list[int] = []
    for part in re.split(r"[,\s]+", re.sub(r"\s*-\s*", "-", line.strip())):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise ValueError(f"%%ranks {line}: ranks must be written in the form 0,2 or 0-3")
        chosen += range(int(first), int(last or first) + 1)
    return chosen


def _parsed_number(command: str, word: str) -> int:
    if not word.isdecimal():
        raise ValueError(f"%ranks {command} {word}: {word!r} must be a whole number")
    return int(word)


def _name_of_running_cell(names: dict[str, Any]) -> str:
    """Return the file name of the running cell, which tracebacks show as ``Cell In[5]``."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals is names and frame.f_code.co_name in ("<module>", "<cell line: 1>"):
            return frame.f_code.co_filename
    return "<cell>"
