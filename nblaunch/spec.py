"""LaunchSpec: all settings of a launch in one frozen, checked value.

``notebook_launcher``, the command line and configuration files all make a ``LaunchSpec``. Its fields are checked when
it is constructed, before anything is started: the function and its arguments (:func:`_check_call`), choices, counts,
durations, and the nodes. Settings that depend on the devices of this machine are checked by ``launcher/plan.py``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
"""Valid keys of ``rdzv_conf``, with torch's names. ``rank`` is accepted because other launchers set it."""

DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
"""Default ports of the rendezvous, as in ``torchrun``."""

DEFAULT_RDZV_TIMEOUT_S = 600.0
DEFAULT_KEEP_ALIVE_INTERVAL_S = 5.0
DEFAULT_KEEP_ALIVE_MAX_ATTEMPT = 3

_NUM_NODES = re.compile(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?")
_ENDPOINT = re.compile(r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^\s:\[\]]*)(?::(?P<port>\d{1,5}))?")


def parse_num_nodes(num_nodes: Any) -> int | str:
    """Return a number of machines in one form: ``2``, or ``"1:2"`` for one or two.

    Raises:
        TypeError: it is neither a number, nor ``"min:max"``.
        ValueError: it is less than 1, or min is above max.
    """
    found = _NUM_NODES.fullmatch(str(num_nodes))
    if found is None:
        raise TypeError(f"num_nodes={num_nodes!r} must be a whole number, or 'min:max' as in '1:4'")
    low, high = int(found[1]), int(found[2] or found[1])
    if low < 1:
        raise ValueError(f"num_nodes={num_nodes!r} must be at least 1")
    if low > high:
        raise ValueError(f"num_nodes={num_nodes!r}: the minimum is above the maximum")
    return low if low == high else f"{low}:{high}"


def parse_endpoint(endpoint: str) -> tuple[str, int | None]:
    """Return host and port of ``host``, ``host:port`` or ``[IPv6 address]:port``; port None if there is none.

    Raises:
        ValueError: the text has another form.
    """
    found = _ENDPOINT.fullmatch(endpoint.strip())
    port = int(found["port"]) if found and found["port"] else None
    if found is None or (port is not None and not 1 <= port <= 65535):
        raise ValueError(
            f"rdzv_endpoint={endpoint!r} is not an address such as 'host:29400' or '[fd00::1]:29400'"
        )
    return found["host"].strip("[]"), port


def parse_port(use_port: str | int | None) -> int | None:
    """Return a port as a number; None and 0 mean that the system chooses, and become None.

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


def _check_rdzv_conf(rdzv_conf: Any) -> None:
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


def name_of(function: Any) -> str:
    """Return the name of a function, also within a :func:`functools.partial`; of other objects, their repr or class."""
    while isinstance(function, functools.partial):
        function = function.func
    has_repr = any("__repr__" in vars(cls) for cls in type(function).__mro__[:-1])
    return getattr(function, "__qualname__", None) or (
        repr(function) if has_repr else type(function).__qualname__
    )


def _check_call(function: Any, args: Any) -> None:
    if not callable(function):
        raise TypeError(
            f"function={function!r} can't be called; pass the training function itself, "
            "as in notebook_launcher(training_function, (model,))"
        )
    _check_runs_when_called(function)
    if not isinstance(args, (tuple, list)):
        remedy = "for one argument write (model,) with a comma"
        if isinstance(args, Mapping):
            remedy = "for keyword arguments pass functools.partial(function, **arguments) as the function"
        raise TypeError(
            f"args must be a tuple of the function's arguments, but is a {type(args).__name__}; {remedy}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some C callables have no signature to check against
    try:
        signature.bind(*args)
    except TypeError as error:
        name = name_of(function)
        types = ", ".join(type(arg).__name__ for arg in args) or "nothing"
        raise TypeError(f"args do not fit {name}{signature}: {error}; args hold ({types})") from None


def _check_runs_when_called(function: Any) -> None:
    """Raise TypeError for async and generator functions, of which a call runs no line."""
    name = name_of(function)
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"{name} is an async function, and calling it only makes a coroutine; "
            f"pass a plain function that runs it: lambda *args: asyncio.run({name}(*args))"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{name} is a generator function (it has a yield), and calling it runs none of its lines; "
            f"pass a plain function that iterates over it, such as lambda *args: list({name}(*args))"
        )


MIXED_PRECISIONS = ("no", "fp16", "bf16", "fp8")
ENGINES = ("auto", "local", "inline", "elastic")
START_METHODS = ("auto", "fork", "forkserver", "spawn")
ON_HANG = ("report", "stop")
_STRATEGIES_IN_CALLS = ("auto", "spmd")


@dataclass(frozen=True)
class LaunchSpec:
    """All settings of a launch. Those that ``notebook_launcher`` has, too, are described there.

    Args:
        function: called as ``function(*args)`` in every worker.
        args: positional arguments; modules among them are in the workers without a copy, until one writes to them.
        num_processes: number of workers; None = one per device (GPUs; usable cores on a CPU-only machine).
        master_port: TCP port of machine 0; None = chosen by the system; with several machines 29500.
        num_nodes: number of machines: ``2``, or ``"1:2"``.
        rdzv_conf: further settings with torch's names, see :data:`nblaunch.spec.RDZV_SETTINGS`.
        rdzv_timeout_s: timeout of the rendezvous in seconds; None = ``rdzv_conf["timeout"]``, or 600.
        has_breakpoints: ``breakpoint()`` in a worker opens pdb there, typed into this process: wherever a user can
            type, as in most notebooks.
        is_session: the workers are those of a session: this process sends them commands while they run.
        is_detached: the job outlives this process; trained weights are kept for those that attach to it.
        is_spmd: one process drives all devices (XLA).
        accelerator_arguments: further defaults of ``Accelerator()`` in workers, argument -> value, as
            ``{"gradient_accumulation_steps": 4}``; a plugin is a mapping of its own arguments.

    Raises:
        TypeError: an argument has a wrong type, or ``args`` do not fit the function.
        ValueError: an argument has an invalid value; the message lists the valid ones.
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
    num_nodes: int | str = 1
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_conf: Mapping[str, Any] | None = None
    rdzv_id: str = "none"
    rdzv_timeout_s: float | None = None
    max_restarts: int = 0
    log_line_prefix_template: str | None = None
    return_all: bool = False
    sync_weights: bool = True
    sync_optimizers: bool = False
    interrupt_grace_s: float = 5.0
    threads_per_process: int | None = None
    log_dir: str | None = None
    hang_timeout_s: float | None = 300.0
    on_hang: str = "report"
    post_mortem: bool = False
    has_breakpoints: bool = False
    is_session: bool = False
    is_detached: bool = False
    is_spmd: bool = False
    accelerator_arguments: Mapping[str, Any] = field(default_factory=dict)
    function_name: str = field(init=False, default="")
    accelerator_defaults: Mapping[str, Any] = field(init=False, default_factory=dict)
    """All defaults of ``Accelerator()`` in workers, argument -> value."""

    def __post_init__(self) -> None:
        _normalize(self)
        _check_call(self.function, self.args)
        _check_choices(self)
        _check_counts(self)
        _check_durations(self)
        for name in ("return_all", "sync_weights", "sync_optimizers", "post_mortem"):
            check_flag(name, getattr(self, name))
        _check_nodes(self)
        if self.is_detached:
            for name, why in _BESIDE_DETACHED.items():
                if getattr(self, name):
                    raise ValueError(f"detach=True can't be combined with {why}")
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "function_name", name_of(self.function))
        object.__setattr__(
            self,
            "accelerator_defaults",
            {**self.accelerator_arguments, "mixed_precision": self.mixed_precision},
        )

    @property
    def has_debugger(self) -> bool:
        """Whether a debugger can look into the workers."""
        return self.post_mortem or self.has_breakpoints or self.is_session

    def without_call(self) -> LaunchSpec:
        """Return a copy that has of the function its name alone: the job has ended, or gets the call apart."""
        spec = copy.copy(self)
        object.__setattr__(spec, "function", None)
        object.__setattr__(spec, "args", ())
        return spec

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that pass settings to other frameworks in workers, as to Accelerate."""
        is_mixed = self.mixed_precision != "no"
        return {"ACCELERATE_MIXED_PRECISION": self.mixed_precision} if is_mixed else {}

    @property
    def min_nodes(self) -> int:
        """The smallest number of machines."""
        return int(str(self.num_nodes).partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """The largest number of machines."""
        return int(str(self.num_nodes).rpartition(":")[2])

    @property
    def is_elastic(self) -> bool:
        """Whether the launch uses torch's rendezvous of several machines."""
        return self.engine == "elastic" or self.max_nodes > 1 or self.rdzv_backend != "static"

    @property
    def rendezvous_address(self) -> tuple[str, int]:
        """Host and TCP port of the rendezvous."""
        host, port = parse_endpoint(self.rdzv_endpoint)
        default = self.master_port if self.rdzv_backend == "static" else None
        return host or self.master_addr, port or default or DEFAULT_PORTS[self.rdzv_backend]

    @property
    def rendezvous_timeout_s(self) -> float:
        """The timeout of the rendezvous in seconds."""
        if self.rdzv_timeout_s is not None:
            return self.rdzv_timeout_s
        conf = self.rdzv_conf or {}
        return float(conf.get("join_timeout") or conf.get("timeout") or DEFAULT_RDZV_TIMEOUT_S)


def wants_spmd(strategy: Any) -> bool:
    """Return whether one process drives all devices, by the ``strategy`` argument of the Python API.

    Strategies for *models* are set by plugins of the Accelerator, or by the setting ``strategy``
    (``config/settings.py``), which has both kinds.

    Raises:
        ValueError: it is neither ``"auto"`` nor ``"spmd"``.
    """
    if strategy not in _STRATEGIES_IN_CALLS:
        raise ValueError(
            f"strategy={strategy!r} is unknown; valid are {_listed(_STRATEGIES_IN_CALLS)}. Strategies for "
            "models are arguments of the Accelerator: fsdp_plugin=..., deepspeed_plugin=..., strategy=plugin"
        )
    return bool(strategy == "spmd")


def check_flag(name: str, value: Any) -> None:
    """Check that an argument is a boolean: ``"no"`` would count as true.

    Raises:
        TypeError: it is not.
    """
    if isinstance(value, str) or str(value) not in ("True", "False", "1", "0"):  # also numpy's
        raise TypeError(f"{name}={value!r} must be True or False, but is a {type(value).__name__}")


def _normalize(spec: LaunchSpec) -> None:
    """Convert values with several forms to one: ``"BF16"``, NumPy's integers."""
    precision = str(spec.mixed_precision).lower()
    if precision in MIXED_PRECISIONS:
        object.__setattr__(spec, "mixed_precision", precision)
    for name in _LEAST:
        value = getattr(spec, name)
        if not isinstance(value, int):
            with suppress(TypeError):
                object.__setattr__(spec, name, operator.index(value))
    object.__setattr__(spec, "num_nodes", parse_num_nodes(spec.num_nodes))


def _check_choices(spec: LaunchSpec) -> None:
    if not isinstance(spec.master_addr, str) or not spec.master_addr:
        raise TypeError(
            f"master_addr={spec.master_addr!r} must be a host name or address, such as '127.0.0.1'"
        )
    for name, valid in (
        ("mixed_precision", MIXED_PRECISIONS),
        ("engine", ENGINES),
        ("start_method", START_METHODS),
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
    if spec.log_dir is not None and not isinstance(spec.log_dir, (str, os.PathLike)):
        raise TypeError(f"log_dir={spec.log_dir!r} must be the path of a folder")


_LEAST = {"num_processes": 1, "threads_per_process": 1, "max_restarts": 0, "node_rank": 0}
_MOST = {"num_processes": 4096, "threads_per_process": 4096}
"""Limits far above any machine: larger values are mistakes, and starting so many would use up its memory."""


def _check_counts(spec: LaunchSpec) -> None:
    for name, least in _LEAST.items():
        value = getattr(spec, name)
        if value is None and name in _MOST:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be a whole number, but is a {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
        if name in _MOST and value > _MOST[name]:
            raise ValueError(f"{name}={value} must be at most {_MOST[name]} on one machine")


def _check_durations(spec: LaunchSpec) -> None:
    for name in ("interrupt_grace_s", "hang_timeout_s", "rdzv_timeout_s"):
        value = getattr(spec, name)
        if value is None and name != "interrupt_grace_s":
            continue
        setting = f"{name}={value!r}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{setting} must be a number of seconds")
        if not (value > 0 or (value == 0 and name == "interrupt_grace_s")):  # also refuses NaN
            raise ValueError(f"{setting} must be a positive number of seconds")


def _check_nodes(spec: LaunchSpec) -> None:
    if not isinstance(spec.rdzv_endpoint, str):
        raise TypeError(f"rdzv_endpoint={spec.rdzv_endpoint!r} must be text such as 'host:29400'")
    host, _ = parse_endpoint(spec.rdzv_endpoint)
    if spec.node_rank >= spec.max_nodes:
        raise ValueError(
            f"node_rank={spec.node_rank} must be below num_nodes={spec.num_nodes}: nodes count from 0"
        )
    if spec.rdzv_backend == "c10d" and not host:
        raise ValueError(
            "rdzv_backend='c10d' needs rdzv_endpoint='host:port', the same on every machine: the address of one of them"
        )
    if spec.rdzv_backend == "static" and spec.min_nodes != spec.max_nodes:
        raise ValueError(
            f"num_nodes={spec.num_nodes!r} leaves the number of machines open, which needs rdzv_backend='c10d'"
        )
    if not spec.is_elastic and (spec.rdzv_endpoint or spec.rdzv_conf or spec.rdzv_timeout_s is not None):
        raise ValueError(
            "rdzv_endpoint, rdzv_conf and rdzv_timeout_s describe how several machines meet, and num_nodes=1 is one; "
            "leave them out (the launcher hosts the store of one machine by itself)"
        )
    if spec.is_elastic and spec.post_mortem:
        raise ValueError("post_mortem=True: a debugger can look into the workers of one machine only")
    if spec.is_elastic and spec.engine not in ("auto", "elastic"):
        raise ValueError(
            f"engine={spec.engine!r} is for one machine; leave it out for num_nodes={spec.num_nodes!r} with "
            f"rdzv_backend={spec.rdzv_backend!r}"
        )
    _check_rdzv_conf(spec.rdzv_conf)


_BESIDE_DETACHED = {
    "is_elastic": (
        "several machines: their launchers would have to stay; start it by `nblaunch launch` under nohup"
    ),
    "post_mortem": "post_mortem=True: the debugger is in this kernel, and the job is to outlive it",
    "sync_optimizers": (
        "sync_optimizers=True: save their state inside the function, by accelerator.save_state()"
    ),
    "log_dir": "log_dir: nblaunch.jobs() looks for jobs in one folder; NBLAUNCH_LOG_DIR chooses it",
}
"""What a detached job can't have, and why or what to do."""


def _listed(valid: Sequence[str]) -> str:
    return ", ".join(repr(choice) for choice in valid)
