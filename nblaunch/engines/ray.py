"""Nodes of a Ray cluster: one placement group, and one thin actor per node that starts the node program.

    this process ── pipes of each node ──> driver process ── Ray's calls ──> actor ── pipes ──> node program
                                           (ray_driver.py)                  (ray_actor.py)

Only the driver process is connected to Ray, not the kernel: a connected process can't be forked safely, and the user's
own ``ray.init`` must not be affected. The actor moves bytes, and needs neither torch nor the call. Ranks are children
of the node program, which is a clean process, and never of a connected process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nblaunch import env, packages
from nblaunch.engines import Engine, NodeHandle, NodesWanted
from nblaunch.engines.ray_driver import Allocated, DriverNote, DriverTask, NodeEnded
from nblaunch.errors import LaunchError
from nblaunch.host import descriptors
from nblaunch.start_methods.spawn import start_program
from nblaunch.wire.channel import EventReceiver
from nblaunch.worker.inheritance import connections

_TICK_S = 0.1
_END_S = 10.0
_DRIVER = "nblaunch.engines.ray_driver"


class RayEngine(Engine):
    """Starts each node program through an actor of a Ray cluster."""

    def __init__(self) -> None:
        self._driver: _Driver | None = None
        self._notes: Sequence[str] = ()

    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        """Reserve up to ``max_nodes`` nodes with a placement group, and start the program on each."""
        if not packages.is_installed("ray"):
            raise LaunchError("engine='ray' needs the package ray: pip install nblaunch[ray]")
        self.close()  # release lost nodes
        for ending in list(_ending):  # the nodes of a driver that is ending are not free yet
            while ending.is_alive():
                wanted.check()
                ending.join(_TICK_S)
        self._driver = driver = _Driver(wanted)
        allocated = driver.wait_for_nodes(wanted)
        self._notes = allocated.notes
        return driver.handles(allocated)

    def notes(self) -> Sequence[str]:
        """Return the driver's notes about the cluster."""
        return self._notes

    def close(self) -> None:
        """Make the driver process end the actors, the placement group and itself, without waiting for it."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()


class _Driver:
    """The driver process, and the pipes of all nodes, which go through it."""

    def __init__(self, wanted: NodesWanted) -> None:
        spec = wanted.spec
        self._own: list[socket.socket] = []
        driver_ends: list[socket.socket] = []
        reading, writing = os.pipe()
        life_reading, self._life_fd = os.pipe()
        try:
            for _ in range(spec.max_nodes):
                own_end, driver_end = socket.socketpair()
                self._own.append(own_end)
                driver_ends.append(driver_end)
                descriptors.keep_from_children(own_end.fileno())
            task = DriverTask(
                address=_address(wanted.environment),
                min_nodes=spec.min_nodes,
                max_nodes=spec.max_nodes,
                resources=dict(spec.resources_per_node or {}),
                ranks_per_node=None if spec.num_processes is None else spec.num_processes // spec.max_nodes,
                backend=spec.backend,
                runtime_env=dict(spec.runtime_env or {}),
                variables=wanted.interpreter_variables,
                timeout_s=spec.rendezvous_timeout_s,
                waits_for_others=spec.rdzv_timeout_s is not None,
                node_fds=tuple(connection.fileno() for connection in driver_ends),
                event_fd=writing,
                life_fd=life_reading,
                log_path=str(wanted.log_path(0).with_name("ray_driver.log")),
            )
            inherited = [*task.node_fds, writing, life_reading]
            self._process = start_program(_DRIVER, task, inherited)
        except OSError as error:
            for connection in self._own:
                connection.close()
            raise LaunchError(f"the Ray driver could not be started ({sys.executable}): {error}") from error
        finally:
            for connection in driver_ends:
                connection.close()
            os.close(writing)
            os.close(life_reading)
        descriptors.keep_from_children(self._life_fd, reading)
        self._receiver = EventReceiver(reading, "the Ray driver")
        self._log_path = Path(task.log_path)
        self.ended: dict[int, str] = {}

    def wait_for_nodes(self, wanted: NodesWanted) -> Allocated:
        """Wait until the cluster has granted nodes.

        Raises:
            LaunchError: the cluster has too few nodes.
            Exception: an exception from ``wanted.check``.
        """
        try:
            while True:
                wanted.check()
                wait([self._receiver.fd], _TICK_S)
                events, is_closed = self._receiver.receive()
                for event in events:
                    if isinstance(event, DriverNote):
                        wanted.note(event.text)
                    elif isinstance(event, Allocated):
                        if event.error:
                            raise LaunchError(event.error)
                        return event
                if is_closed:
                    raise LaunchError(f"the Ray driver has ended; its log: {self._log_path}")
        except BaseException:
            self.close()
            raise

    def handles(self, allocated: Allocated) -> list[NodeHandle]:
        """Return the handles of the granted nodes."""
        for connection in self._own[len(allocated.hosts) :]:
            _close(connection)
        return [
            _RayNode(self, number, host, address, self._own[number])
            for number, (host, address) in enumerate(zip(allocated.hosts, allocated.addresses, strict=True))
        ]

    def why_ended(self, number: int) -> str:
        """Return the reason why a node's program has ended; empty while unknown."""
        wait([self._receiver.fd], _TICK_S)
        events, is_closed = self._receiver.receive()
        self.ended |= {event.number: event.why for event in events if isinstance(event, NodeEnded)}
        if number not in self.ended and is_closed:
            return f"the Ray driver has ended; its log: {self._log_path}"
        return self.ended.get(number, "")

    def close(self) -> None:
        """Let the driver process end without waiting for it: the job is over, so the user should not have to wait."""
        for connection in self._own:
            _close(connection)
        if self._life_fd < 0:
            return
        descriptors.close(self._life_fd)
        self._life_fd = -1
        thread = threading.Thread(target=self._wait_for_end, name="nblaunch-ray-driver", daemon=True)
        _ending.add(thread)
        try:
            thread.start()
        except RuntimeError:  # Python itself is ending
            self._wait_for_end()

    def _wait_for_end(self) -> None:
        """Wait for the driver. It has ten seconds to end its actors; then it is killed, and the cluster ends them."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        descriptors.close(self._receiver.fd)
        _ending.discard(threading.current_thread())


_ending: set[threading.Thread] = set()
"""Threads that wait for a driver to end."""


class _RayNode(NodeHandle):
    def __init__(
        self, driver: _Driver, number: int, host: str, address: str, connection: socket.socket
    ) -> None:
        self._driver = driver
        self._number = number
        self._socket = connection
        self.host = host
        self.address = address
        self.reading_fd = connection.fileno()
        self.writing_fd = os.dup(self.reading_fd)  # two descriptors, so that each can be polled
        descriptors.keep_from_children(self.writing_fd)

    def how_ended(self) -> str:
        for _ in range(int(_END_S)):
            if why := self._driver.why_ended(self._number):
                return why
        return "its connection was closed"

    def kill(self) -> None:
        _close(self._socket, keeps_descriptor=True)

    def close(self, patience_s: float) -> None:
        _close(self._socket)
        if self.writing_fd >= 0:
            descriptors.close(self.writing_fd)
            self.writing_fd = -1


def _close(connection: socket.socket, *, keeps_descriptor: bool = False) -> None:
    """Close a node's connection, after which the driver ends the node's program."""
    if connection.fileno() < 0:
        return
    with suppress(OSError):  # the driver has ended
        connection.shutdown(socket.SHUT_RDWR)
    if not keeps_descriptor:
        descriptors.forget(connection.fileno())
        connection.close()


def _address(environment: Mapping[str, str]) -> str:
    """Return the address of the cluster from the user's connection or ``RAY_ADDRESS``; empty if Ray must find it."""
    connected: dict[str, Any] = dict(connections.environment_of_ray())
    return str(
        connected.get("RAY_ADDRESS") or environment.get("RAY_ADDRESS") or env.read("RAY_ADDRESS") or ""
    )
