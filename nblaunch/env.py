"""The only module that touches ``os.environ``.

``TABLE`` lists every variable that nblaunch reads: settings of a person or a cluster, never messages from one part of
nblaunch to another (those travel typed, in the payload of a launch).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variable:
    """One row of the table: ``kind`` turns the text into a value."""

    name: str
    kind: Callable[[str], Any]
    default: Any
    meaning: str


def as_flag(text: str) -> bool:
    """A truth value in the words that people use; ValueError for any other."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "y", "t", "on"):
        return True
    if word in ("", "0", "false", "no", "n", "f", "off", "none"):
        return False
    raise ValueError(text)


def as_count(text: str) -> int:
    """A whole number from 1 on; ValueError for any other text."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def as_first_count(text: str) -> int:
    """The number for the outermost level, of OpenMP's list of numbers by level of nesting: 4 of ``4,2``."""
    return int(text.partition(",")[0])


TABLE = {
    row.name: row
    for row in (
        Variable("NBLAUNCH_LOG_DIR", str, "", "folder for jobs' logs; default: nblaunch-<uid> in the temporary folder"),
        Variable("NBLAUNCH_NUM_PROCESSES", as_count, 0, "workers where a launch does not say; default: one per device"),
        Variable("NBLAUNCH_KEEP_JOBS", int, 20, "how many jobs' logs to keep"),
        Variable("NBLAUNCH_LOG_LIMIT_MB", as_count, 256, "MB that the log of a rank may take; the middle is dropped"),
        Variable("NBLAUNCH_CONFIG_FILE", str, "", "settings of nblaunch launch; default: one in the platform's folder"),
        Variable("TERM", str, "", "kind of terminal; questions are asked line by line on a dumb one"),
        Variable("XDG_CONFIG_HOME", str, "", "folder of configuration files; default: ~/.config"),
        Variable("APPDATA", str, "", "folder of configuration files on Windows"),
        Variable("OMP_NUM_THREADS", as_first_count, 0, "CPU threads of a worker; default: usable cores / workers"),
        Variable("CUDA_VISIBLE_DEVICES", str, None, "GPUs that may be used, as CUDA reads it"),
        Variable("PYTORCH_NVML_BASED_CUDA_CHECK", str, None, "how torch counts GPUs; set to 1 where it is not set"),
        Variable("NCCL_P2P_DISABLE", str, None, "whether GPUs talk through memory; set for cards that must"),
        Variable("PJRT_DEVICE", str, None, "what torch_xla computes on: TPU or CPU; default: TPU if there is one"),
        Variable("TPU_ACCELERATOR_TYPE", str, "", "kind of TPU, as the host's image says: v5litepod-8"),
        Variable("TPU_WORKER_HOSTNAMES", str, "", "hosts of the TPU slice that this machine belongs to"),
        Variable("NBLAUNCH_XLA_CACHE", str, "", "folder for compiled graphs; default on TPU: ~/.cache/nblaunch/xla"),
        Variable("ACCELERATE_MIXED_PRECISION", str, "", "mixed precision where neither script nor launcher sets it"),
        Variable("ACCELERATE_USE_CPU", as_flag, False, "compute on the CPU, in processes that nblaunch did not launch"),
        Variable("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", int, 1, "micro-steps per step where the script sets none"),
        Variable("ACCELERATE_DEBUG_MODE", as_flag, False, "compare the shapes of collectives over ranks"),
        Variable("ACCELERATE_LOG_LEVEL", str, "", "level of loggers from get_logger where the script sets none"),
        Variable("ACCELERATE_DYNAMO_BACKEND", str, "no", "compile models with this backend of torch.compile"),
        Variable("ACCELERATE_DYNAMO_MODE", str, "", "mode of torch.compile"),
        Variable("ACCELERATE_DYNAMO_USE_FULLGRAPH", as_flag, False, "compile models in one piece"),
        Variable("ACCELERATE_DYNAMO_USE_DYNAMIC", as_flag, None, "compile for changing shapes"),
        Variable("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", as_flag, False, "compile repeated blocks only"),
    )
}  # fmt: skip


def read(name: str) -> Any:
    """The value of a variable of the table, converted; its default where it is unset or empty.

    Raises:
        KeyError: the variable is not in the table.
        ValueError: its text can't be converted; names the variable and the text.
    """
    row = TABLE[name]
    text = os.environ.get(name)
    if text is None or (text == "" and row.default is not None):
        return row.default
    try:
        return row.kind(text)
    except ValueError:
        kind = getattr(row.kind, "__name__", str(row.kind)).removeprefix("as_")
        raise ValueError(f"environment variable {name}={text!r} is not a valid {kind}") from None


def snapshot() -> dict[str, str]:
    """A copy of the whole environment, for :class:`nblaunch.topology.Topology` and for fresh interpreters."""
    return dict(os.environ)


def apply(changes: Mapping[str, str | None]) -> None:
    """Set variables for the rest of this process; None removes one."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def patched(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for a while and put back exactly what was there, also after an error."""
    before = {name: os.environ.get(name) for name in changes}
    apply(changes)
    try:
        yield
    finally:
        apply(before)
