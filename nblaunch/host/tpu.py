"""A TPU host, inspected without accessing its chips, and the environment of its worker processes.

Nothing here opens a device: this module counts chips on the PCI bus and looks up the owner of a lock file. Its
constants come from torch_xla 2.9 (``torch_xla/_internal/tpu.py``); ``tests/xla`` checks that the two agree.

The slice that this host belongs to, with its chip type and number of hosts, is read from the environment (containers,
Kaggle) or from a metadata server (Cloud VMs). If neither has it, nblaunch uses the chips on the PCI bus. torch_xla asks
the server if ``TPU_SKIP_MDS_QUERY`` is unset, and reads the environment otherwise. It fails on missing values in both
cases, so :meth:`TpuSlice.completed` supplies them.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nblaunch import env
from nblaunch.host import proc

PCI_DEVICES = Path("/sys/bus/pci/devices")
DEV = Path("/dev")
PROC = Path("/proc")
LOCK_FILE = Path("/tmp/libtpu_lockfile")

_GOOGLE = "0x1ae0"
_TWO_CORES = "0x0027"  # v2 and v3
_CHIPS = {
    _TWO_CORES: "v2 or v3",
    "0x005e": "v4",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0056": "v5",
    "0x0062": "v5p",
    "0x0076": "v7x",
}
_BASE_PORT = 8476
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
# On the bus of a v7x host, each half of a chip is a device; the fourth dimension counts the halves.
_V7X_BOUNDS = {1: "1,1,1", 2: "1,1,1,2", 8: "2,2,1,2"}

# All variables that may determine, before a worker starts, which chips it owns and which processes are its peers.
# torch_xla sets only those that are unset, so a variable left over from the image or from another library would
# silently take precedence (huggingface/transformers#28204, Lightning-AI/pytorch-lightning#20244).
TOPOLOGY_VARIABLES = (
    "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_HOST_BOUNDS",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "CLOUD_TPU_TASK_ID",
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
)


@cache
def chips() -> Counter[str]:
    """Return the TPU chips of this host by kind, such as ``Counter({"v5e": 8})``. Read once per process."""
    return _chips(None)


@cache
def vfio_chips() -> Counter[str]:
    """Return the :func:`chips` that are passed through by VFIO. Read once per process."""
    return _chips(DEV / "vfio")


def _chips(vfio: Path | None) -> Counter[str]:
    """Return the TPU chips on the PCI bus by their kind.

    Args:
        vfio: folder with the device files of VFIO groups; only chips in an existing group count. None = all chips
            count.
    """
    counts: Counter[str] = Counter()
    for device in sorted(PCI_DEVICES.glob("*")):
        if proc.read(device / "vendor") != _GOOGLE:
            continue
        kind = _CHIPS.get(proc.read(device / "device"))
        if kind and (vfio is None or (vfio / (device / "iommu_group").resolve().name).exists()):
            counts[kind] += 1
    return counts


@cache
def device_files(names_tpu: bool) -> int:
    """Count chips by their device files, for containers that hide the PCI bus. Read once per process.

    Args:
        names_tpu: whether the environment names a TPU; if not, VFIO groups don't count, because other users may own
            them.
    """
    accelerators = [path for path in DEV.glob("accel*") if re.fullmatch(r"accel\d+", path.name)]
    groups = [path for path in DEV.glob("vfio/*") if path.name.isdigit()] if names_tpu else []
    return len(accelerators) or len(groups)


def has_two_cores(kinds: Mapping[str, int]) -> bool:
    """Return whether these are early chips with two devices each, which a process would have to drive together."""
    return bool(kinds.get(_CHIPS[_TWO_CORES]))


def can_drive(num_workers: int, num_chips: int, is_v7x: bool = False) -> bool:
    """Return whether ``num_workers`` workers form a mesh on a host with these chips: one worker, or one per chip."""
    return num_workers == 1 or (
        num_workers == num_chips and num_chips in (_V7X_BOUNDS if is_v7x else _BOUNDS)
    )


def topology_env(local_rank: int, local_world_size: int, is_v7x: bool = False) -> dict[str, str | None]:
    """Return the environment variables for one worker; None means that a variable is removed.

    These are all variables that torch_xla's ``configure_topology`` would set. torch_xla then adds nothing, regardless
    of the metadata server and the environment. A single worker sees one chip.

    Args:
        local_rank: local rank of the worker.
        local_world_size: number of workers: 1, or the number of chips.
        is_v7x: whether the chips are v7x, which have a fourth dimension.

    Raises:
        KeyError: there is no mesh for this number of chips.
    """
    changes: dict[str, str | None] = dict.fromkeys(TOPOLOGY_VARIABLES)
    changes["PJRT_LOCAL_PROCESS_RANK"] = str(local_rank)
    changes["PJRT_LOCAL_PROCESS_COUNT"] = str(local_world_size)
    changes["TPU_CHIPS_PER_PROCESS_BOUNDS"] = "1,1,1"
    changes["TPU_PROCESS_BOUNDS"] = (_V7X_BOUNDS if is_v7x else _BOUNDS)[local_world_size]
    changes["TPU_VISIBLE_CHIPS"] = str(local_rank)
    if local_world_size > 1:
        ports = range(_BASE_PORT, _BASE_PORT + local_world_size)
        changes["TPU_PROCESS_ADDRESSES"] = ",".join(f"localhost:{port}" for port in ports)
        changes["TPU_PROCESS_PORT"] = str(ports[local_rank])
        changes["CLOUD_TPU_TASK_ID"] = str(local_rank)
    return changes


def lock_holder() -> int | None:
    """Return a process that is using the chips through libtpu: one that has the lock file or a device open.

    If several processes use the chips, prefer this process. Return None if no process uses them.

    The file alone proves nothing: it remains when a process is killed (jax-ml/jax#10192), and nblaunch never deletes
    it. Processes of other users can't be inspected.
    """
    wanted = re.compile(rf"{re.escape(str(LOCK_FILE))}|/dev/accel\d+|/dev/vfio/\d+")
    for descriptors in sorted(PROC.glob("[0-9]*/fd"), key=lambda path: path.parent.name != str(os.getpid())):
        if any(wanted.fullmatch(target) for target in proc.open_files(descriptors)):
            return int(descriptors.parent.name)
    return None


def holder_problem(is_ours: bool, where: str = "") -> str | None:
    """Return why the chips can't be used now and what to do, if a process has taken them; otherwise None.

    Args:
        is_ours: whether this process is known to use them.
        where: text that names the cell that took them, beginning with a space.
    """
    holder = lock_holder()
    if is_ours or holder == os.getpid():
        return (
            f"this process has taken the TPU chips itself{where}, and releases them only when it ends: restart "
            "the kernel, and use the device only inside the function"
        )
    if holder is not None:
        return (
            f"another process is using the TPU chips: {holder} ({command_of(holder)}). End it, or shut down its "
            f"notebook's kernel. (That also removes {LOCK_FILE}; don't delete the file while the process is running.)"
        )
    return None


def command_of(pid: int) -> str:
    """Return the command line of a process, shortened; ``"?"`` if it can't be read."""
    words = proc.read(PROC / str(pid) / "cmdline").replace("\0", " ").strip()
    return f"{words[:77]}..." if len(words) > 80 else words or "?"


_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_TIMEOUT_S = 1.0
_CORES_COUNT = ("v2", "v3", "v4", "v5p")  # types that count cores, two per chip; others count PCI devices
_TYPES = {"v4": "v4", "v5": "v5p", "v5p": "v5p", "v5e": "v5litepod", "v6e": "v6e", "v7x": "tpu7x"}


@dataclass(frozen=True)
class TpuSlice:
    """The slice that this host belongs to.

    Args:
        accelerator_type: for example ``"v5litepod-8"``, whose number is the size of the whole slice; empty if unknown.
        hosts: hosts in the slice; empty if unknown.
        has_server: whether torch_xla will ask a metadata server, and one exists.
        num_chips: number of chips on this host.
    """

    accelerator_type: str
    hosts: tuple[str, ...]
    has_server: bool
    num_chips: int

    def problem(self) -> str | None:
        """Return the reason why this host's chips can't compute without other hosts; None if they can."""
        if len(self.hosts) > 1:
            return (
                f"this machine is one of {len(self.hosts)} hosts in a TPU slice, whose chips must all compute "
                "together, but nblaunch does not support several TPU hosts yet"
            )
        total = num_chips_of(self.accelerator_type)
        if not self.hosts and total > self.num_chips:
            return (
                f"this machine has {self.num_chips} of the {total} chips in a TPU slice ({self.accelerator_type}), "
                "whose chips must all compute together, but nblaunch does not support several TPU hosts yet. If "
                "this is the only host, set TPU_WORKER_HOSTNAMES=localhost before the launch"
            )
        if not self.has_server and not self.accelerator_type:
            return (
                "the kind of TPU is unknown: there is no metadata server, no TPU_ACCELERATOR_TYPE, and no chip on "
                "the PCI bus. Set TPU_ACCELERATOR_TYPE, such as v5litepod-8, before the launch"
            )
        return None

    def completed(self) -> dict[str, str | None]:
        """Return the variables that torch_xla needs on this host; empty if a metadata server answers."""
        if self.has_server:
            return {}
        return {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": self.accelerator_type or None,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
        }


def slice_of_host(num_chips: int) -> TpuSlice:
    """Return the slice to which this host with ``num_chips`` chips belongs."""
    server = None if env.read("TPU_SKIP_MDS_QUERY") else ask_metadata_server("tpu-env")
    match = re.search(r"^ACCELERATOR_TYPE: *'?([\w-]+)", server or "", re.MULTILINE)
    named = env.read("TPU_ACCELERATOR_TYPE") or (match[1] if match else "")
    if named and "-" not in named:
        named = f"{named}-{num_chips}"  # torch_xla can't parse a type without a number
    hosts = tuple(filter(None, env.read("TPU_WORKER_HOSTNAMES").split(",")))
    if server is not None:
        endpoints = (ask_metadata_server("worker-network-endpoints") or "").split(",")
        hosts = tuple(filter(None, endpoints)) or hosts
    return TpuSlice(named or _type_of(chips()), hosts, server is not None, num_chips)


@cache
def ask_metadata_server(key: str) -> str | None:
    """Return the value of ``key`` on a Cloud VM's metadata server; None if there is none. Asks once per process."""
    request = urllib.request.Request(_METADATA + key, headers={"Metadata-Flavor": "Google"})
    # Don't use a proxy: the server has a link-local address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as reply:
            text: str = reply.read().decode()
            return text
    except (OSError, urllib.error.URLError):
        return None


def num_chips_of(accelerator_type: str) -> int:
    """Return the number of chips on the PCI buses of all hosts in a slice of this type; 0 if unknown."""
    match = re.fullmatch(r"([a-z]+\d[a-z]*)-(\d+)", accelerator_type)
    if match is None:
        return 0
    count = int(match[2])
    return max(1, count // 2) if match[1] in _CORES_COUNT else count


def _type_of(kinds: Mapping[str, int]) -> str:
    """Return the type of a single host with these chips, or an empty string if there are none or several kinds."""
    if len(kinds) != 1:
        return ""
    ((kind, count),) = kinds.items()
    if kind not in _TYPES:
        return f"v3-{2 * count}"
    name = _TYPES[kind]
    return f"{name}-{2 * count if name in _CORES_COUNT else count}"
