"""What the driver's command line tool, nvidia-smi, tells of this host's GPUs, for hosts without nvidia-ml-py.

Every question starts a process, which takes from a tenth of a second to seconds: asked rarely.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from nblaunch.backends.cuda_visible import Gpu
from nblaunch.backends.meter import DeviceMeter, DeviceReading

_TIMEOUT_S = 30.0
_WSL_PROGRAM = "/usr/lib/wsl/lib/nvidia-smi"  # where the Windows driver puts it, outside of PATH
_MIB = 1 << 20
_GPU_LINE = re.compile(r"^GPU \d+: (?P<name>.*) \(UUID: (?P<uuid>GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"^\s+MIG .*\(UUID: (?P<uuid>MIG-[^)]+)\)")


def program() -> str | None:
    """The path of nvidia-smi; None where there is none."""
    return shutil.which("nvidia-smi") or (_WSL_PROGRAM if os.path.exists(_WSL_PROGRAM) else None)


def list_gpus(program: str) -> tuple[Gpu, ...]:
    """The GPUs of this host in the driver's order; none where the driver is in a bad state."""
    return parse_list(_ask(program, "-L"))


def parse_list(listing: str) -> tuple[Gpu, ...]:
    """GPUs in the output of ``nvidia-smi -L``."""
    gpus: list[Gpu] = []
    for line in listing.splitlines():
        if gpu := _GPU_LINE.match(line):
            gpus.append(Gpu(gpu["uuid"], name=gpu["name"]))
        elif gpus and (mig := _MIG_LINE.match(line)):
            last = gpus[-1]
            gpus[-1] = Gpu(last.uuid, (*last.mig_uuids, mig["uuid"]), last.name)
    return tuple(gpus)


def driver_version(program: str) -> str | None:
    """As ``"550.54.15"``; None where it is not told."""
    answer = _ask(program, "--query-gpu=driver_version", "--format=csv,noheader").split()
    return answer[0] if answer else None


def descriptions(program: str) -> list[str]:
    """Name, driver and memory of each GPU of this host, as ``"Tesla T4, 550.54.15, 15360 MiB"``."""
    return _ask(program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader").splitlines()


class SmiMeter(DeviceMeter):
    """Reads whole GPUs through nvidia-smi, a process for each reading. It does not tell of MIG instances.

    Args:
        uuids: of what is read, in the order of local ranks.
        program: path of nvidia-smi.
    """

    is_cheap = False

    def __init__(self, uuids: Sequence[str], program: str) -> None:
        self._names = {uuid: f"GPU {index}" for index, uuid in enumerate(uuids)}
        self._program = program

    def read(self) -> tuple[DeviceReading, ...]:
        options = "--format=csv,noheader,nounits"
        gpus = _ask(self._program, "--query-gpu=uuid,memory.used,memory.total,utilization.gpu", options)
        apps = _ask(self._program, "--query-compute-apps=gpu_uuid,pid,used_gpu_memory", options)
        by_process: dict[str, dict[int, int]] = {}
        for uuid, *numbers in _fields(apps, 3):
            pid, used = map(_number, numbers)
            if pid is not None:
                by_process.setdefault(uuid, {})[pid] = (used or 0) * _MIB
        found = {uuid: tuple(map(_number, numbers)) for uuid, *numbers in _fields(gpus, 4)}
        readings = []
        for uuid, name in self._names.items():
            used, total, percent = found.get(uuid, (None, None, None))
            if used is not None and total is not None:
                share = None if percent is None else percent / 100
                readings.append(
                    DeviceReading(name, used * _MIB, total * _MIB, share, by_process.get(uuid, {}))
                )
        return tuple(readings)


def _ask(program: str, *arguments: str) -> str:
    """What nvidia-smi prints; empty where it fails: a driver in a bad state is as good as no GPU."""
    try:
        answer = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def _fields(table: str, count: int) -> list[list[str]]:
    rows = [[field.strip() for field in line.split(",")] for line in table.splitlines()]
    return [row for row in rows if len(row) == count]


def _number(text: str) -> int | None:
    """None for ``[N/A]`` and the like."""
    return int(text) if text.isdigit() else None
