"""LaunchSpec: all settings of a launch in one frozen, checked value.

``notebook_launcher``, the command line and configuration files all make a ``LaunchSpec``. Each field defines in one
place which values it accepts, what it means, and where it can't be used. From the fields, nblaunch derives the options
of ``nblaunch launch``, the keys of configuration files, the arguments of ``nblaunch.launch``, and the restrictions on
sessions, detached jobs and ``engine="inline"``. Values are checked when a ``LaunchSpec`` is made, before anything
starts; ``launcher/plan.py`` checks everything that depends on the devices of this machine.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, get_args

from nblaunch import formatting
from nblaunch.env import MIXED_PRECISIONS as MIXED_PRECISIONS
from nblaunch.env import MixedPrecision as MixedPrecision
from nblaunch.setting import (
    Amounts,
    Choice,
    Converter,
    Flag,
    Folder,
    Machines,
    Names,
    Number,
    Pairs,
    Setting,
    Text,
    Whole,
)

NodeEngineName = Literal["processes", "ssh", "slurm", "ray"]
"""Engines that start ranks on several machines from this one process; see ``nblaunch/engines/``."""
EngineName = Literal["auto", "local", "inline", "elastic", NodeEngineName]
StartMethod = Literal["auto", "fork", "forkserver", "spawn"]
RendezvousBackend = Literal["static", "c10d"]
HangPolicy = Literal["report", "stop"]
BackendName = Literal["auto", "cpu", "cuda", "rocm", "xpu", "mps", "xla", "torch_tpu"]
"""Built-in device families; ``nblaunch.backends.register`` adds others."""
LaunchStrategy = Literal["auto", "spmd"]
DashboardKind = Literal["auto", "widgets", "html", "text", "none"]

START_METHODS: tuple[str, ...] = get_args(StartMethod)
RDZV_SETTINGS = (
    "timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout",
    "keep_alive_interval", "keep_alive_max_attempt", "is_host", "rank",
)  # fmt: skip
"""Valid keys of ``rdzv_conf``, with torch's names. ``rank`` is accepted because other launchers set it."""

DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
"""Default ports for the rendezvous, as in ``torchrun``."""

DEFAULT_RDZV_TIMEOUT_S = 600.0
DEFAULT_KEEP_ALIVE_INTERVAL_S = 5.0
DEFAULT_KEEP_ALIVE_MAX_ATTEMPT = 3

_ENDPOINT = re.compile(r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^\s:\[\]]*)(?::(?P<port>\d{1,5}))?")


def parse_endpoint(endpoint: str) -> tuple[str, int | None]:
    """Return the host and port from ``host``, ``host:port`` or ``[IPv6 address]:port``; a missing port is None.

    Raises:
        ValueError: the string does not have one of these forms.
    """
    match = _ENDPOINT.fullmatch(endpoint.strip())
    port = int(match["port"]) if match and match["port"] else None
    if match is None or (port is not None and not 1 <= port <= 65535):
        raise ValueError(
            f"rdzv_endpoint={endpoint!r} is not an address such as 'host:29400' or '[fd00::1]:29400'"
        )
    return match["host"].strip("[]"), port


def parse_port(use_port: str | int | None) -> int | None:
    """Return a port as a number; None for None and 0, which let the system choose.

    Raises:
        ValueError: ``use_port`` is not a whole number from 0 to 65535.
    """
    if use_port is None or use_port == "":
        return None
    is_number = isinstance(use_port, int) and not isinstance(use_port, bool)
    is_text = isinstance(use_port, str) and use_port.strip().isdecimal()
    port = int(use_port) if is_number or is_text else -1
    if not 0 <= port <= 65535:
        raise ValueError(f"use_port={use_port!r} is not a TCP port (1 to 65535; None lets the system choose)")
    return port or None


class RendezvousSettings(Pairs):
    """Further settings for the rendezvous, under torch's names."""

    def accept(self, value: Any) -> Mapping[str, Any]:
        conf = super().accept(value)
        for name, content in conf.items():
            if name not in RDZV_SETTINGS:
                raise ValueError(
                    f"has the unknown setting {name!r}; valid settings are {_listed(RDZV_SETTINGS)}"
                )
            is_number = isinstance(content, (int, float)) and not isinstance(content, bool)
            if name not in ("is_host", "rank") and not (is_number and content > 0):
                raise ValueError(f"has {name!r}: {content!r}, but it must be a positive number")
        return conf


def name_of(function: Any) -> str:
    """Return a function's name, even in a :func:`functools.partial`; for other objects, return the repr or class."""
    while isinstance(function, functools.partial):
        function = function.func
    has_repr = any("__repr__" in vars(cls) for cls in type(function).__mro__[:-1])
    return getattr(function, "__qualname__", None) or (
        repr(function) if has_repr else type(function).__qualname__
    )


def _check_call(function: Any, args: Any) -> None:
    if not callable(function):
        advice = "pass the function without calling it, as in notebook_launcher(train, (model,))"
        raise TypeError(f"function={function!r} can't be called; {advice}")
    _check_runs_when_called(function)
    if not isinstance(args, (tuple, list)):
        advice = "for one argument, write (model,) with a comma"
        if isinstance(args, Mapping):
            advice = "for keyword arguments, pass functools.partial(function, **arguments) as the function"
        raise TypeError(
            f"args must be a tuple of the function's arguments, but is {formatting.kind(args)}; {advice}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some C callables have no signature to check against
    try:
        signature.bind(*args)
    except TypeError as error:
        name = name_of(function)
        types = f"has the types ({', '.join(type(arg).__name__ for arg in args)})" if args else "is empty"
        raise TypeError(f"args do not fit {name}{signature}: {error}; args {types}") from None


def _check_runs_when_called(function: Any) -> None:
    """Raise TypeError for async and generator functions, because a call runs none of their lines."""
    name = name_of(function)
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"{name} is an async function, so a call only creates a coroutine; pass a function that runs it: "
            f"lambda *args: asyncio.run({name}(*args))"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{name} is a generator function, so a call runs none of its lines; pass a function that iterates over "
            f"it: lambda *args: list({name}(*args))"
        )


_FIELD_DEFAULT = object()
"""Stands for the field's own default."""


@dataclass(frozen=True)
class Use:
    """How a field of :class:`LaunchSpec` is used: how it is set, and where it can't be set.

    Args:
        converter: checks the values; None = checked elsewhere.
        meaning: one line, for help and configuration files.
        group: group of the option; empty = ``nblaunch launch`` has no such option.
        option: name of the option and key; empty = the name of the field.
        option_default: default of the option, if it differs from the default of the field.
        is_of_start: whether workers keep the value from their start to their end, as in a session.
        needs_workers: whether ``engine="inline"`` can't honour the setting.
        not_detached: why a detached job can't have the setting, or what to do instead; empty = it can.
        engines: the only engines that take the setting; empty = all.
        fits_engines: whether engines that start ranks on several machines can honour the setting. They can't honour
            settings for launches that join a rendezvous or run on one machine.
    """

    converter: Converter | None = None
    meaning: str = ""
    group: str = ""
    option: str = ""
    option_default: Any = _FIELD_DEFAULT
    is_of_start: bool = True
    needs_workers: bool = False
    not_detached: str = ""
    engines: tuple[str, ...] = ()
    fits_engines: bool = True


def _set(default: Any, converter: Converter | None = None, meaning: str = "", **use: Any) -> Any:
    """Return a field of :class:`LaunchSpec` with its :class:`Use`."""
    return field(default=default, metadata={"use": Use(converter, meaning, **use)})


@dataclass(frozen=True)
class LaunchSpec:
    """All settings of a launch. ``notebook_launcher`` describes the settings that are its arguments.

    Args:
        function: called as ``function(*args)`` in every worker.
        args: positional arguments; workers share the modules in them until a worker writes to one.
        num_processes: number of workers, on all machines together if an engine starts them; None = one per device (a
            GPU, or a usable core on a CPU-only machine).
        hosts: names of the machines, as ``ssh`` accepts them; for ``engine="ssh"``.
        resources_per_node: resources of each machine, such as ``{"CPU": 8, "GPU": 4}``, for ``engine="ray"``.
        runtime_env: environment for the nodes, in Ray's format, for ``engine="ray"``.
        master_port: TCP port of machine 0. None = 29500 with several machines; otherwise, the system chooses a free
            port.
        num_nodes: number of machines, such as ``2``, or a range, such as ``"1:2"``.
        rdzv_conf: further settings, with torch's names; see :data:`nblaunch.spec.RDZV_SETTINGS`.
        rdzv_timeout_s: seconds to wait for the rendezvous, or for an engine's nodes; None = ``rdzv_conf["timeout"]``,
            or 600.
        has_breakpoints: whether ``breakpoint()`` in a worker opens pdb in this process, which needs a front end that
            allows input.
        is_session: whether the workers belong to a session, to which this process sends commands.
        is_script: whether ``function`` is a script: rank 0 reads standard input, and exit code 0 means success.
        is_detached: whether the job outlives this process; it then keeps the trained weights.
        is_spmd: whether one process drives all devices (XLA).
        nodes: a ``KeptEngine``, which keeps its nodes between launches; None = a new engine.
        accelerator_arguments: further defaults for ``Accelerator()`` in workers: argument -> value, such as
            ``{"gradient_accumulation_steps": 4}``; a plugin is given as a mapping of its arguments.
        notes: sentences about the settings that the user sees when the job starts.
        variables: environment variables of workers that pass settings to other frameworks, such as Accelerate.

    Raises:
        TypeError: an argument has the wrong type, or ``args`` do not fit the function.
        ValueError: an argument has an invalid value; the message lists the valid ones.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    num_processes: int | None = _set(
        None, Whole(1), "total number of processes on all machines; default: one per device",
        group="processes",
    )  # fmt: skip
    backend: str = _set("auto", None, "device family; auto = the best one on this machine", group="devices")
    threads_per_process: int | None = _set(
        None, Whole(1), "CPU threads per process; default: cores / processes",
        group="processes", option="num_cpu_threads_per_process", needs_workers=True,
    )  # fmt: skip
    start_method: str = _set(
        "auto", Choice(START_METHODS), "how processes start; default for scripts: spawn",
        group="processes", option_default=None, needs_workers=True,
    )  # fmt: skip
    engine: str = _set("auto", Choice(get_args(EngineName)))
    hosts: Sequence[str] = _set((), Names(), engines=("ssh",))
    resources_per_node: Mapping[str, float] | None = _set(None, Amounts(), engines=("ray",))
    runtime_env: Mapping[str, Any] | None = _set(None, Pairs(), engines=("ray",))
    is_spmd: bool = _set(False)
    num_nodes: int | str = _set(
        1, Machines(), "number of machines, or min:max with c10d", group="machines", option="num_machines"
    )
    node_rank: int = _set(
        0, Whole(0), "rank of this machine, counted from 0",
        group="machines", option="machine_rank", fits_engines=False,
    )  # fmt: skip
    master_addr: str = _set(
        "127.0.0.1", Text("ADDRESS", "127.0.0.1"), "address of machine 0; default on one machine: 127.0.0.1",
        group="machines", option="main_process_ip", option_default=None, fits_engines=False,
    )  # fmt: skip
    master_port: int | None = _set(
        None, Whole(0, 65535), "port of machine 0; default on one machine: a free one",
        group="machines", option="main_process_port", fits_engines=False,
    )  # fmt: skip
    rdzv_backend: str = _set(
        "static", Choice(get_args(RendezvousBackend)), "how machines find each other",
        group="machines", fits_engines=False,
    )  # fmt: skip
    rdzv_endpoint: str = _set(
        "", Text("HOST:PORT", "host:29400"), "address of the c10d rendezvous; default: machine 0",
        group="machines", option_default=None, fits_engines=False,
    )  # fmt: skip
    rdzv_conf: Mapping[str, Any] | None = _set(
        None,
        RendezvousSettings(),
        "further settings for the rendezvous",
        group="machines",
        fits_engines=False,
    )
    rdzv_timeout_s: float | None = _set(
        None, Number(0.001), "rendezvous timeout in seconds; default: 600", group="machines"
    )
    rdzv_id: str = _set(
        "none", Text("NAME"), "name of the job, if several jobs share a rendezvous",
        group="machines", fits_engines=False,
    )  # fmt: skip
    max_restarts: int = _set(
        0, Whole(0), "how many times to restart all processes after a failure",
        group="machines", needs_workers=True,
    )  # fmt: skip
    mixed_precision: str = _set(
        "no", Choice(MIXED_PRECISIONS), "precision of the forward pass", group="training"
    )
    log_dir: str | None = _set(
        None,
        Folder(),
        "folder for logs; default: NBLAUNCH_LOG_DIR, or a temporary one",
        group="running",
        not_detached="log_dir: nblaunch.jobs() looks in a single folder; set NBLAUNCH_LOG_DIR to choose it",
    )
    log_line_prefix_template: str | None = _set(
        None, Text("TEMPLATE", "[${rank}] "), "label for printed lines, such as '[${rank}] '",
        group="running", is_of_start=False,
    )  # fmt: skip
    hang_timeout_s: float | None = _set(
        300.0, Number(0.001, is_optional=True), "seconds without progress before stacks are shown",
        group="running", needs_workers=True,
    )  # fmt: skip
    on_hang: str = _set(
        "report", Choice(get_args(HangPolicy)), "report a hang, or report it and stop the job",
        group="running", needs_workers=True,
    )  # fmt: skip
    interrupt_grace_s: float = _set(
        5.0, Number(0.0), "seconds for finally blocks to run between Ctrl-C and the kill", group="running"
    )
    return_all: bool = _set(False, Flag(), is_of_start=False)
    sync_weights: bool = _set(True, Flag(), is_of_start=False)
    sync_optimizers: bool = _set(
        False,
        Flag(),
        is_of_start=False,
        not_detached="sync_optimizers=True: save the optimizer state in the function with accelerator.save_state()",
    )
    post_mortem: bool = _set(
        False,
        Flag(),
        is_of_start=False,
        not_detached="post_mortem=True: the debugger runs in this kernel, but the job can outlive the kernel",
        fits_engines=False,
    )
    has_breakpoints: bool = False
    is_session: bool = False
    is_script: bool = False
    is_detached: bool = False
    nodes: Any = None
    accelerator_arguments: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    function_name: str = field(init=False, default="")
    accelerator_defaults: Mapping[str, Any] = field(init=False, default_factory=dict)
    """All defaults for ``Accelerator()`` in workers: argument -> value."""

    def __post_init__(self) -> None:
        _check_call(self.function, self.args)
        _accept_values(self)
        _check_fit(self)
        if self.engine == "ssh" and self.num_nodes == 1 and self.hosts:
            object.__setattr__(self, "num_nodes", len(self.hosts))
        _check_nodes(self)
        if self.is_detached:
            _check_detached(self)
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "function_name", name_of(self.function))
        object.__setattr__(
            self,
            "accelerator_defaults",
            {**self.accelerator_arguments, "mixed_precision": self.mixed_precision},
        )

    @property
    def has_debugger(self) -> bool:
        """Whether a debugger can attach to the workers."""
        return self.post_mortem or self.has_breakpoints or self.is_session

    def without_call(self) -> LaunchSpec:
        """Return a copy that has the function's name, but neither the function nor its arguments."""
        spec = copy.copy(self)
        object.__setattr__(spec, "function", None)
        object.__setattr__(spec, "args", ())
        return spec

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that pass settings to other frameworks, such as Accelerate, in workers."""
        is_mixed = self.mixed_precision != "no"
        return {
            **self.variables,
            **({"ACCELERATE_MIXED_PRECISION": self.mixed_precision} if is_mixed else {}),
        }

    @property
    def min_nodes(self) -> int:
        """The minimum number of machines."""
        return int(str(self.num_nodes).partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """The maximum number of machines."""
        return int(str(self.num_nodes).rpartition(":")[2])

    @property
    def is_elastic(self) -> bool:
        """Whether the launch joins a torch rendezvous of several machines. A launch on one machine also does so if it
        sets the address of such a rendezvous.
        """
        if self.is_on_nodes:
            return False
        has_address = self.rdzv_backend != "static" and bool(self.rdzv_endpoint)
        return self.engine == "elastic" or self.max_nodes > 1 or has_address

    @property
    def is_on_nodes(self) -> bool:
        """Whether an engine starts the ranks from this one process, possibly on several machines."""
        return self.engine in get_args(NodeEngineName)

    @property
    def rendezvous_address(self) -> tuple[str, int]:
        """Host and TCP port of the rendezvous."""
        host, port = parse_endpoint(self.rdzv_endpoint)
        default = self.master_port if self.rdzv_backend == "static" else None
        return host or self.master_addr, port or default or DEFAULT_PORTS[self.rdzv_backend]

    @property
    def rendezvous_timeout_s(self) -> float:
        """The rendezvous timeout in seconds."""
        if self.rdzv_timeout_s is not None:
            return self.rdzv_timeout_s
        conf = self.rdzv_conf or {}
        return float(conf.get("join_timeout") or conf.get("timeout") or DEFAULT_RDZV_TIMEOUT_S)


def uses() -> Iterator[tuple[Field[Any], Use]]:
    """Yield the fields of :class:`LaunchSpec` that a caller can set, each with its :class:`Use`."""
    for spec_field in fields(LaunchSpec):
        if "use" in spec_field.metadata:
            yield spec_field, spec_field.metadata["use"]


def options() -> dict[str, Setting]:
    """Return the settings that are options of ``nblaunch launch``, by field name."""
    return {
        spec_field.name: Setting(
            name=use.option or spec_field.name,
            converter=use.converter or Text("NAME"),
            default=spec_field.default if use.option_default is _FIELD_DEFAULT else use.option_default,
            meaning=use.meaning,
            group=use.group,
        )
        for spec_field, use in uses()
        if use.group
    }


def wants_spmd(strategy: Any) -> bool:
    """Return whether the Python API's argument ``strategy`` makes one process drive all devices.

    Raises:
        ValueError: it is neither ``"auto"`` nor ``"spmd"``.
    """
    if strategy not in get_args(LaunchStrategy):
        raise ValueError(
            f"strategy={strategy!r} is unknown; valid values are {_listed(get_args(LaunchStrategy))}. Strategies for "
            "models are arguments of the Accelerator: fsdp_plugin=..., deepspeed_plugin=..., strategy=plugin"
        )
    return bool(strategy == "spmd")


def check_flag(name: str, value: Any) -> None:
    """Check that an argument is a boolean.

    Raises:
        TypeError: ``value`` is not a boolean.
    """
    _accepted(name, value, Flag())


def _accepted(name: str, value: Any, converter: Converter) -> Any:
    try:
        return converter.accept(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}={value!r} {error}") from None


def _accept_values(spec: LaunchSpec) -> None:
    """Check every value, and convert alternative forms, such as ``"BF16"`` or NumPy's integers, to the usual one."""
    for spec_field, use in uses():
        value = getattr(spec, spec_field.name)
        if use.converter is not None and value is not spec_field.default:
            object.__setattr__(spec, spec_field.name, _accepted(spec_field.name, value, use.converter))


_MOST = 4096
"""A limit far above any machine's needs: a larger number is a mistake and would exhaust memory."""


def _check_fit(spec: LaunchSpec) -> None:
    for name in ("num_processes", "threads_per_process"):
        value = getattr(spec, name)
        if value is not None and value > _MOST:
            raise ValueError(f"{name}={value} must be at most {_MOST} on one machine")


def _check_nodes(spec: LaunchSpec) -> None:
    _check_engine(spec)
    if not spec.master_addr:
        raise ValueError("master_addr='' must be a host name or address, such as '127.0.0.1'")
    host, _ = parse_endpoint(spec.rdzv_endpoint)
    if spec.node_rank >= spec.max_nodes:
        raise ValueError(
            f"node_rank={spec.node_rank} must be less than num_nodes={spec.num_nodes}: nodes are numbered from 0"
        )
    if spec.rdzv_backend == "c10d" and not host and spec.is_elastic:
        raise ValueError(
            "rdzv_backend='c10d' needs rdzv_endpoint='host:port': the address of one of the machines, which "
            "must be the same in all calls"
        )
    if spec.is_on_nodes:
        return
    if spec.rdzv_backend == "static" and spec.min_nodes != spec.max_nodes:
        raise ValueError(
            f"num_nodes={spec.num_nodes!r} is a range of machines, which needs rdzv_backend='c10d'"
        )
    given = [
        name
        for name in ("rdzv_endpoint", "rdzv_conf", "rdzv_timeout_s")
        if getattr(spec, name) not in (None, "", {})
    ]
    if given and not spec.is_elastic:
        which = formatting.joined(given)
        raise ValueError(f"leave out {which} with num_nodes=1: a rendezvous is only for several machines")
    if spec.is_elastic and spec.post_mortem:
        raise ValueError("post_mortem=True works only on one machine")
    if spec.is_elastic and spec.engine not in ("auto", "elastic"):
        raise ValueError(
            f"engine={spec.engine!r} works only on one machine; leave it out for num_nodes={spec.num_nodes!r} with "
            f"rdzv_backend={spec.rdzv_backend!r}"
        )


def _check_engine(spec: LaunchSpec) -> None:
    """Reject settings that the engine can't honour, instead of ignoring them."""
    for spec_field, use in uses():
        value = getattr(spec, spec_field.name)
        if value == spec_field.default:
            continue
        if use.engines and spec.engine not in use.engines:
            raise ValueError(
                f"{spec_field.name}={value!r} is for engine={formatting.joined([*map(repr, use.engines)], 'or')}, but "
                f"this launch has engine={spec.engine!r}; choose that engine, or leave {spec_field.name} out"
            )
        if not use.fits_engines and spec.is_on_nodes:
            raise ValueError(
                f"{spec_field.name}={value!r} can't be combined with engine={spec.engine!r}, which starts the ranks "
                "of all machines from this one process; leave it out"
            )
    if spec.engine == "ssh" and len(spec.hosts) < spec.min_nodes:
        raise ValueError(
            f"engine='ssh' with num_nodes={spec.num_nodes!r} needs the names of at least "
            f"{formatting.count(spec.min_nodes, 'host')}, but hosts={list(spec.hosts)!r}"
        )
    if spec.is_on_nodes and spec.num_processes is not None and spec.num_processes % spec.max_nodes:
        raise ValueError(
            f"num_processes={spec.num_processes} is the total number of ranks on all nodes, and must be a multiple of "
            f"{spec.max_nodes}, because num_nodes={spec.num_nodes!r}"
        )


def _check_detached(spec: LaunchSpec) -> None:
    """Reject settings that a detached job can't have."""
    reasons = [
        use.not_detached for spec_field, use in uses() if use.not_detached and getattr(spec, spec_field.name)
    ]
    if spec.is_elastic:
        reasons.insert(0, _NODES_DETACHED)
    if reasons:
        raise ValueError(f"detach=True can't be combined with {reasons[0]}")


_NODES_DETACHED = "several machines; start `nblaunch launch` under nohup instead"


def _listed(valid: Sequence[str]) -> str:
    return ", ".join(repr(choice) for choice in valid)
