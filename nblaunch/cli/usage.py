"""What a command raises where it was used wrongly; shown as one line, with exit code 2."""

from __future__ import annotations


class UsageError(Exception):
    """The command can't do what it was asked for; nothing was started. The message says why, and what to do."""
