"""The debugger's part in a worker, with both ends of its connection in this process."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading

from nblaunch.wire.command_connection import CommandConnection
from nblaunch.wire.messages import Debug, Line, Prompted, Resumed
from nblaunch.worker.debugger import Debugger


def test_lines_for_a_pdb_that_has_ended_are_not_read_by_the_next() -> None:
    assert _num_prompts_of_a_breakpoint_after_an_open_pdb() == 1
    gc.collect()  # pdb refers to frames, which refer to the connections


def _num_prompts_of_a_breakpoint_after_an_open_pdb() -> int:
    """Return how often a breakpoint asks that is reached after a pdb that was ended several times over."""
    ends = socket.socketpair()
    own, other = (CommandConnection(os.dup(end.fileno())) for end in ends)
    debugger = Debugger(0, own)
    debugger.start()
    try:
        raise ValueError("on purpose")
    except ValueError as error:
        debugger.end_command(error)
    other.send(Debug())
    assert isinstance(other.receive()[0], Prompted)
    for _ in range(3):  # each ends a pdb that is open still, as it is until its thread runs again
        debugger.begin_command()
    # In a thread: pdb leaves its trace function in the outermost frame.
    worker = threading.Thread(target=lambda: debugger.stop_at(sys._getframe()), daemon=True)
    worker.start()
    received: list[object] = []
    while sum(isinstance(one, Resumed) for one in received) < 2:  # of the pdb before, and of this one
        received.append(other.receive()[0])
        if isinstance(received[-1], Prompted):
            other.send(Line(text="c"))
    worker.join()
    ends[0].shutdown(socket.SHUT_RDWR)  # ends the debugger's thread
    for end in ends:
        end.close()
    return sum(isinstance(one, Prompted) for one in received)
