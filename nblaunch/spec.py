"""LaunchSpec: everything that a launch is, in one frozen value.

``notebook_launcher``, the command line and configuration files all end in a ``LaunchSpec``. It is checked when it is
built, before anything is started; what depends on this machine's devices is checked by ``launch/preflight.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIXED_PRECISIONS = ("no", "fp16", "bf16")
ENGINES = ("auto", "local", "inline")
STRATEGIES = ("auto", "spmd")
START_METHODS = ("auto", "fork", "forkserver", "spawn")
RDZV_BACKENDS = ("static", "c10d")
ON_HANG = ("report", "stop")


@dataclass(frozen=True)
class LaunchSpec:
    """What to run, on how many processes of what, and how to behave meanwhile.

    Args:
        function: called as ``function(*args)`` in every worker.
        args: its positional arguments; modules among them are shared with the workers, not copied.
        num_processes: number of workers; None = one per device (GPUs; usable cores on a CPU-only machine).
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``: what an ``Accelerator()`` in a worker uses by default.
        backend: device family, ``"auto"`` = the best one of this machine.
        engine: how workers come to be: ``"local"`` processes, ``"inline"`` = in this process (one worker, for pdb).
        start_method: of local workers; ``"auto"`` = fork wherever it is safe.
        master_addr: address of the rendezvous store.
        master_port: its TCP port; None = one that the system chooses.
        node_rank: of this machine.
        num_nodes: number of machines.
        rdzv_backend: rendezvous of several machines.
        rdzv_endpoint: its address.
        rdzv_conf: its further settings.
        rdzv_id: name of the job among several at one rendezvous.
        max_restarts: how often all workers are started again after a failure.
        monitor_interval_s: accepted for compatibility; workers are watched by events, not by polling.
        log_line_prefix_template: label of the workers' lines, as ``"[${rank}] "``; None = ``[rank]``.
        return_all: return a list of every rank's value rather than rank 0's value.
        sync_weights: load the trained weights of modules in ``args`` back into these modules.
        interrupt_grace_s: seconds that workers have for their ``finally`` blocks before they are killed.
        strategy: ``"auto"`` = data parallel, a process per device; ``"spmd"`` = one process for all devices (XLA).
        threads_per_process: CPU threads of each worker; None = usable cores / workers on this machine.
        log_dir: folder for the jobs' logs; None = see ``NBLAUNCH_LOG_DIR``.
        hang_timeout_s: seconds without any progress of some rank after which stacks are collected; None = never.
        on_hang: ``"report"`` it, or ``"stop"`` the job as well.

    Raises:
        TypeError: an argument has a wrong type, or ``args`` do not fit the function.
        ValueError: an argument has a value outside the valid ones, which the message lists.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    num_processes: int | None = None
    mixed_precision: str = "no"
    backend: str = "auto"
    engine: str = "auto"
    start_method: str = "auto"
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    node_rank: int = 0
    num_nodes: int = 1
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_conf: Mapping[str, Any] | None = None
    rdzv_id: str = "none"
    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    log_line_prefix_template: str | None = None
    return_all: bool = False
    sync_weights: bool = True
    interrupt_grace_s: float = 5.0
    threads_per_process: int | None = None
    log_dir: str | None = None
    hang_timeout_s: float | None = 300.0
    on_hang: str = "report"
    strategy: str = "auto"
    defaults: Mapping[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixed_precision", str(self.mixed_precision).lower())
        _check_call(self.function, self.args)
        _check_choices(self)
        _check_counts(self)
        _check_durations(self)
        _check_nodes(self)
        object.__setattr__(self, "args", tuple(self.args))
        chosen = {} if self.strategy == "auto" else {"strategy": self.strategy}
        object.__setattr__(self, "defaults", {"mixed_precision": self.mixed_precision, **chosen})

    @property
    def function_name(self) -> str:
        """As people know it: ``training_function``."""
        return getattr(self.function, "__qualname__", None) or repr(self.function)


def parse_port(use_port: str | int | None) -> int | None:
    """The port that a person asked for; None or 0 = let the system choose.

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


def _check_call(function: Any, args: Any) -> None:
    if not callable(function):
        raise TypeError(
            f"function={function!r} can't be called; pass the training function itself, "
            "as in notebook_launcher(training_function, (model,))"
        )
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"args must be a tuple of the function's arguments, but is a {type(args).__name__}; "
            "for one argument write (model,) with a comma"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some C callables have no signature to check against
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        given = ", ".join(type(arg).__name__ for arg in args) or "nothing"
        raise TypeError(f"args do not fit {name}{signature}: {error}; args hold ({given})") from None


def _check_choices(spec: LaunchSpec) -> None:
    if not isinstance(spec.master_addr, str) or not spec.master_addr:
        raise TypeError(
            f"master_addr={spec.master_addr!r} must be a host name or address, such as '127.0.0.1'"
        )
    for name, valid in (
        ("mixed_precision", MIXED_PRECISIONS),
        ("engine", ENGINES),
        ("start_method", START_METHODS),
        ("strategy", STRATEGIES),
        ("rdzv_backend", RDZV_BACKENDS),
        ("on_hang", ON_HANG),
    ):
        value = getattr(spec, name)
        if value not in valid:
            raise ValueError(f"{name}={value!r} is unknown; valid are {_listed(valid)}")
    if spec.log_line_prefix_template is not None and not isinstance(spec.log_line_prefix_template, str):
        raise TypeError(
            "log_line_prefix_template must be a string such as '[${rank}] ', "
            f"but is {spec.log_line_prefix_template!r}"
        )


def _check_counts(spec: LaunchSpec) -> None:
    for name, least, optional in (
        ("num_processes", 1, True),
        ("threads_per_process", 1, True),
        ("max_restarts", 0, False),
        ("num_nodes", 1, False),
        ("node_rank", 0, False),
    ):
        value = getattr(spec, name)
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be a whole number, but is a {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def _check_durations(spec: LaunchSpec) -> None:
    for name, optional in (
        ("monitor_interval_s", False),
        ("interrupt_grace_s", False),
        ("hang_timeout_s", True),
    ):
        value = getattr(spec, name)
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}={value!r} must be a number of seconds")
        if value < 0 or (name != "interrupt_grace_s" and value == 0):
            raise ValueError(f"{name}={value!r} must be a positive number of seconds")


def _check_nodes(spec: LaunchSpec) -> None:
    if spec.node_rank >= spec.num_nodes:
        raise ValueError(f"node_rank={spec.node_rank} must be below num_nodes={spec.num_nodes}")
    if spec.num_nodes > 1:
        raise ValueError(
            f"num_nodes={spec.num_nodes}: launching on several machines is not available in this version; "
            "valid is num_nodes=1"
        )
    if spec.rdzv_endpoint or spec.rdzv_conf or spec.rdzv_backend != "static":
        raise ValueError(
            "rdzv_backend, rdzv_endpoint and rdzv_conf describe a rendezvous of several machines, which is not "
            "available in this version; leave them out (the launcher hosts the store of one machine by itself)"
        )


def _listed(valid: Sequence[str]) -> str:
    return ", ".join(repr(choice) for choice in valid)
