"""Many nodes with simulated ranks, played by one process: ``python -m tests.engines.simulated_nodes SETTINGS``.

The launching process, messages, channels and uplinks are real; only the ranks are simulated. They take steps and print,
and after some time all raise an error within a second.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.engines import Engine, NodeHandle, NodesWanted
from nblaunch.engines.channel import Channel
from nblaunch.engines.collectives import NodeCalls
from nblaunch.engines.messages import (
    AskClock,
    AttemptOver,
    Boot,
    CallPart,
    ClockIs,
    Hello,
    Ready,
    StartRanks,
    StoreOpened,
)
from nblaunch.engines.uplink import Uplink
from nblaunch.events import Exited, ExitStatus, Started, WorkerState
from nblaunch.launcher.requests import JobRequests
from nblaunch.wire import schema
from nblaunch.wire.board import LossCurve, SlotReading
from nblaunch.wire.collective_calls import REGION_BYTES, CallReader, CallWriter, Group, WrittenSite
from nblaunch.worker.failure import describe_failure

STEPS_PER_S = 20
FAILURES_S = 1.0
_TURN_S = 0.1
_EXIT_S = 0.05


@dataclass(frozen=True)
class Play:
    """The behaviour of the nodes.

    Args:
        num_nodes: number of nodes.
        ranks_per_node: ranks of each node.
        seconds: from the start of the ranks to the first error.
        result_path: file for :class:`Played`.
    """

    num_nodes: int
    ranks_per_node: int
    seconds: float
    result_path: str


@dataclass(frozen=True)
class Played:
    """A record of the play.

    Args:
        began_s: when the ranks started, on the wall clock.
        first_s: when the first rank failed.
        last_s: when the last rank failed.
        messages: number of messages that the nodes sent before the first failure, without the start.
        num_bytes: size of these messages.
    """

    began_s: float
    first_s: float
    last_s: float
    messages: int
    num_bytes: int


def engine(play: Play) -> Callable[[str], Callable[[], Engine]]:
    """Return a replacement for ``nblaunch.engines.find``."""
    return lambda name: lambda: SimulatedEngine(play)


class SimulatedEngine(Engine):
    """Starts the process that plays all nodes."""

    is_this_machine = True

    def __init__(self, play: Play) -> None:
        self._play = play
        self._process: subprocess.Popen[bytes] | None = None

    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        pairs = [socket.socketpair() for _ in range(self._play.num_nodes)]
        fds = [theirs.fileno() for _, theirs in pairs]
        command = [sys.executable, "-m", __name__, json.dumps(asdict(self._play)), *map(str, fds)]
        self._process = subprocess.Popen(command, pass_fds=fds)
        for _, theirs in pairs:
            theirs.close()
        return [_SimulatedNode(ours, number) for number, (ours, _) in enumerate(pairs)]

    def close(self) -> None:
        assert self._process is not None, "it was started"
        self._process.wait(180)


class _SimulatedNode(NodeHandle):
    def __init__(self, connection: socket.socket, number: int) -> None:
        self._socket = connection
        self.host, self.address = f"host-{number}", "127.0.0.1"
        self.reading_fd = connection.fileno()
        self.writing_fd = os.dup(self.reading_fd)

    def how_ended(self) -> str:
        return "its play is over"

    def kill(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, patience_s: float) -> None:
        self._socket.close()
        os.close(self.writing_fd)


# --- in the process that plays ---------------------------------------------------------------------------------------


class _CountingChannel(Channel):
    num_messages = num_bytes = 0

    def send_raw(self, body: bytes) -> None:
        self.num_messages += 1
        self.num_bytes += len(body)
        super().send_raw(body)


class _Node:
    """One node, from its first message to its end."""

    def __init__(self, fd: int, number: int, play: Play, folder: Path) -> None:
        self.channel = _CountingChannel(fd, os.dup(fd), b"n")
        self.failed_s: list[float] = []
        self.began_s = 0.0
        self._host = f"host-{number}"
        self._play, self._folder = play, folder
        self._boot: Boot | None = None
        self._call_bytes = 0
        self._uplink: Uplink | None = None
        self.is_over = False
        self.channel.send_mark()
        self.channel.send_raw(schema.dump(Hello(**{**asdict(Hello.of_this_process()), "host": self._host})))

    def turn(self) -> None:
        """Handle arrived messages, and let the ranks act if it is time."""
        if self._uplink is not None:
            self._play_ranks(self._uplink)
        elif self._boot is None:
            for body in self.channel.receive_raw(1):
                self._boot = pickle.loads(body)
                self.channel.key = self._boot.key
        if self._uplink is None and self._boot is not None:
            for message in self.channel.receive():
                self._handle(message, self._boot)
        self.channel.flush()

    def _handle(self, message: object, boot: Boot) -> None:
        if isinstance(message, CallPart):
            self._call_bytes += len(message.data)
            if self._call_bytes == boot.call_bytes:
                self.channel.send(_ready(self._host, self._play.ranks_per_node))
        elif isinstance(message, AskClock):
            self.channel.send(ClockIs(message.sent_s, time.time(), time.monotonic()))
        elif isinstance(message, StartRanks):
            self._start(message)

    # --- ranks ---------------------------------------------------------------------------------------------------

    def _start(self, order: StartRanks) -> None:
        if not order.topology.master_port:
            self.channel.send(StoreOpened(1))
        self.began_s = time.time()
        first = order.topology.rank
        self._ranks = range(first, first + self._play.ranks_per_node)
        attempt: Any = SimpleNamespace(
            log=SimpleNamespace(log_path=self._log_path, stacks_path=lambda rank, number: Path("none")),
            number=order.number,
            ranks=self._ranks,
            restart_count=order.number,
            topology=order.topology,
        )
        memories = {rank: memoryview(bytearray(REGION_BYTES)) for rank in self._ranks}
        self._writers = {rank: CallWriter(memory) for rank, memory in memories.items()}
        readers = {rank: CallReader(memory) for rank, memory in memories.items()}
        for writer in self._writers.values():
            writer.add_group(Group(tuple(range(order.topology.world_size)), 0, True))
        self._uplink = Uplink(self.channel, JobRequests(), self._host, self._host, "127.0.0.1")
        self._uplink.begin(attempt)
        self._uplink.calls = NodeCalls(SimpleNamespace(calls=readers.__getitem__), self._ranks)  # type: ignore[arg-type]
        self._steps = 0
        self._ends = {
            rank: self.began_s + self._play.seconds + FAILURES_S * random.random() for rank in self._ranks
        }
        self._failed: dict[int, float] = {}
        self._gone: set[int] = set()
        for rank in self._ranks:
            self._uplink.emit(Started(rank, self.began_s, pid=100_000 + rank))
        self.channel.num_messages = self.channel.num_bytes = 0

    def _log_path(self, rank: int, number: int) -> Path:
        return self._folder / f"rank_{rank}.log"

    def _play_ranks(self, uplink: Uplink) -> None:
        now_s = time.time()
        uplink.receive()
        if self.is_over:
            return
        steps = int((min(now_s, min(self._ends.values())) - self.began_s) * STEPS_PER_S)
        for step in range(self._steps, steps):
            for writer in self._writers.values():
                site = WrittenSite("all_reduce", 0, "float32", 1, 1, "SUM", -1, "backward", __file__, 1)
                writer.put(site, step + 1, step + 1)
        if steps // STEPS_PER_S > self._steps // STEPS_PER_S:
            for rank in self._ranks:
                with open(self._log_path(rank, 0), "a") as file:
                    print(f"rank {rank}: step {steps}, the loss is {1 / (1 + steps):.4f}", file=file)
        self._steps = steps
        self._fail(uplink, now_s)
        uplink.exchange([self._reading(rank) for rank in self._ranks], AttemptReport(), {})
        if len(self._gone) == len(self._ranks):
            self._end(uplink)

    def _reading(self, rank: int) -> SlotReading:
        num_bins = min(self._steps // 4, 100)
        return SlotReading(
            rank, WorkerState.TRAINING, self._steps, 99_999, 1, 32 * self._steps, 0.5,
            step_time_s=time.monotonic(), num_epochs=4, loop=1, steps_done=self._steps, num_updates=self._steps,
            losses=LossCurve(self._steps, max(4, self._steps // 100), (0.5,) * num_bins),
        )  # fmt: skip

    def _fail(self, uplink: Uplink, now_s: float) -> None:
        for rank, at_s in self._ends.items():
            if at_s <= now_s and rank not in self._failed:
                try:
                    _train(self._steps)
                except ValueError as error:
                    uplink.emit(describe_failure(rank, error))
                self._failed[rank] = time.time()
            elif rank in self._failed and rank not in self._gone and now_s > self._failed[rank] + _EXIT_S:
                self._gone.add(rank)
                uplink.emit(Exited(rank, now_s, status=ExitStatus(1)))

    def _end(self, uplink: Uplink) -> None:
        calls = uplink.calls
        uplink.calls = None
        uplink.end([])
        assert calls is not None, "ranks have run"
        readings = tuple(map(self._reading, self._ranks))
        self.channel.send(AttemptOver({}, {}, {}, readings, calls=calls.read()))
        self.is_over = True
        self.failed_s = list(self._failed.values())


def _train(step: int) -> None:
    """Fail as a training function does, a few calls deep."""
    for _ in range(1):
        _check(0.0 * step)


def _check(loss: float) -> None:
    if loss == 0.0:
        raise ValueError("the loss is zero, which it can't be")


def _ready(host: str, num_processes: int) -> Ready:
    import importlib.metadata

    torch = importlib.metadata.version("torch")
    return Ready(host, "127.0.0.1", torch, num_processes, "cpu", "fork", "it is simulated", "", 1, ())


def main(arguments: Sequence[str]) -> None:
    """Play all nodes; the arguments are a :class:`Play` as JSON, and a descriptor for each node."""
    play = Play(**json.loads(arguments[0]))
    with tempfile.TemporaryDirectory(prefix="nblaunch-nodes-") as folder:
        nodes = [_Node(int(fd), number, play, Path(folder)) for number, fd in enumerate(arguments[1:])]
        selector = selectors.DefaultSelector()
        for node in nodes:
            selector.register(node.channel.reading_fd, selectors.EVENT_READ, node)
        counts: tuple[int, int] | None = None
        next_s = 0.0
        while selector.get_map():
            is_due = time.monotonic() >= next_s
            ready = {id(key.data) for key, _ in selector.select(max(0.0, next_s - time.monotonic()))}
            if is_due:
                next_s = time.monotonic() + _TURN_S
            for node in nodes:
                if is_due or id(node) in ready:
                    node.turn()
                if node.channel.is_closed and node.channel.reading_fd in selector.get_map():
                    selector.unregister(node.channel.reading_fd)
            began_s = max(node.began_s for node in nodes)
            if counts is None and began_s and time.time() >= began_s + play.seconds - 0.2:
                channels = [node.channel for node in nodes]
                counts = sum(one.num_messages for one in channels), sum(one.num_bytes for one in channels)
    failed_s = [time_s for node in nodes for time_s in node.failed_s]
    messages, num_bytes = counts or (0, 0)
    played = Played(began_s, min(failed_s), max(failed_s), messages, num_bytes)
    Path(play.result_path).write_text(json.dumps(asdict(played)))


if __name__ == "__main__":
    main(sys.argv[1:])
