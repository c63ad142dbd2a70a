"""nblaunch's loggers, which decide which notes are shown.

``logging.getLogger("nblaunch").setLevel("WARNING")`` turns notes off; warnings and hangs have the levels WARNING and
ERROR. The logger ``nblaunch.notes`` receives a record for each note that is shown. It does not propagate, because the
root logger's handlers usually write to the cell, which already shows the note.
"""

from __future__ import annotations

import logging

from nblaunch.events import Note

_LEVELS = {"note": logging.INFO, "warning": logging.WARNING, "hang": logging.ERROR, "slow": logging.INFO}

_root = logging.getLogger("nblaunch")
if _root.level == logging.NOTSET:
    _root.setLevel(logging.INFO)
_notes = logging.getLogger("nblaunch.notes")
_notes.propagate = False
_notes.addHandler(logging.NullHandler())


def is_shown(note: Note) -> bool:
    """Return whether the user wants to see a note; if so, log it."""
    level = _LEVELS[note.kind]
    if not _notes.isEnabledFor(level):
        return False
    if note.text:  # a note without text clears an earlier note
        _notes.log(level, "%s", note.text, extra={"rank": note.rank, "kind": note.kind})
    return True
