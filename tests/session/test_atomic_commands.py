"""An interrupt at any line of a session's start or commands: it is raised, and no worker is left, or none is busy."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest

from nblaunch import Session
from tests.signals_at_lines import with_signal_at_line

STRIDE = 23
"""Lines between two commands; a prime, or the same lines of a loop would be hit."""


def next_number(number: int) -> int:
    """Return it, in a worker."""
    return number + 1


COMMANDS: dict[str, Callable[[Session], object]] = {
    "execute": lambda session: session.execute("1 + 1"),
    "put": lambda session: session.put(x=1),
    "run": lambda session: session.run(next_number, (1,), dashboard="none"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_at_any_line_of_a_command_leaves_the_session_free(name: str) -> None:
    with Session(2, backend="cpu") as session:
        COMMANDS[name](session)
        for number in range(1, 10_000, STRIDE):
            place, error = with_signal_at_line(number, signal.SIGINT, lambda: COMMANDS[name](session))
            if not place:
                break
            assert type(error) is KeyboardInterrupt, (place, error)
            assert session.execute("2") == {0: 2, 1: 2}, place
        assert number > 100, "few lines have run"


def test_an_interrupt_at_any_line_of_the_start_leaves_no_worker() -> None:
    Session(2, backend="cpu").close()
    before = psutil.Process().children(recursive=True)
    made: list[Session] = []
    for number in range(1, 10_000, 2 * STRIDE):
        place, error = with_signal_at_line(
            number, signal.SIGINT, lambda: made.append(Session(2, backend="cpu"))
        )
        if not place:
            break
        assert type(error) is KeyboardInterrupt, (place, error)
        assert (made, psutil.Process().children(recursive=True)) == ([], before), place
    made.pop().close()
    assert number > 500, "few lines have run"
