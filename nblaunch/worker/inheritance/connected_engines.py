"""The kernel's connection to a cluster engine, Ray.

Ray's connections, and the gRPC threads inside its libraries, belong to one process. A fork that uses them crashes the
kernel, or the daemon of the whole machine. A connected process therefore never forks workers; fresh workers connect
to the kernel's cluster themselves. Nothing here imports the engine.
"""

from __future__ import annotations

import sys
from typing import Any

_ADDRESS = "RAY_ADDRESS"


def is_connected() -> bool:
    """Return whether this process is connected to a cluster."""
    ray: Any = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)  # missing while another thread imports Ray
    return is_initialized is not None and bool(is_initialized())


def environment() -> dict[str, str]:
    """Return environment variables that connect fresh workers to this process's cluster; empty if there is none."""
    if not is_connected():
        return {}
    try:
        address = sys.modules["ray"].get_runtime_context().gcs_address
    except Exception:  # Ray Client does not know the address
        return {}
    return {_ADDRESS: str(address)}
