"""A cluster engine to which the kernel is connected: Ray.

Its connections, and the threads of gRPC inside its libraries, belong to one process. A fork that uses them ends the
kernel by SIGSEGV, or the daemon of the whole machine. So no worker is forked from a connected process; a fresh worker
connects by itself, to the kernel's cluster. Nothing here imports the engine.
"""

from __future__ import annotations

import sys
from typing import Any

_ADDRESS = "RAY_ADDRESS"


def is_connected() -> bool:
    """Return whether this process is connected to a cluster."""
    ray: Any = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)  # missing while another thread imports it
    return is_initialized is not None and bool(is_initialized())


def environment() -> dict[str, str]:
    """Return the variables by which fresh workers connect to the cluster of this process; empty if there is none."""
    if not is_connected():
        return {}
    try:
        address = sys.modules["ray"].get_runtime_context().gcs_address
    except Exception:  # of Ray Client, which does not know it
        return {}
    return {_ADDRESS: str(address)}
