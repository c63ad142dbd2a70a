"""How many machines take part in a launch, and where and how they meet: read from what users write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

RDZV_BACKENDS = ("static", "c10d")
RDZV_SETTINGS = (
    "timeout",
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "read_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "is_host",
    "rank",
)
"""What ``rdzv_conf`` may hold: torch's own names. ``rank`` is accepted because other launchers put it there."""

DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
"""Where machines meet by default; the numbers that ``torchrun`` has."""

DEFAULT_RDZV_TIMEOUT_S = 600.0
DEFAULT_KEEP_ALIVE_INTERVAL_S = 5.0
DEFAULT_KEEP_ALIVE_MAX_ATTEMPT = 3

_ENDPOINT = re.compile(r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^\s:\[\]]*)(?::(?P<port>\d{1,5}))?")


def parse_num_nodes(num_nodes: Any) -> int | str:
    """A number of machines in one form: ``2``, or ``"1:2"`` for one or two.

    Raises:
        TypeError: it is neither a number, nor ``"min:max"``, nor a pair.
        ValueError: less than 1, or min above max.
    """
    parts = num_nodes
    if isinstance(num_nodes, str) and all(part.strip().isdecimal() for part in num_nodes.split(":")):
        parts = tuple(int(part) for part in num_nodes.split(":"))
    if isinstance(parts, int):
        parts = (parts,)
    is_whole = isinstance(parts, (tuple, list)) and all(type(part) is int for part in parts)
    if not is_whole or len(parts) not in (1, 2):
        raise TypeError(f"num_nodes={num_nodes!r} must be a whole number, or 'min:max' as in '1:4'")
    low, high = parts[0], parts[-1]
    if low < 1:
        raise ValueError(f"num_nodes={num_nodes!r} must be at least 1")
    if low > high:
        raise ValueError(f"num_nodes={num_nodes!r}: the minimum is above the maximum")
    return low if low == high else f"{low}:{high}"


def bounds(num_nodes: int | str | tuple[int, int]) -> tuple[int, int]:
    """The fewest and the most machines, of a number in the form that :func:`parse_num_nodes` returns."""
    low, _, high = str(num_nodes).partition(":")
    return int(low), int(high or low)


def parse_endpoint(endpoint: str) -> tuple[str, int | None]:
    """``host``, ``host:port`` or ``[v6 address]:port`` in parts; the port None where there is none.

    Raises:
        ValueError: it is none of these.
    """
    found = _ENDPOINT.fullmatch(endpoint.strip())
    port = int(found["port"]) if found and found["port"] else None
    if found is None or (port is not None and not 1 <= port <= 65535):
        raise ValueError(
            f"rdzv_endpoint={endpoint!r} is not an address such as 'host:29400' or '[fd00::1]:29400'"
        )
    return found["host"].strip("[]"), port


def parse_port(use_port: str | int | None) -> int | None:
    """Return the port that was asked for; None or 0 = let the system choose.

    Raises:
        ValueError: it is not a whole number from 0 to 65535.
    """
    if use_port is None or use_port == "":
        return None
    is_number = isinstance(use_port, int) and not isinstance(use_port, bool)
    is_text = isinstance(use_port, str) and use_port.strip().isdecimal()
    port = int(use_port) if is_number or is_text else -1
    if not 0 <= port <= 65535:
        raise ValueError(f"use_port={use_port!r} is not a TCP port (1 to 65535; None lets the system choose)")
    return port or None


def check_rdzv_conf(rdzv_conf: Any) -> None:
    """Refuse settings of the rendezvous that mean nothing; None is none.

    Raises:
        TypeError: they are no mapping.
        ValueError: the name of one is unknown, or its value is no positive number.
    """
    conf = rdzv_conf or {}
    if not isinstance(conf, Mapping):
        raise TypeError(f"rdzv_conf={conf!r} must be a dict such as {{'timeout': 60}}")
    for name, value in conf.items():
        if name not in RDZV_SETTINGS:
            raise ValueError(
                f"rdzv_conf has the unknown setting {name!r}; valid are {', '.join(map(repr, RDZV_SETTINGS))}"
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name not in ("is_host", "rank") and not (is_number and value > 0):
            raise ValueError(f"rdzv_conf[{name!r}]={value!r} must be a positive number")
