"""``input()`` and ``getpass()`` of rank 0 of a script whose user sits at the launcher's terminal.

The launcher writes the prompt, after all earlier output of the rank, and draws nothing while the user types.
"""

from __future__ import annotations

import builtins
import getpass
import io
from collections.abc import Callable

from nblaunch.events import Event, InputAwaited, InputRead
from nblaunch.worker import output


def announce(rank: int, emit: Callable[[Event], None]) -> None:
    """Report to the launcher when the functions begin and end to wait for the user."""
    read_line, read_hidden = builtins.input, getpass.getpass

    def ask(prompt: object, read: Callable[[], str], *, is_hidden: bool) -> str:
        output.flush()
        emit(InputAwaited(rank, prompt=str(prompt), is_hidden=is_hidden))
        try:
            return read()
        finally:
            emit(InputRead(rank))

    def announced_input(prompt: object = "", /) -> str:
        return ask(prompt, read_line, is_hidden=False)

    def announced_getpass(prompt: str = "Password: ", stream: object = None, **options: str) -> str:
        return ask(prompt, lambda: read_hidden("", io.StringIO(), **options), is_hidden=True)

    builtins.input = announced_input
    getpass.getpass = announced_getpass
