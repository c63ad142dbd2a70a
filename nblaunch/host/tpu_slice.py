"""What a TPU host knows of the slice that it belongs to: the type of its chips, and how many hosts it has.

It stands in the environment (containers, Kaggle), or a metadata server has it (Cloud VMs), or neither; then the chips
on the PCI bus have to do. torch_xla asks the server wherever ``TPU_SKIP_MDS_QUERY`` is unset, and reads the environment
otherwise, and fails in both cases on what is missing: :func:`completed` gives it the rest.

Source: ``torch_xla/_internal/tpu.py`` (``get_tpu_env``, ``get_worker_ips``), which ``tests/xla`` compares with this.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_TIMEOUT_S = 1.0
_CORES_COUNT = (
    "v2",
    "v3",
    "v4",
    "v5p",
)  # their types count cores, two to a chip; the others count what PCI shows
_TYPES = {"v4": "v4", "v5": "v5p", "v5p": "v5p", "v5e": "v5litepod", "v6e": "v6e", "v7x": "tpu7x"}

Ask = Callable[[str], "str | None"]


@dataclass(frozen=True)
class TpuSlice:
    """The slice of this host.

    Args:
        accelerator_type: as ``"v5litepod-8"``, whose number is that of the whole slice; empty where it is not known.
        hosts: of the slice; empty where they are not known.
        has_server: torch_xla will ask a metadata server, and there is one.
        num_chips: of this host.
    """

    accelerator_type: str
    hosts: tuple[str, ...]
    has_server: bool
    num_chips: int

    def refusal(self) -> str | None:
        """Return why the chips of this host can't be used on their own; None where they can."""
        if len(self.hosts) > 1:
            return (
                f"this machine is one of {len(self.hosts)} hosts of a TPU slice, whose chips compute together or not "
                "at all, and launching on several TPU hosts is not available in this version"
            )
        total = num_chips_of(self.accelerator_type)
        if not self.hosts and total > self.num_chips:
            return (
                f"this machine has {self.num_chips} chips of a TPU slice of {total} ({self.accelerator_type}), whose "
                "chips compute together or not at all, and launching on several TPU hosts is not available in this "
                "version. Is it the only host? TPU_WORKER_HOSTNAMES=localhost, set before the launch, says so"
            )
        if not self.has_server and not self.accelerator_type:
            return (
                "it is not known which TPU this is: there is no metadata server, no TPU_ACCELERATOR_TYPE, and no chip "
                "on the PCI bus. Set TPU_ACCELERATOR_TYPE, as v5litepod-8, before the launch"
            )
        return None

    def completed(self) -> dict[str, str | None]:
        """Return variables without which torch_xla would fail on this host; none where a server answers."""
        if self.has_server:
            return {}
        return {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": self.accelerator_type or None,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
        }


def read(variables: Mapping[str, str], kinds: Mapping[str, int], num_chips: int, ask: Ask) -> TpuSlice:
    """Return the slice of this host.

    Args:
        variables: the environment.
        kinds: chips on the PCI bus, as of ``tpu.chips()``.
        num_chips: of this host, however they were counted.
        ask: returns the metadata server's answer for a key, None where there is none.
    """
    server = None if variables.get("TPU_SKIP_MDS_QUERY") else ask("tpu-env")
    found = re.search(r"^ACCELERATOR_TYPE: *'?([\w-]+)", server or "", re.MULTILINE)
    named = variables.get("TPU_ACCELERATOR_TYPE") or (found[1] if found else "")
    if named and "-" not in named:
        named = f"{named}-{num_chips}"  # torch_xla can't parse it without its number
    hosts = tuple(filter(None, variables.get("TPU_WORKER_HOSTNAMES", "").split(",")))
    if server is not None:
        endpoints = (ask("worker-network-endpoints") or "").split(",")
        hosts = tuple(filter(None, endpoints)) or hosts
    return TpuSlice(named or _type_of(kinds), hosts, server is not None, num_chips)


@cache
def ask_metadata_server(key: str) -> str | None:
    """Return what the metadata server of a Cloud VM has for ``key``; None where there is none. Once per process."""
    request = urllib.request.Request(_METADATA + key, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # the server is on this machine's own link
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text
    except (OSError, urllib.error.URLError):
        return None


def num_chips_of(accelerator_type: str) -> int:
    """Return the chips, as PCI shows them, of all hosts of a slice of this type; 0 where it is not known."""
    found = re.fullmatch(r"([a-z]+\d[a-z]*)-(\d+)", accelerator_type)
    if found is None:
        return 0
    count = int(found[2])
    return max(1, count // 2) if found[1] in _CORES_COUNT else count


def _type_of(kinds: Mapping[str, int]) -> str:
    """Return the type of a single host with these chips; empty where none are seen, or of several kinds."""
    if len(kinds) != 1:
        return ""
    ((kind, count),) = kinds.items()
    if kind not in _TYPES:
        return f"v3-{2 * count}"
    name = _TYPES[kind]
    return f"{name}-{2 * count if name in _CORES_COUNT else count}"
