"""The Ray driver: the process that is connected to the cluster. It moves bytes between pipes and actors.

    launching process ── socket of node n ──> thread ── actor n: send ──>    node program
                      <─ socket of node n ─── thread <─ actor n: poll ───

It ends, with the actors and the placement group, when the launching process closes a pipe or dies.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nblaunch import env, formatting
from nblaunch.engines import ray_actor
from nblaunch.engines.command_engines import PROGRAM, describe_end
from nblaunch.errors import LaunchError
from nblaunch.events import Event
from nblaunch.host import heap
from nblaunch.wire.channel import EventSender
from nblaunch.worker import output, process_control

_READ_BYTES = 1 << 20
_CONNECT_S = 2.0
_REFUSAL_S = 0.3
_NOTE_S = 3.0
_STEP_S = 0.25
_GROUP_STEP_S = 1
"""Duration of one wait for a placement group, in seconds. Ray drops fractions of a second, and with waits of 0 s, a
group that is ready would be noticed too late.
"""

_LEAVE_S = 3.0
_REMOVAL_S = 5.0
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""File in which Ray stores the address of this machine's cluster. It remains after the cluster has been killed."""


@dataclass(frozen=True)
class DriverTask:
    """The input of a driver process.

    Args:
        address: address of the cluster; empty = a cluster on this machine, or a new one.
        min_nodes: smallest number of nodes.
        max_nodes: maximum number of nodes.
        resources: resources of each node; empty = determined by the ranks.
        ranks_per_node: number of ranks per node; None = one per device.
        backend: requested device family.
        runtime_env: runtime environment in Ray's format.
        variables: environment variables of the node programs, which ``runtime_env`` may change.
        timeout_s: how long to wait for nodes that are in use.
        waits_for_others: whether to wait also for nodes that the cluster lacks, because an autoscaler may add them.
        node_fds: one socket per node for its bytes.
        event_fd: pipe for the messages below.
        life_fd: pipe that is closed when the launching process no longer needs the nodes.
        log_path: file for what Ray prints.
    """

    address: str
    min_nodes: int
    max_nodes: int
    resources: Mapping[str, float]
    ranks_per_node: int | None
    backend: str
    runtime_env: Mapping[str, Any]
    variables: Mapping[str, str]
    timeout_s: float
    waits_for_others: bool
    node_fds: tuple[int, ...]
    event_fd: int
    life_fd: int
    log_path: str


@dataclass(frozen=True)
class DriverNote(Event):
    """A line for the user while the driver is waiting for nodes."""

    text: str = ""


@dataclass(frozen=True)
class Allocated(Event):
    """The nodes that the cluster granted; if it granted none, ``error`` says why.

    Args:
        hosts: names of the machines.
        addresses: addresses at which the other nodes reach them.
        notes: facts about the cluster that users should know.
    """

    hosts: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class NodeEnded(Event):
    """A node's program has ended."""

    number: int = 0
    why: str = ""


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a driver; the argument is the descriptor of a memory file with its pickled :class:`DriverTask`."""
    with os.fdopen(int(arguments[0]), "rb") as file:
        task: DriverTask = pickle.load(file)
    process_control.unblock_signals()
    output.capture(task.log_path)
    driver = Driver(task)
    try:
        driver.run()
    except _NotNeeded:
        pass
    except Exception as error:
        text = str(error) if isinstance(error, LaunchError) else f"Ray: {type(error).__name__}: {error}"
        driver.send(Allocated(error=text))
    finally:
        driver.end()
        output.flush()
        os._exit(0)


class _NotNeeded(Exception):
    """The launching process has ended, or no longer needs nodes."""


class _NodeDied(Exception):
    """A node that the job was going to use died before the programs started."""


class Driver:
    """The connection to a cluster, with the nodes of one job."""

    def __init__(self, task: DriverTask) -> None:
        ray_actor.leave_out_optional_packages()
        with process_control.ending_with(task.life_fd), heap.growing():
            import ray

        self._ray: Any = ray
        self._task = task
        self._sender = EventSender(task.event_fd)
        self._actors: list[Any] = []
        self._have_started = False
        self._group: Any = None
        self._dead: dict[str, str] = {}
        self._owns_cluster = False
        self._sockets = [socket.socket(fileno=fd) for fd in task.node_fds]

    def send(self, event: Any) -> None:
        """Send an event to the launching process."""
        self._sender.send(event)

    def run(self) -> None:
        """Connect, reserve nodes, start their programs, and move bytes until the launching process ends the connection.

        Raises:
            LaunchError: the cluster can't be reached or has too few nodes.
            _NotNeeded: the launching process ended before the programs had started.
        """
        notes = self._connect()
        self._check()
        places = self._start_nodes()
        self.send(
            Allocated(
                hosts=tuple(host for host, _ in places),
                addresses=tuple(address for _, address in places),
                notes=tuple(notes),
            )
        )
        for number, actor in enumerate(self._actors):
            for move in (self._move_up, self._move_down):
                threading.Thread(target=move, args=(number, actor), daemon=True).start()
        while not self._is_over(_STEP_S):
            pass

    def _is_over(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds; return whether the launching process no longer needs this process."""
        poller = select.poll()
        poller.register(self._task.life_fd, select.POLLIN)
        return bool(poller.poll(1000 * timeout_s))

    def _check(self) -> None:
        """Raise an error if the launching process no longer needs this process."""
        if self._is_over(0):
            raise _NotNeeded

    # --- the cluster ---------------------------------------------------------------------------------------------

    def _connect(self) -> list[str]:
        """Connect to the cluster; return facts that users should know.

        Raises:
            LaunchError: the cluster can't be reached.
        """
        address, origin = self._task.address, "from RAY_ADDRESS or from this process's connection"
        notes: list[str] = []
        if not address:
            address, origin = _current_cluster(), f"which {_CURRENT_CLUSTER} names"
            if address and not _answers(address):
                notes.append(
                    f"the Ray cluster at {address}, {origin}, is not responding (`ray stop` removes it)"
                )
                address = ""
        elif not address.startswith("ray://") and address not in ("auto", "local") and not _answers(address):
            raise LaunchError(f"no Ray cluster answers at {address}, the address {origin}")
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
        if self._task.runtime_env:
            settings["runtime_env"] = dict(self._task.runtime_env)
        if address and address != "local":
            self._ray.init(address=address, **settings)
            if env.read("RAY_AUTH_MODE") != "token":
                notes.append(
                    f"the Ray cluster at {address} accepts commands from every process that can reach it, because "
                    "RAY_AUTH_MODE is not 'token'"
                )
        else:
            self._owns_cluster = True
            self._ray.init(address="local", include_dashboard=False, **settings)
            notes.append(
                "no Ray cluster was found, so one was started on this machine; it ends with this job"
            )
        return notes

    def _start_nodes(self) -> list[tuple[str, str]]:
        """Reserve nodes and start the program on each; if a node dies in the meantime, begin again with the others.

        Returns:
            The names and addresses of their machines.

        Raises:
            LaunchError: too few of the cluster's nodes could ever provide the resources, or the nodes can't be used.
            _NotNeeded: the launching process ended in the meantime.
        """
        while True:
            bundle, count = self._fitting_nodes()
            try:
                self._reserve(bundle, count)
                self._make_actors(bundle, count)
                return self._start_programs()
            except _NodeDied:
                self._give_back()

    def _fitting_nodes(self) -> tuple[dict[str, float], int]:
        """Return the resources per node, and the number of nodes to request.

        Raises:
            LaunchError: too few of the cluster's nodes could ever provide the resources.
        """
        task = self._task
        nodes = self._alive_nodes()
        bundle = dict(task.resources) or _default_bundle(task, [_plain(node["Resources"]) for node in nodes])
        suitable = self._suitable_nodes(bundle, nodes)
        free = self._free_by_node()
        free_now = [node for node in suitable if _holds(free.get(node["NodeID"], {}), bundle)]
        count = max(task.min_nodes, min(task.max_nodes, len(free_now)))
        return bundle, count

    def _alive_nodes(self) -> list[Any]:
        """Return the running nodes. Ray itself notices a raylet's death only after 14 s."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        if self._task.address.startswith("ray://"):
            return alive  # this process can't reach them
        places = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in alive}
        refusing = _refusing(places.values())
        self._dead |= {id: place[0] for id, place in places.items() if place in refusing}
        return [node for node in alive if node["NodeID"] not in self._dead]

    def _check_nodes(self, ids: Iterable[str]) -> None:
        """Raise an error if one of these nodes has died."""
        if set(ids) - {node["NodeID"] for node in self._alive_nodes()}:
            raise _NodeDied

    def _suitable_nodes(self, bundle: Mapping[str, float], nodes: Sequence[Any]) -> list[Any]:
        """Return the nodes that have the resources, free or not.

        Raises:
            LaunchError: there are too few, and the cluster is not expected to get more.
        """
        task = self._task
        suitable = [node for node in nodes if _holds(_plain(node["Resources"]), bundle)]
        if len(suitable) < task.min_nodes and not task.waits_for_others:
            dead = f"; the raylet of {', '.join(self._dead.values())} has died" if self._dead else ""
            raise LaunchError(
                f"{_needs(task.min_nodes, bundle)}, but only {len(suitable)} of the {len(nodes)} nodes of this Ray "
                f"cluster could ever provide them: {self._describe(nodes, self._free_by_node())}{dead}. Request less "
                "with resources_per_node or num_nodes; if an autoscaler may add nodes, rdzv_timeout_s sets how long to "
                "wait"
            )
        return suitable

    def _free_by_node(self) -> Mapping[str, Mapping[str, float]]:
        try:
            from ray._private.state import available_resources_per_node

            free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
        except Exception:  # the interface is not public
            return {node["NodeID"]: _plain(node["Resources"]) for node in self._ray.nodes()}
        return free

    def _describe(self, nodes: Sequence[Any], free: Mapping[str, Mapping[str, float]]) -> str:
        return "; ".join(
            f"{node['NodeManagerAddress']} has {_amounts(node['Resources'])} "
            f"({_amounts(free.get(node['NodeID'], {}))} free)"
            for node in nodes[:8]
        )

    def _reserve(self, bundle: Mapping[str, float], count: int) -> None:
        """Reserve nodes, each for one bundle.

        Raises:
            LaunchError: the nodes were not free in time, or too many have died.
            _NotNeeded: the launching process ended in the meantime.
            _NodeDied: a node that has the resources has died.
        """
        from ray.util.placement_group import placement_group

        self._group = placement_group([dict(bundle)] * count, strategy="STRICT_SPREAD", name="nblaunch")
        began_s = time.monotonic()
        has_noted = False
        before = {node["NodeID"] for node in self._suitable_nodes(bundle, self._alive_nodes())}
        while not self._group.wait(_GROUP_STEP_S):
            self._check()
            waited_s = time.monotonic() - began_s
            nodes = self._alive_nodes()
            if before - {node["NodeID"] for node in self._suitable_nodes(bundle, nodes)}:
                raise _NodeDied
            if waited_s < _NOTE_S:
                continue
            text = f"{_needs(count, bundle)}; {self._describe(nodes, self._free_by_node())}"
            if waited_s > self._task.timeout_s:
                raise LaunchError(f"nodes were not free within {self._task.timeout_s:g} s: {text}")
            if not has_noted:
                has_noted = True
                self.send(DriverNote(text=f"waiting for nodes of the Ray cluster: {text}"))

    def _make_actors(self, bundle: Mapping[str, float], count: int) -> None:
        """Create an actor on each node, without waiting for it."""
        from ray import cloudpickle
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cloudpickle.register_pickle_by_value(ray_actor)
        others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
        made = self._ray.remote(ray_actor.NodeActor)
        for index in range(count):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            actor = made.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources=others,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=4,
                scheduling_strategy=strategy,
            )
            self._actors.append(actor.remote())

    def _variables(self) -> dict[str, str | None]:
        """Return environment variables for the node programs; None removes a variable."""
        # Ray sets OMP_NUM_THREADS from an actor's number of CPUs. Ranks may use RAY_ADDRESS to connect to this cluster.
        variables: dict[str, str | None] = {"OMP_NUM_THREADS": None, **self._task.variables}
        with suppress(Exception):  # Ray Client does not know the address
            variables["RAY_ADDRESS"] = str(self._ray.get_runtime_context().gcs_address)
        given = dict(self._task.runtime_env.get("env_vars") or {})
        return variables | {name: given[name] for name in variables if name in given}

    def _start_programs(self) -> list[tuple[str, str]]:
        """Start the program on each node; return the names and addresses of the nodes' machines.

        Raises:
            LaunchError: an actor can't be started.
            _NotNeeded: the launching process ended in the meantime.
            _NodeDied: a node has died.
        """
        from ray.util.placement_group import placement_group_table

        nodes = placement_group_table(self._group)["bundles_to_node_id"].values()
        deadline = time.monotonic() + self._task.timeout_s
        variables = self._variables()
        starts = [actor.start.remote(PROGRAM, variables) for actor in self._actors]
        places: dict[int, tuple[str, str]] = {}
        ends: dict[Any, int] = {}
        try:
            while len(places) < len(starts):
                self._check()
                waiting = [start for number, start in enumerate(starts) if number not in places]
                done, _ = self._ray.wait([*waiting, *ends], timeout=_STEP_S)
                for reply in done:
                    if reply in ends:
                        self._report_early_end(places, ends.pop(reply), *self._ray.get(reply))
                    else:
                        number = starts.index(reply)
                        places[number] = self._ray.get(reply)
                        ends[self._actors[number].wait.remote()] = number
                if not done or len(places) == len(starts):  # a dead node's actor would wait for another node
                    self._check_nodes(nodes)
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"not all actors in the Ray cluster started within {self._task.timeout_s:g} s"
                    )
        except (LaunchError, _NotNeeded, _NodeDied):
            raise
        except Exception as error:
            self._check_nodes(nodes)
            cause = _cause(error) or formatting.first_line(str(error))
            advice = (
                ". The nodes also need nblaunch: install it there, or pass runtime_env={'pip': ['nblaunch']}"
            )
            raise LaunchError(
                f"the actor that starts the program on a node of the Ray cluster failed: {type(error).__name__}: "
                f"{cause}{advice if 'No module named' in cause else ''}"
            ) from error
        self._have_started = True
        return [place for _, place in sorted(places.items())]

    def _report_early_end(
        self, places: Mapping[int, tuple[str, str]], number: int, exit_code: int | None, last_output: bytes
    ) -> None:
        """Raise an error if a program whose node is needed has ended before the others have started."""
        if len(self._actors) == self._task.min_nodes:
            raise LaunchError(
                f"the program of node {number} (host {places[number][0]}) ended before the ranks started: "
                f"{describe_end(exit_code, last_output)}"
            )

    # --- bytes ---------------------------------------------------------------------------------------------------

    def _move_up(self, number: int, actor: Any) -> None:
        """Move bytes from a node program to the launching process until the program ends."""
        end: str | tuple[int | None, bytes] = ""
        try:
            while not end:
                data, end = self._ray.get(actor.poll.remote())
                if data:
                    self._sockets[number].sendall(data)
            why = end if isinstance(end, str) else describe_end(*end)
        except OSError as error:
            why = f"its connection was closed here: {error}"
        except Exception as error:
            why = f"its actor has ended: {type(error).__name__}"
        self.send(NodeEnded(number=number, why=why))
        with suppress(OSError):
            self._sockets[number].shutdown(socket.SHUT_RDWR)

    def _move_down(self, number: int, actor: Any) -> None:
        """Move bytes from the launching process to a node program, until the launching process closes its end."""
        with suppress(Exception):  # the actor has ended, which the other thread reports
            while data := self._sockets[number].recv(_READ_BYTES):
                self._ray.get(actor.send.remote(data))
            self._ray.get(actor.leave.remote(), timeout=_LEAVE_S)

    def end(self) -> None:
        """End the programs, the actors, the placement group, and a cluster that this process has started.

        The connection to any other cluster ends with this process: closing it first would make the user wait 0.3 s.
        """
        if not self._ray.is_initialized():
            return
        with suppress(Exception):  # the rest ends with the connection
            # If a killed actor's program is not running ranks, the program also ends.
            leaving = [actor.leave.remote() for actor in self._actors] if self._have_started else []
            if leaving:
                self._ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_S)
            self._give_back()
        if self._owns_cluster:
            self._ray.shutdown()

    def _give_back(self) -> None:
        """End the actors, remove the placement group, and wait until it is gone, so that its nodes are free."""
        from ray.util.placement_group import placement_group_table, remove_placement_group

        while self._actors:
            self._ray.kill(self._actors.pop())
        if self._group is None:
            return
        remove_placement_group(self._group)
        deadline = time.monotonic() + _REMOVAL_S
        while time.monotonic() < deadline:
            if placement_group_table(self._group).get("state") in (None, "REMOVED"):
                return
            time.sleep(_STEP_S / 5)


def _current_cluster() -> str:
    try:
        return _CURRENT_CLUSTER.read_text().strip()
    except OSError:
        return ""


def _answers(address: str) -> bool:
    """Return whether a program is listening at the address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


def _refusing(places: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
    """Return the addresses and ports at which no program is listening, although their machines reply."""
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    connections = {socket.socket(families[":" in place[0]]): place for place in places}
    deadline = time.monotonic() + _REFUSAL_S
    refusing = set()
    for connection, place in connections.items():
        connection.setblocking(False)
        if connection.connect_ex(place) == errno.ECONNREFUSED:
            refusing.add(place)
    for connection, place in connections.items():
        poller = select.poll()
        poller.register(connection, select.POLLOUT)
        poller.poll(1000 * max(0.0, deadline - time.monotonic()))
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
            refusing.add(place)
        connection.close()
    return refusing


def _default_bundle(task: DriverTask, totals: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the default resources per node: one core per rank, and one GPU per rank if there are any.

    If the number of ranks is not set, return how many CPUs and GPUs the smallest of the ``max_nodes`` largest nodes
    has.
    """
    with_gpus = [total for total in totals if total.get("GPU", 0) >= 1]
    uses_gpus = bool(with_gpus) and task.backend not in ("cpu", "xla", "torch_tpu", "mps")
    best = sorted(with_gpus if uses_gpus else totals, key=lambda total: -total.get("CPU", 0))
    if task.ranks_per_node is not None:
        cores = min([float(task.ranks_per_node), *(total.get("CPU", 1.0) for total in best)])
        return {"CPU": cores, **({"GPU": float(task.ranks_per_node)} if uses_gpus else {})}
    if not best:
        return {"CPU": 1.0}
    last = best[min(len(best), task.max_nodes) - 1]
    return {"CPU": last.get("CPU", 1.0), **({"GPU": last["GPU"]} if uses_gpus else {})}


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Return resources except those that name a node or a placement group."""
    return {name: amount for name, amount in resources.items() if ":" not in name and "_group_" not in name}


def _holds(resources: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0) >= amount for name, amount in bundle.items())


def _needs(count: int, bundle: Mapping[str, float]) -> str:
    return f"{formatting.count(count, 'node')} with {_amounts(bundle)} each {'is' if count == 1 else 'are'} needed"


def _amounts(resources: Mapping[str, float]) -> str:
    shown = {
        name: math.floor(amount * 100) / 100
        for name, amount in _plain(resources).items()
        if name not in ("object_store_memory", "memory")
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"


def _cause(error: BaseException) -> str:
    """Return the line of an actor's error that states the cause; empty if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return errors[-1] if errors else ""
