"""Connections and pipes that the kernel has open when it forks workers.

A fork copies a connection's descriptor. All ranks then write requests into one stream, and each byte of a reply reaches
only one of them, so a rank may get the reply to another rank's request.

HTTP clients and log handlers keep connections open for later requests. Each rank opens its own instead, whatever
program is at the other end. If a rank used one of the kernel's encrypted connections, the kernel's next request would
fail.

The first rank of this machine keeps the kernel's other connections, such as those to databases. To the other
ranks, these connections look as if the other side had closed them. Clients with connection pools then
reconnect; others raise an error that names the connection.

Connections to the kernel itself and to programs that it has started stay shared, because these include services that
expect several processes to write to them, such as experiment trackers. Connections that other programs opened to the
kernel also stay shared.

Pipes to processes that the kernel has started, such as environments for reinforcement learning, also stay shared. Each
rank reports the first pipe of this kind that it reads from. The launcher warns if all ranks read from the same pipe.
One-way pipes are left out: queues use them with a lock, and they are meant to have several readers.

Ray's connections, and the gRPC threads inside its libraries, belong to one process. A forked process that uses them
crashes the kernel, or the machine-wide daemon. A connected process therefore never forks workers; fresh workers connect
to the kernel's cluster themselves. Nothing here imports Ray.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from traceback import walk_tb
from typing import Any

from nblaunch import context, env, formatting, packages
from nblaunch.host.sockets import Connection
from nblaunch.user_code import innermost_user_frame
from nblaunch.worker.inheritance import positions
from nblaunch.worker.inheritance.positions import Identity

PIPE_CHECK = "shared_pipe"
"""Name of the check for pipes in ``NBLAUNCH_CHECKS``."""

_MAX_NAMED = 3
_RAY_ADDRESS = "RAY_ADDRESS"
_CAN_ONLY = "can only"
"""Beginning of the assertion messages from a ``multiprocessing.Process`` in a process that did not start it."""

_ABOUT_CONNECTIONS = re.compile(r"connect|socket|server|pipe|\bEOF\b|closed|terminat", re.IGNORECASE)


def leave_to_first_rank(connections: Sequence[Connection]) -> frozenset[Identity]:
    """Replace the kernel's connections with closed ones, under the same descriptors.

    Returns:
        The identities of what these descriptors now refer to.
    """
    if not connections:
        return frozenset()
    closed, other = socket.socketpair()
    with closed, other:
        for connection in connections:
            with suppress(OSError):
                os.dup2(closed.fileno(), connection.fd, inheritable=os.get_inheritable(connection.fd))
        return frozenset({positions.identity(closed.fileno())})


def explain(error: BaseException, connections: Sequence[Connection], rank: int) -> tuple[str, ...]:
    """Return a sentence that names closed ``connections`` if an error seems to come from using one."""
    if not connections or not _ABOUT_CONNECTIONS.search(f"{type(error).__name__}: {error}"):
        return ()
    places = list(dict.fromkeys(connection.place for connection in connections))
    return (
        f"a cell opened the connection to {formatting.first(places, _MAX_NAMED)}, which only the first rank keeps, "
        f"so rank {rank} finds it closed. Connect inside the function",
    )


def renew(channels: Collection[Identity]) -> None:
    """Have HTTP clients and log handlers open new connections in this worker instead of using the kernel's.

    Args:
        channels: the kernel's open channels other than files, and their replacements in this worker.
    """
    for name, renew in _CLIENTS.items():
        # A client whose module is not imported yet holds none of the kernel's connections.
        if name in sys.modules:
            renew(sys.modules[name], channels)


def _is_kernels(connection: Any, channels: Collection[Identity]) -> bool:
    """Return whether a socket or its wrapper is among the kernel's ``channels``."""
    try:
        return positions.identity(connection.fileno()) in channels
    except (AttributeError, OSError, ValueError):  # not a socket, or a closed one
        return False


def _renew_in_library(module: Any, channels: Collection[Identity]) -> None:
    """Close the kernel's connection before a request, so that ``http.client`` connects again."""

    def close_if_kernels(connection: Any) -> None:
        if _is_kernels(connection.sock, channels):
            connection.close()

    packages.call_before(module.HTTPConnection, "putrequest", close_if_kernels)


def _renew_in_urllib3(module: Any, channels: Collection[Identity]) -> None:
    """Close the kernel's connection when the pool hands it out, before the pool prepares a proxy."""
    take = module.HTTPConnectionPool._get_conn

    @packages.replaces(module.HTTPConnectionPool, "_get_conn")
    def take_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        connection = take(self, *args, **kwargs)
        if _is_kernels(connection.sock, channels):
            connection.close()
        return connection


def _renew_in_log_handlers(module: Any, channels: Collection[Identity]) -> None:
    """Drop the kernel's connection before sending a record, so that the handler connects again."""

    def drop_if_kernels(handler: Any) -> None:
        if _is_kernels(handler.sock, channels):
            handler.sock.close()
            handler.sock = None

    packages.call_before(module.SocketHandler, "send", drop_if_kernels)


def _renew_in_httpcore(module: Any, channels: Collection[Identity]) -> None:
    """Treat the kernel's connection as expired, so that the pool, which ``httpx`` also uses, opens another."""
    has_expired = module.HTTPConnection.has_expired

    @packages.replaces(module.HTTPConnection, "has_expired")
    def has_expired_here(self: Any) -> Any:
        stream = getattr(self._connection, "_network_stream", None)
        used = None if stream is None else stream.get_extra_info("socket")
        return _is_kernels(used, channels) or has_expired(self)


_CLIENTS: dict[str, Callable[[Any, Collection[Identity]], None]] = {
    "http.client": _renew_in_library,
    "urllib3.connectionpool": _renew_in_urllib3,
    "httpcore._sync.connection": _renew_in_httpcore,
    "logging.handlers": _renew_in_log_handlers,
}
"""Module -> the function that renews its connections."""


# --- pipes to processes ----------------------------------------------------------------------------------------------


def watch_pipes(channels: Collection[Identity]) -> None:
    """Report reads from the kernel's pipes.

    Args:
        channels: the kernel's open channels other than files.
    """
    module: Any = sys.modules.get("multiprocessing.connection")
    if module is None or env.is_check_off(PIPE_CHECK):
        return  # without the module, the kernel has no such pipe
    has_reported = False

    def report(connection: Any) -> None:
        nonlocal has_reported
        if has_reported or not (connection.readable and connection.writable):
            return
        pipe = positions.identity(connection.fileno())
        if pipe in channels:
            has_reported = True
            _report(pipe)

    packages.call_before(module.Connection, "_recv_bytes", report)


def _report(pipe: Identity) -> None:
    context.current().observe(
        PIPE_CHECK,
        "all ranks read from one pipe to a process that a cell has started, so a rank may get the reply to another "
        "rank's request",
        "Inside the function, create the object that owns the process, such as a SubprocVecEnv or ParallelEnv, so that "
        "each rank has its own",
        innermost_user_frame(),
        value=pipe,
        judged_by="distinct",
    )


def explain_process(error: BaseException) -> tuple[str, ...]:
    """Return a sentence that explains why a rank can't use a process that the kernel has started."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    is_process = bool(frames) and frames[-1].f_globals.get("__name__") == "multiprocessing.process"
    if not (is_process and isinstance(error, AssertionError) and str(error).startswith(_CAN_ONLY)):
        return ()
    return (
        "a cell started this process, and only the kernel can wait for it. Create the object that owns it inside the "
        "function",
    )


# --- Ray -------------------------------------------------------------------------------------------------------------


def has_ray() -> bool:
    """Return whether this process is connected to a Ray cluster."""
    ray: Any = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)  # missing while another thread imports Ray
    return is_initialized is not None and bool(is_initialized())


def environment_of_ray() -> dict[str, str]:
    """Return environment variables that connect fresh workers to this process's cluster; empty if there is none."""
    if not has_ray():
        return {}
    try:
        address = sys.modules["ray"].get_runtime_context().gcs_address
    except Exception:  # Ray Client does not know the address
        return {}
    return {_RAY_ADDRESS: str(address)}
