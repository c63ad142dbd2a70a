"""torch.distributed's default process group: joining, leaving and forgetting it, and averaging gradients on the host.

Averaging on the host is for devices whose runtime has no collectives across processes. ``training/joining.py`` makes a
process join the group when it creates its first Accelerator or PartialState (``training/shared_state.py``) or calls
its first collective (``training/collectives/operations.py``). For the ranks of a session, ``session/client.py``
decides for each command whether it needs a group, and ``session/server.py`` joins it.

Some code forms groups without a launcher, or starts ranks of its own. In a worker, that works or raises an error
(:func:`adapt_groups`).
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nblaunch import env, packages
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch

ALL_JOIN_BEFORE_ANY_GOES_ON = {"TORCH_DIST_INIT_BARRIER": "1"}
"""Environment variables that make all ranks join before any continues: otherwise, a rank with a short function would
close its connections while other ranks are still opening theirs.
"""

_GLOO = ":gloo"

_NUM_JOINING = "nblaunch/joining"
"""Key under which a store counts the ranks that are about to join the default group."""
_POLL_S = 0.002
_POLL_S_PER_RANK = 0.0002

_SETTLE_S = 0.005
_TIMEOUT = timedelta(minutes=5)
_DEBUGGED_TIMEOUT = timedelta(days=1)
_name = ""
_numbers = itertools.count()
"""Numbers the connections of this process to the shared store; each connection serves one group."""

_is_timeout_extended = False

_connections: dict[int, tuple[int, int]] = {}
"""Sockets of the named default group, if it uses gloo, and of all other groups that use gloo: descriptor -> identity,
because numbers may be reused.
"""

_open_before: dict[int, tuple[int, int]] | None = None
"""The sockets that were open before this process began to form a group; None while it forms none."""

_abandoned: list[Any] = []

kept: set[Any] = set()
"""The groups that this process was in at its last step."""


def join(dist_backend: str, topology: Topology, timeout_s: float | None) -> None:
    """Join the job's default group through the ``env://`` rendezvous; do nothing if this process is in a group.

    A process without a launcher (``master_port`` 0) joins no group, because it needs none.
    """
    import torch.distributed as dist

    _raise_time_limits()
    if topology.master_port == 0 or dist.is_initialized():
        return
    rank, size = topology.rank, topology.world_size
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    store = None
    with _noting_connections() if dist_backend == "gloo" else nullcontext():
        if _name:
            _forget_unfinished()
            # On the shared store, torch would mistake an earlier group's keys for keys of the next group.
            common, rank, size = next(dist.rendezvous("env://", rank, size, timeout=timeout or _TIMEOUT))
            store = dist.PrefixStore(_name, common)
        dist.init_process_group(dist_backend, timeout=timeout, rank=rank, world_size=size, store=store)


def _forget_unfinished() -> None:
    """Forget a group whose forming was interrupted.

    Otherwise, torch would give the next group another number than on ranks that had not begun to form this one.
    """
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    _abandoned.extend(world.pg_map)  # destroying a group may wait for its threads
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(world, name, {}).clear()
    world.group_count = 0


@contextmanager
def _noting_connections() -> Iterator[None]:
    """Note the sockets that are opened in the block, so that :func:`disconnect` finds them, even during the block."""
    global _open_before
    if not _name or _open_before is not None:
        yield
        return
    before = _open_sockets()
    try:
        _open_before = before
        yield
    finally:
        _connections.update(_opened_since(before))
        _open_before = None


def extend_collective_timeout() -> None:
    """Raise the default time limit of collectives to a day, because a rank may be in a debugger.

    Groups that already exist, or that are created with their own limit, keep their limits.
    """
    global _is_timeout_extended
    _is_timeout_extended = True
    _raise_time_limits()


def _raise_time_limits() -> None:
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if _is_timeout_extended and c10d is not None:
        # The default time limit for new groups; torch has no public way to set it.
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = _DEBUGGED_TIMEOUT


def adapt_joining(topology: Topology) -> None:
    """Adapt how torch forms groups in this worker, which connects to the launcher's store."""
    wait = functools.partial(_wait_interruptibly, master_port=topology.master_port)
    packages.when_imported("torch.distributed.distributed_c10d", _wait_for_members_alone)
    packages.when_imported("torch.distributed.distributed_c10d", wait)
    packages.when_imported("torch.distributed.rendezvous", _keep_groups_apart)


def _wait_for_members_alone(c10d: Any) -> None:
    """Make ``new_group(ranks)`` wait for the members of the group, instead of all ranks of the job.

    ``TORCH_DIST_INIT_BARRIER`` makes torch wait for all ranks after each new group. A program in which only the members
    call ``new_group`` would then hang under nblaunch, although it works under torchrun. The barrier is still needed for
    groups with gloo, whose members open their connections in that call; members of other groups open theirs later.
    """
    # torch has no public way to choose the ranks of this barrier (torch 2.13).
    wait_for = getattr(c10d, "_store_based_barrier", None)
    if wait_for is None:
        return

    def wait_for_members(
        rank: int, store: Any, group_name: str, count: int, *args: Any, **kwargs: Any
    ) -> None:
        world = c10d._world
        group = next((group for group, name in world.pg_names.items() if name == group_name), None)
        if group is None:
            return  # this rank is not a member
        members = sorted(world.pg_group_ranks[group])
        if len(members) == world.default_pg.size():
            wait_for(rank, store, group_name, count, *args, **kwargs)
        elif any(part.endswith(_GLOO) for part in c10d.get_backend_config(group).split(",")):
            # Each rank counts its groups itself, so two groups may have the same name.
            key = f"{group_name}/{','.join(map(str, members))}"
            wait_for(rank, store, key, len(members), *args, **kwargs)

    c10d._store_based_barrier = wait_for_members


@packages.defines_replacements
def _keep_groups_apart(rendezvous: Any) -> None:
    """Let a program destroy the default group and create it again.

    The launcher's store outlives the group. If both groups used the same keys, the second group would mistake
    the first group's addresses for its own and wait forever, as happens under torchrun.
    """
    # torch has no public way to choose the store's prefix (torch 2.13).
    connect = getattr(rendezvous, "_create_c10d_store", None)
    if connect is None:
        return

    @packages.replaces(rendezvous, "_create_c10d_store")
    def connect_and_name(*args: Any, **kwargs: Any) -> Any:
        store, number = connect(*args, **kwargs), next(_numbers)
        return (
            store if number == 0 else sys.modules["torch.distributed"].PrefixStore(f"group_{number}", store)
        )


@packages.defines_replacements
def _wait_interruptibly(c10d: Any, *, master_port: int) -> None:
    """Let an interrupt reach a rank that waits for other ranks to join the job's default group.

    torch waits in native code, where Python can't raise the interrupt. If another rank ended instead of joining, the
    launcher would have no choice but to kill the waiting rank after the grace period, and that rank's ``finally``
    blocks would not run.
    """
    # torch has no public hook between the rendezvous and the creation of the group (torch 2.13).
    create = getattr(c10d, "_new_process_group_helper", None)
    if create is None:
        return

    @packages.replaces(c10d, "_new_process_group_helper")
    def create_with_all_ranks(
        size: int, rank: int, ranks: Sequence[int], backend: Any, store: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not ranks and _port_of(store) == master_port:  # the list is empty for the default group
            _wait_for_all(store, size, kwargs.get("timeout") or _TIMEOUT)
        with _noting_connections() if str(backend).endswith("gloo") else nullcontext():
            return create(size, rank, ranks, backend, store, *args, **kwargs)


def _port_of(store: Any) -> int | None:
    """Return a TCP store's port, which identifies the job's store; None for other kinds of stores."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None


def _wait_for_all(store: Any, size: int, timeout: timedelta) -> None:
    """Wait until all ranks have called this function; after ``timeout``, let torch raise the error."""
    end_s = time.monotonic() + timeout.total_seconds()
    num_here = store.add(_NUM_JOINING, 1)
    while num_here < size and time.monotonic() < end_s:
        time.sleep(_POLL_S + size * _POLL_S_PER_RANK)
        num_here = store.add(_NUM_JOINING, 0)


def name_next_group(name: str) -> None:
    """Prefix the keys of this process's next group in the shared store with ``name``, which all ranks must share."""
    global _name, _numbers
    _name, _numbers = name, itertools.count()


def is_joined() -> bool:
    """Return whether this process is in a default group. Imports nothing."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def keep_groups() -> None:
    """Keep this process's groups until :func:`drop_destroyed_groups`, even if the user's code destroys them.

    A group's threads may still hold tensors of the last collective, and need the interpreter's lock to release them. A
    ``DistributedDataParallel`` that is collected after ``destroy_process_group()``, as happens when most functions
    return, would destroy the group and wait for these threads while it holds the lock (torch 2.13, gloo;
    pytorch/pytorch#56297).
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    groups = c10d and c10d._world.pg_map
    if groups and not groups.keys() <= kept:  # most steps end here
        kept.clear()
        kept.update(groups)


def drop_destroyed_groups() -> None:
    """Release the groups that the user's code has destroyed; called after it has returned."""
    if not kept <= _groups():
        # This releases the lock for a group's threads; before torch 2.8, destroying a group does not.
        time.sleep(_SETTLE_S)
    kept.clear()


def _groups() -> Set[Any]:
    """Return the groups that this process is in. Imports nothing."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return frozenset() if c10d is None else c10d._world.pg_map.keys()


def leave() -> None:
    """Destroy the default group if there is one."""
    if is_joined():
        time.sleep(_SETTLE_S)  # see drop_destroyed_groups
        sys.modules["torch.distributed"].destroy_process_group()
        kept.clear()


def break_off() -> None:
    """Leave all groups immediately, if there are any: waiting collectives fail, here and on the connected ranks.

    Gloo closes its connections only when the last reference to the group is dropped, and a prepared model holds one.
    """
    disconnect()
    _connections.clear()
    leave()


def disconnect() -> None:
    """Shut down the connections of groups that use gloo, also of a group that is being formed. Safe in any thread.

    Native code that waits for a rank or for the job's store then raises an error.
    """
    before = _open_before  # read once, because the main thread may finish the group
    for fd, identity in (dict(_connections) | ({} if before is None else _opened_since(before))).items():
        with suppress(OSError):
            if _identity_of_socket(fd) == identity:
                with socket.socket(fileno=os.dup(fd)) as connection:
                    # getpeername() raises an error for a listening socket. gloo would end the process if such a
                    # socket were shut down.
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)


def _opened_since(before: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Return the sockets of this process that are not in ``before``."""
    return {fd: identity for fd, identity in _open_sockets().items() if before.get(fd) != identity}


def _open_sockets() -> dict[int, tuple[int, int]]:
    """Return the sockets of this process: descriptor -> identity."""
    sockets = {int(name): _identity_of_socket(int(name)) for name in os.listdir("/dev/fd")}
    return {fd: identity for fd, identity in sockets.items() if identity is not None}


def _identity_of_socket(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:  # the descriptor of the folder that listdir was reading
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def leave_at_exit() -> None:
    """Destroy the groups of a process that is about to end, if ending the process is not enough.

    NCCL and similar backends need their groups destroyed before the process ends. Gloo's groups own nothing that
    outlives the process, and destroying one takes 10 to 20 ms, spent waiting for threads that end with the process
    anyway.
    """
    if not is_joined():
        return
    dist: Any = sys.modules["torch.distributed"]
    groups = dist.distributed_c10d._world.pg_map
    configs = [dist.get_backend_config(group) for group in groups]  # such as "cpu:gloo,cuda:nccl"
    if any(not part.endswith(_GLOO) for config in configs for part in config.split(",")):
        leave()


def forget_inherited() -> None:
    """Make a forked worker forget the kernel's group.

    The group's threads and sockets belong to the kernel. A call that destroyed the group here would wait for threads
    that a fork does not copy, so the group's objects stay alive, unused, until the process ends.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    _abandoned.extend(kept)
    kept.clear()
    if not _groups():
        return
    # torch has no public way to forget a group without ending it.
    _abandoned.append((c10d._world, c10d.GroupMember.WORLD, dict(vars(c10d._world))))
    c10d._world = c10d._World()
    c10d._unregister_all_process_groups()


def average(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Average gradients over ranks through gloo. A gradient that only some ranks have counts as zero on the others."""
    import torch
    import torch.distributed as dist

    if not parameters:
        return
    present = torch.tensor([float(p.grad is not None) for p in parameters])
    flat = torch.cat(
        [
            torch.zeros(p.numel()) if p.grad is None else p.grad.detach().cpu().reshape(-1).float()
            for p in parameters
        ]
        + [present]
    )
    dist.all_reduce(flat)
    *values, counts = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, value, count in zip(parameters, values, counts.tolist(), strict=True):
        if count:
            mean = (value / dist.get_world_size()).to(parameter.dtype).reshape(parameter.shape)
            parameter.grad = mean.to(parameter.device)


# --- ways to form groups without a launcher ---------------------------------------------------------------------------

_LIGHTNING = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
_LIGHTNING_LAUNCHER = "{}.strategies.launchers.multiprocessing"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_ENDED_CHILD = ("ProcessRaisedException", "ProcessExitedException")


def adapt_groups(topology: Topology) -> None:
    """In a worker, make the ways to form process groups without a launcher work or raise an error."""
    _reject_launchers(topology)
    _let_ranks_meet_elsewhere(topology)
    _let_spawned_ranks_meet(topology)


def _reject_launchers(topology: Topology) -> None:
    """Make Lightning's multi-process launchers raise an error in this worker, if the job has several ranks.

    Otherwise, each of N ranks would start N processes, which would all join with this rank's address and
    number. They would interfere with each other and report only failed connections.
    """
    if topology.world_size == 1:
        return

    def raise_error(launcher: Any) -> None:
        raise RuntimeError(
            f"this strategy starts processes of its own, but rank {topology.rank} is already one of the "
            f"{topology.world_size} processes that nblaunch has started. Use strategy='ddp', with "
            f"devices={topology.local_world_size}, instead of 'ddp_notebook', 'ddp_fork' or 'ddp_spawn'"
        )

    def watch(module: Any) -> None:
        packages.call_before(module._MultiProcessingLauncher, "launch", raise_error)

    for package in _LIGHTNING:
        packages.observe_when_imported(_LIGHTNING_LAUNCHER.format(package), watch)


def _let_ranks_meet_elsewhere(topology: Topology) -> None:
    """Let ranks form their group at an address of their own: a ``tcp://`` URL or another ``MASTER_PORT``.

    Because of torchrun's variables, every rank would wait at that address for the launcher's store, which
    exists only at the launcher's own address.
    """

    def watch(module: Any) -> None:
        create = module._create_c10d_store

        @packages.replaces(module, "_create_c10d_store")
        def create_at_rank_0(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
            if port == topology.master_port:
                return create(hostname, port, *args, **kwargs)
            with env.patched({_AGENT_STORE: None}):
                return create(hostname, port, *args, **kwargs)

    packages.observe_when_imported("torch.distributed.rendezvous", watch)


def _let_spawned_ranks_meet(topology: Topology) -> None:
    """Let processes from ``torch.multiprocessing.spawn`` host their own store, as they do under plain Python.

    Because of torchrun's variables, they would wait for the launcher's store at whatever address they choose.
    If the job has several ranks, their groups need the same port, and this raises an error. A single rank gives its
    processes a free port instead.
    """

    def watch(module: Any) -> None:
        start = module.start_processes

        @packages.replaces(module, "start_processes", sys.modules[module.__package__])
        def start_without_store(*args: Any, **kwargs: Any) -> Any:
            port = {"MASTER_PORT": str(_free_port())} if topology.world_size == 1 else {}
            with env.patched({_AGENT_STORE: None, **port}):  # the rank itself may still join a group
                return start(*args, **kwargs)

    packages.observe_when_imported("torch.multiprocessing.spawn", watch)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def explain_launcher(error: BaseException) -> tuple[str, ...]:
    """Return a sentence about the function's own processes, if one of them has failed."""
    kind = type(error)
    if kind.__name__ not in _ENDED_CHILD or not kind.__module__.startswith("torch.multiprocessing"):
        return ()
    return (
        "the function started this process itself, with torch.multiprocessing. If it was meant to be a rank, call its "
        "function directly: nblaunch has already started one process per rank. Or launch with num_processes=1",
    )
