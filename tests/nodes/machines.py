"""Two "machines" for tests: network namespaces joined by a cable that can be pulled, or, without root, the loopback.

    with machines(folder, [Warm(), Warm()]) as pair:
        one = pair[0].start("train", num_nodes=2, ...)      # a process that calls notebook_launcher as node 0
        one.wait_for("step 3")                              # synchronise on output, never by sleeping
        pair.cut(); pair.mend()                             # the cable

All processes of a machine end with it, and no namespace is left.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import psutil

from tests.nodes.warm import Warm

LIMIT_S = 200.0


class Launch:
    """One call of ``notebook_launcher`` in a separate process on one machine."""

    def __init__(self, process: psutil.Process, output: TextIO) -> None:
        self.process = process
        self._output = output
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="output of a machine")
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    @property
    def output(self) -> str:
        """Return everything printed so far."""
        with self._changed:
            return "\n".join(self._lines)

    def wait_for(self, text: str, timeout_s: float = LIMIT_S) -> float:
        """Wait until ``text`` has been printed; return the seconds that this took."""
        began_s = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(
                lambda: any(text in line for line in self._lines) or not self._reader.is_alive(), timeout_s
            ):
                raise AssertionError(f"{text!r} was not printed in {timeout_s} s:\n" + "\n".join(self._lines))
        if text not in self.output:
            raise AssertionError(f"it ended without printing {text!r}:\n{self.output}")
        return time.monotonic() - began_s

    def result(self, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        """Wait for the end; return the launch's value or error, see ``jobs.py``."""
        try:
            self.process.wait(timeout_s)
        except psutil.TimeoutExpired:
            raise AssertionError(f"it did not end in {timeout_s} s:\n{self.output}") from None
        self._reader.join()
        for line in self._lines:
            if line.startswith("OUTCOME "):
                return dict(json.loads(line.removeprefix("OUTCOME ")))
        raise AssertionError(f"it reported no outcome:\n{self.output}")

    def descendants(self) -> list[psutil.Process]:
        return list(self.process.children(recursive=True))

    def agent(self) -> psutil.Process:
        """Return its agent, the process that meets the other nodes."""
        (agent,) = [p for p in self.descendants() if "nblaunch.nodes.agent" in " ".join(p.cmdline())]
        return agent

    def kill(self, *, whole_machine: bool = False) -> None:
        """Send SIGKILL to the launching process, or to all processes of the machine at the same moment."""
        victims = [*self.descendants()] if whole_machine else []
        os.kill(self.process.pid, signal.SIGSTOP)  # so that it does not notice their end
        for victim in victims:
            victim.kill()
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Release the resources of the ended process."""
        self.process.wait()
        self._reader.join()
        self._output.close()


class Machine:
    """One of the machines.

    Args:
        rank: its number.
        address: address at which the other machine reaches it.
        namespace: its network namespace; empty for the tests' own.
        folder: folder for logs.
        warm: starts its processes.
    """

    def __init__(self, rank: int, address: str, namespace: str, folder: Path, warm: Warm) -> None:
        self.rank = rank
        self.address = address
        self._namespace = namespace
        self._folder = folder
        self._warm = warm
        self._launches: list[Launch] = []

    def start(self, job: str, *args: Any, **settings: Any) -> Launch:
        """Launch a function of ``jobs.py`` on this machine."""
        order = {"job": job, "args": args, "settings": {"node_rank": self.rank, **settings}}
        env = {"NBLAUNCH_LOG_DIR": str(self._folder / f"machine_{self.rank}")}
        self._launches.append(Launch(*self._warm.launch(order, env, self._namespace)))
        return self._launches[-1]

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this machine."""
        return self._warm.processes()

    def wait_until_empty(self, timeout_s: float = 10.0) -> None:
        """Wait until no process of this machine is left."""
        _, alive = psutil.wait_procs(self.processes(), timeout_s)
        assert not alive, [" ".join(process.cmdline()) for process in alive]

    def close(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for launch in self._launches:
            launch.close()


class Pair:
    """Both machines, and the cable between them, if there is one."""

    def __init__(self, machines: list[Machine], namespaces: list[str]) -> None:
        self._machines = machines
        self._namespaces = namespaces

    def __getitem__(self, rank: int) -> Machine:
        return self._machines[rank]

    @property
    def has_cable(self) -> bool:
        return bool(self._namespaces)

    def cut(self) -> None:
        _ip("netns", "exec", self._namespaces[1], "ip", "link", "set", "cable", "down")

    def mend(self) -> None:
        _ip("netns", "exec", self._namespaces[1], "ip", "link", "set", "cable", "up")

    def wait_until_empty(self) -> None:
        for machine in self._machines:
            machine.wait_until_empty()


def can_have_namespaces() -> bool:
    """Return whether this process can create network namespaces: as root, with iproute2."""
    name = f"nbl-{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextmanager
def machines(folder: Path, warm: Sequence[Warm]) -> Iterator[Pair]:
    """Create two machines, each with its warm process, and check that they are empty afterwards."""
    namespaces = [f"nbl-{secrets.token_hex(3)}" for _ in range(2)] if can_have_namespaces() else []
    addresses = ["10.201.77.1", "10.201.77.2"] if namespaces else ["127.0.0.1", "127.0.0.2"]
    try:
        _connect(namespaces, addresses)
        pair = Pair(
            [
                Machine(rank, addresses[rank], namespaces[rank] if namespaces else "", folder, warm[rank])
                for rank in range(2)
            ],
            namespaces,
        )
        try:
            yield pair
        finally:
            for machine in pair._machines:
                machine.close()
    finally:
        for name in namespaces:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _connect(namespaces: list[str], addresses: list[str]) -> None:
    for name in namespaces:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
    if not namespaces:
        return
    one, other = namespaces
    _ip("-n", one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other)
    for name, address in zip(namespaces, addresses, strict=True):
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
        _ip("-n", name, "link", "set", "cable", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
