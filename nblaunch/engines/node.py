"""The entry point of the node program, which sends its versions, receives the key and the environment, and then loads
the call.

    python -c "from nblaunch.engines.node import main; main()"      standard input and output are its channel

Nothing here imports torch, because the first message contains environment variables that libraries read at import.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from typing import NoReturn

from nblaunch import env
from nblaunch.engines.channel import Channel
from nblaunch.engines.messages import Boot, Hello
from nblaunch.host import descriptors
from nblaunch.wire import schema
from nblaunch.worker import process_control


def main() -> NoReturn:
    """Run the node program until the coordinator closes its channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal or srun; the coordinator sends interrupts
    process_control.unblock_signals()
    channel = _take_standard_descriptors()
    exit_code = 1
    try:
        boot = next_boot(channel)
        if boot is not None and boot.is_kept:
            from nblaunch.engines.node_forkserver import serve

            serve(boot, channel, next_boot)
        elif boot is not None:
            channel.key = boot.key
            env.apply(boot.environment)
            from nblaunch.engines.node_program import NodeProgram

            NodeProgram(boot, channel).run()
        exit_code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if exit_code:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(exit_code)  # a thread of the user's modules must not keep the process alive


def _take_standard_descriptors() -> Channel:
    """Return the channel; redirect later output to standard error."""
    reading, writing = (descriptors.high_copy(fd) for fd in (0, 1))
    descriptors.keep_from_children(reading, writing)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return Channel(reading, writing, b"n")


def next_boot(channel: Channel) -> Boot | None:
    """Send this program's versions and wait for a job; return None if the coordinator has closed the channel."""
    channel.send_mark()
    channel.send_raw(schema.dump(Hello.of_this_process()))
    while not channel.is_closed:
        channel.wait_readable()
        for body in channel.receive_raw(1):
            boot: Boot = pickle.loads(body)
            return boot
    return None
