"""The workers' store: the TCPStore through which they form their process group. Agents on several machines
use a different store, the rendezvous store (``nodes/rendezvous.py``).

On one machine the launcher hosts it on ``master_addr``, 127.0.0.1 by default, and starts it on demand:

    launcher ── listening socket, port chosen by the system                made before workers start
    worker   ── init_process_group("env://"): connects as a client ──>     now the store is started behind the socket

If a function needs no process group, no store is started. Until the store is running, clients that connect wait in the
socket's backlog. On several machines, the agent of node 0 hosts the store and starts it at once (``nodes/agent.py``).
"""

from __future__ import annotations

import errno
import socket
import threading
from typing import TYPE_CHECKING

from nblaunch.errors import LaunchError
from nblaunch.host import descriptors

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_BACKLOG = 1024
_STORE_DESCRIPTORS = 16  # for its event loop and its connection to itself, with a margin


_running: set[int] = set()
"""Ports of the stores that are running in this process. Each store has a C++ thread that makes forking unsafe."""


def is_any_store_running() -> bool:
    """Return whether the store of a job, such as a background job, is running in this process.

    A fork could then copy a lock that the store's thread holds, such as the resolver's lock, and the child would wait
    for it forever.
    """
    return bool(_running)


class StoreHost:
    """Listens for workers, and becomes a ``TCPStore`` once it is started.

    Args:
        address: address of the interface to listen on.
        port: TCP port; None = chosen by the system.

    Raises:
        LaunchError: the port is in use, or the address does not belong to this machine.
    """

    def __init__(self, address: str, port: int | None) -> None:
        self.address = address
        self._store: TCPStore | None = None
        self._socket: socket.socket | None = socket.socket(family_of(address), socket.SOCK_STREAM)
        try:
            if port:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((address, port or 0))
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise LaunchError(_listen_error(error, address, port)) from error
        self.port: int = self._socket.getsockname()[1]
        self._fd = self._socket.fileno()
        descriptors.keep_from_children(self._fd)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a worker needs the store; -1 once the store is running."""
        return self._socket.fileno() if self._socket is not None else -1

    def start(self) -> None:
        """Start the store on the listening socket.

        Raises:
            LaunchError: the store can't be started, or there are not enough descriptors for it.
        """
        if self._socket is None:
            return
        try:
            # Without enough descriptors, the store itself would retry for minutes.
            descriptors.check_room(_STORE_DESCRIPTORS)
            # Start a thread first: without threads, the store would fail and leak its descriptors.
            threading.Thread(target=str).start()
            fd = self._socket.detach()
            self._socket = None
            _running.add(self.port)
            self._store = store_behind(fd, self.address, self.port)
        except (OSError, RuntimeError) as error:
            raise LaunchError(
                f"the store of the workers' process group could not be started: {error}. If descriptors "
                "(ulimit -n) or processes (ulimit -u, or the container's pids limit) ran out, use "
                "fewer workers or close other programs."
            ) from error

    def leave_to_kept_workers(self) -> None:
        """Expect no more clients, because the workers are kept for the debugger and end before others start."""
        _running.discard(self.port)

    def close(self) -> None:
        """Stop listening."""
        descriptors.forget(self._fd)
        self._store = None
        _running.discard(self.port)
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def store_behind(fd: int, address: str, port: int) -> TCPStore:
    """Start a store on a listening socket, which the store then owns and closes.

    Args:
        fd: descriptor of the socket.
        address: address that it listens on.
        port: port that it listens on.

    Raises:
        RuntimeError: the store can't be started.
    """
    import torch
    from torch.distributed import TCPStore

    # Up to torch 2.7, the store's default server rejects an open socket (pytorch/pytorch#150215).
    takes_sockets = torch.__version__ >= "2.8"  # compares versions, not strings
    return TCPStore(
        address, port, None, True, wait_for_workers=False, master_listen_fd=fd, use_libuv=takes_sockets
    )


def family_of(address: str) -> socket.AddressFamily:
    """Return IPv6 for an address with colons, else IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listen_error(error: OSError, address: str, port: int | None) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {address} is in use by another process; leave use_port out to let the system "
            "choose a free port"
        )
    return (
        f"can't listen on {address}{f':{port}' if port else ''}: {error.strerror}; master_addr must be an "
        "address of this machine, such as the default '127.0.0.1'"
    )
