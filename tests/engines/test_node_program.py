"""The node program, which the test drives as a coordinator."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from nblaunch.engines.channel import Channel
from nblaunch.engines.messages import AttemptOver, Boot, CallPart, EndRanks, Ready, Request, StartRanks
from nblaunch.spec import LaunchSpec
from nblaunch.start_methods.saved_call import save_call
from nblaunch.topology import Topology

KEY = b"k" * 32
PATIENCE_S = 180.0

T = TypeVar("T")


@pytest.fixture
def channel(tmp_path: Path, nothing_left_behind: None) -> Iterator[Channel]:
    """Yield the channel to a node program that is ready to start one rank, which would sleep for an hour."""
    command = [sys.executable, "-c", "from nblaunch.engines.node import main; main()"]
    env = {**os.environ, "NBLAUNCH_LOG_DIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        channel = Channel(program.stdout.fileno(), program.stdin.fileno(), b"c")
        while not channel.receive_raw(1):
            channel.wait_readable()
        _boot(channel, env)
        _wait_for(channel, Ready)
        yield channel
        program.stdin.close()
        program.wait(PATIENCE_S)


def _boot(channel: Channel, env: dict[str, str]) -> None:
    spec = LaunchSpec(function=time.sleep, args=(3600,), num_processes=1, backend="cpu", hang_timeout_s=None)
    with closing(save_call((spec.function, spec.args), "")) as saved:
        size = os.fstat(saved.fd).st_size
        boot = Boot(
            key=KEY, spec=spec.without_call(), registered_backend=b"",
            call=replace(saved, fd=-1, environment={}, path=tuple(map(str, saved.path))), call_bytes=size,
            modules=(), required=(), environment=env, is_same_machine=True, address="127.0.0.1",
        )  # fmt: skip
        channel.send_raw(pickle.dumps(boot))
        channel.key = KEY
        channel.send(CallPart(os.pread(saved.fd, size, 0)))
    channel.send_now()


def _wait_for(channel: Channel, cls: type[T]) -> T:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and not channel.is_closed:
        channel.wait_readable()
        for message in channel.receive():
            if isinstance(message, cls):
                return message
    raise AssertionError(f"the node program sent no {cls.__name__}")


def test_requests_that_arrive_with_the_start_are_handled(channel: Channel) -> None:
    topology = Topology(world_size=1, local_world_size=1, master_addr="127.0.0.1")
    for attempt, order in enumerate([Request("cancel"), EndRanks()]):
        channel.send(StartRanks(topology, attempt, KEY), order)  # one message: the node reads both at once
        channel.send_now()
        assert _wait_for(channel, AttemptOver).unkillable == {}
