"""The small files in which the system tells about itself: ``/proc``, ``/sys`` and their like."""

from __future__ import annotations

from pathlib import Path


def read(path: Path) -> str:
    """A file's text without its line end; empty where it can't be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
