"""The option classes for an ``Accelerator``, with the same names and fields as in Hugging Face Accelerate.

They are plain data: they touch no device, and only ``TorchDynamoPlugin`` reads the environment. Constructors check the
fields, and an ``Accelerator`` checks them again, because scripts may assign fields and subclasses may add some. A field
that is missing here is not supported yet, and Python rejects it with an error that names it.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from nblaunch import context, env, formatting
from nblaunch.errors import warn
from nblaunch.packages import is_installed

RNG_TYPES = ("generator", "torch", "cuda", "xpu", "xla")


class Word(str, enum.Enum):
    """Base class for enumerations whose members are strings and print as strings."""

    def __str__(self) -> str:
        return self.value


class PrecisionType(Word):
    """Names of precisions. The ``Accelerator`` rejects those that the device does not support."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(Word):
    """Names of random number generators, including generators of unsupported devices."""

    GENERATOR = "generator"
    TORCH = "torch"
    CUDA = "cuda"
    XLA = "xla"
    XPU = "xpu"
    NPU = "npu"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    HPU = "hpu"
    NEURON = "neuron"


@dataclass
class KwargsHandler:
    """Base class for the handlers in ``Accelerator(kwargs_handlers=[...])``."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ValueError or TypeError for an invalid field."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != _default_of(field)
        }


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


class DDPCommunicationHookType(Word):
    """Names of DDP's communication hooks. POWER_SGD approximates gradients; BATCHED_POWER_SGD is not supported."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments for :class:`torch.nn.parallel.DistributedDataParallel` and its communication hook.

    torch's documentation describes the arguments that are missing below.

    Args:
        bucket_cap_mb: size of a gradient bucket in MiB; one bucket is reduced while the next is computed.
        find_unused_parameters: set it to True if some forward passes don't use all parameters.
        check_reduction: accepted without effect, as in torch.
        static_graph: promise that every step uses the same parameters in the same order.
        comm_hook: how ranks send gradients: in full, in half precision, or as a low-rank approximation.
        comm_wrapper: convert the hook's messages to this format: FP16 or BF16.
        comm_state_option: arguments for torch's ``PowerSGDState``, for POWER_SGD.

    Raises:
        ValueError: the hook is unknown or does not work in torch, or options contradict each other.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        names = tuple(kind.value for kind in DDPCommunicationHookType)
        check_choice("comm_hook", str(self.comm_hook), names)
        check_choice("comm_wrapper", str(self.comm_wrapper), ("no", "fp16", "bf16"))
        if str(self.comm_hook) == DDPCommunicationHookType.BATCHED_POWER_SGD.value:
            # In torch 1.11 to 2.13, this hook passes one matrix to a function that asserts that it gets a stack of
            # matrices.
            raise ValueError(
                "comm_hook='batched_power_sgd' can't be used: torch's batched_powerSGD_hook stops with an "
                "AssertionError at the first step that it approximates, after PowerSGDState's start_powerSGD_iter. "
                "Use DDPCommunicationHookType.POWER_SGD, which takes the same comm_state_option"
            )
        if self.comm_state_option and str(self.comm_hook) != DDPCommunicationHookType.POWER_SGD.value:
            raise ValueError(
                f"comm_state_option={self.comm_state_option!r} is only for POWER_SGD, but comm_hook is "
                f"{str(self.comm_hook)!r}"
            )

    def to_kwargs(self) -> dict[str, Any]:
        """Return the DDP constructor's arguments that differ from torch's defaults, except the hook's."""
        left_out = ("check_reduction", "comm_hook", "comm_wrapper", "comm_state_option")
        return {name: value for name, value in super().to_kwargs().items() if name not in left_out}


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments for :class:`torch.amp.GradScaler`, used with ``mixed_precision="fp16"``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments for :class:`torch.autocast`. ``cache_enabled=None`` means torch's default."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Settings for joining the process group.

    Args:
        backend: torch's backend, such as ``"gloo"``; None: chosen for the device.
        init_method: rendezvous address for ``torch.distributed.init_process_group``; None: the launcher's.
        timeout: timeout of collectives; None: torch's default.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Settings for ``accelerator.profile``, which determine what it records.

    Args:
        activities: ``"cpu"``, ``"cuda"``, ``"xpu"``, ``"mtia"``; None: all that are available.
        schedule_option: arguments for :func:`torch.profiler.schedule` (``wait``, ``warmup``, ``active``, ``repeat``,
            ``skip_first``); None: record everything.
        on_trace_ready: called with the profiler when a recording is complete.
        record_shapes: also record the shapes of inputs.
        profile_memory: also record allocations.
        with_stack: also record source lines.
        with_flops: also estimate floating point operations.
        with_modules: also record the module hierarchy.
        output_trace_dir: folder where each rank writes ``profile_<rank>.json`` for chrome://tracing.

    Raises:
        ValueError: an activity is unknown.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def check(self) -> None:
        for activity in self.activities or ():
            check_choice("activity", activity, ("cpu", "cuda", "xpu", "mtia"))

    def build(self) -> Any:
        """Return the :class:`torch.profiler.profile` that these settings describe."""
        from torch import profiler

        kinds = None
        if self.activities is not None:
            kinds = [getattr(profiler.ProfilerActivity, activity.upper()) for activity in self.activities]
        return profiler.profile(
            activities=kinds,
            schedule=profiler.schedule(**self.schedule_option) if self.schedule_option else None,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


class DynamoBackend(str, enum.Enum):
    """Common backends for :func:`torch.compile`. Pass any other backend by name."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    IPEX = "IPEX"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Settings for compiling models in ``prepare``, with the arguments of :func:`torch.compile`.

    Args:
        backend: name of torch's compiler, in upper or lower case; ``"no"``: don't compile. For this field and those
            below, None means the launch's setting, or the variable ``ACCELERATE_DYNAMO_BACKEND``, ``..._MODE`` and so
            on, else ``"no"``.
        mode: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``...
        fullgraph: raise an error if a model can't be compiled in one piece.
        dynamic: whether shapes may change; None: torch detects whether they do.
        options: options for the compiler.
        disable: don't compile, for debugging.
        use_regional_compilation: compile a model's repeated blocks, each kind once, instead of the whole model.

    Raises:
        ValueError: torch has no such compiler. The ``Accelerator`` raises this error when it gets the plugin.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        # Don't check here: checking imports torch's list of compilers, which many plugins never need.
        context.complete_from_launch(self, "dynamo_plugin")
        if self.backend is None:
            self.backend = env.read("ACCELERATE_DYNAMO_BACKEND") or DynamoBackend.NO
        if self.mode is None:
            self.mode = env.read("ACCELERATE_DYNAMO_MODE") or None
        if self.fullgraph is None:
            self.fullgraph = env.read("ACCELERATE_DYNAMO_USE_FULLGRAPH")
        if self.dynamic is None:
            self.dynamic = env.read("ACCELERATE_DYNAMO_USE_DYNAMIC")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = env.read("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults without environment variables."""
        plain = {"backend": "no", "disable": False, "fullgraph": False, "use_regional_compilation": False}
        fields = self.to_dict() | {"backend": self._name}
        return {name: value for name, value in fields.items() if value != plain.get(name)}

    def check(self) -> None:
        # Some compilers, such as TorchTPU's "tpu", register with torch only when the program imports their library.
        if self._name.upper() in DynamoBackend.__members__ or self._name == "tpu":
            return
        from torch import compiler

        if self._name not in compiler.list_backends(exclude_tags=()):
            usual = ", ".join(sorted({"eager", "aot_eager", *compiler.list_backends()}))
            raise ValueError(
                f"dynamo backend {str(self.backend)!r} must be no, or one of torch's compilers: {usual}"
            )

    @property
    def is_on(self) -> bool:
        """Whether models are compiled."""
        return self._name != "no"

    @property
    def _name(self) -> str:
        return str(getattr(self.backend, "value", self.backend) or "no").lower()

    def to_compile_kwargs(self) -> dict[str, Any]:
        """Return the arguments for :func:`torch.compile` that differ from torch's defaults."""
        kwargs = self.to_kwargs() | {"backend": self._name}
        kwargs.pop("use_regional_compilation", None)
        return kwargs


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """All settings for gradient accumulation.

    Args:
        num_steps: number of micro-steps per optimizer step, at least 1.
        adjust_scheduler: silence torch's warning about the order of scheduler and optimizer steps inside a window.
        sync_with_dataloader: step at the last batch of a loader, even if the window is not full.
        sync_each_batch: average gradients over ranks in every micro-step. Sharded models then need less memory, but
            more communication.
        divide_by_actual: how to divide the gradients of a window that was cut short by the end of a loader. True:
            divide by the actual number of micro-steps, which gives their mean; the division happens in
            ``optimizer.step`` or before clipping. False: divide by ``num_steps``, as in all other windows. None: like
            False, but warn once.

    Raises:
        ValueError: ``num_steps`` is less than 1.
        TypeError: ``num_steps`` is not a whole number.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    divide_by_actual: bool | None = None

    def check(self) -> None:
        if isinstance(self.num_steps, bool) or not hasattr(self.num_steps, "__index__"):
            raise TypeError(f"num_steps={self.num_steps!r} must be a whole number of micro-steps")
        self.num_steps = operator.index(self.num_steps)
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps} must be at least 1 micro-step")


@dataclass
class DataLoaderConfiguration(KwargsHandler):
    """Settings for prepared loaders, which determine how the data is shared among ranks.

    Args:
        split_batches: False: each rank gets whole batches, and the global batch has ``batch_size`` x ranks samples.
            True: ``batch_size`` is the size of the global batch, which is divided among the ranks.
        dispatch_batches: True: rank 0 reads for all ranks and sends each of them its part. Use it for data that only
            one process can read, or whose order differs between processes. False: each rank reads its own share. None:
            True for iterable datasets whose batches go to the device, False otherwise.
        even_batches: pad the end of the epoch with samples from its start, so that all ranks get the same
            number of batches of equal size; ``gather_for_metrics`` drops the added samples. No samples are
            added if a stream divides itself into one part per rank, as streams from ``datasets`` do with
            ``dispatch_batches=False``.
        use_seedable_sampler: make the order depend only on the seed and the epoch, not on the global random state.
        data_seed: the seed for ``use_seedable_sampler``; None: rank 0's ``torch.initial_seed()``, which ``set_seed``
            sets.
        non_blocking: copy batches to the device asynchronously; useful with ``pin_memory=True``.
        use_stateful_dataloader: read with torchdata's ``StatefulDataLoader``, whose ``state_dict`` contains its
            position in the epoch.
        data_is_sharded: True: each rank's loader already reads its own part of the data, such as its own files;
            ``prepare`` neither divides nor evens out these parts. False: ``prepare`` divides the data. None: detect
            streams that ``datasets.distributed.split_dataset_by_node`` has divided, and reject streams that have this
            process's rank and the number of processes as attributes.

    Raises:
        ValueError: ``data_seed`` is negative, or both ``data_is_sharded`` and ``dispatch_batches`` are set.
        ImportError: ``use_stateful_dataloader`` is set, but torchdata is not installed.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    data_is_sharded: bool | None = None

    def check(self) -> None:
        if self.data_is_sharded and self.dispatch_batches:
            raise ValueError(
                "dispatch_batches=True makes rank 0 read for all ranks, but data_is_sharded=True gives each rank "
                "its own data. Set only one of them"
            )
        if self.data_seed is not None and self.data_seed < 0:
            raise ValueError(f"data_seed={self.data_seed} is negative")
        if self.use_stateful_dataloader and not is_installed("torchdata"):
            raise ImportError(
                "DataLoaderConfiguration(use_stateful_dataloader=True) requires torchdata, which is not "
                "installed: pip install torchdata"
            )


def not_nblaunchs(value: Any, cls: type) -> str:
    """Return the end of a message about a value that is not an instance of nblaunch's ``cls``."""
    if type(value).__name__ != cls.__name__:
        return f"is {formatting.kind(value)}; pass an nblaunch.{cls.__name__}"
    given = f"a {type(value).__module__}.{cls.__name__}"
    return f"is {given}; pass an nblaunch.{cls.__name__}, which has the same fields"


def check_choice(name: str, value: Any, valid: tuple[str, ...]) -> None:
    """Raise ValueError if ``value`` is not in ``valid``; the message names both."""
    if value not in valid:
        raise ValueError(f"{name}={value!r} is unknown; valid values are {', '.join(map(repr, valid))}")


@dataclass
class ProjectConfiguration:
    """The folders of a training run, for checkpoints and logs.

    Args:
        project_dir: the run's folder; None: no folder.
        logging_dir: folder for trackers that write files; None: ``project_dir``.
        automatic_checkpoint_naming: ``save_state`` writes ``<project_dir>/checkpoints/checkpoint_<iteration>``.
        total_limit: number of automatically named checkpoints to keep, at least 1; None: all. ``save_state`` removes
            the oldest checkpoint after the new one is complete.
        iteration: number of the next checkpoint. ``save_state`` increments it, and ``load_state`` sets it to the number
            after the loaded checkpoint's.
        save_on_each_node: ``save`` and ``save_model`` write on every machine, instead of only on the first.

    Raises:
        ValueError: ``total_limit`` is less than 1, or ``iteration`` is negative. ``save_state`` and ``load_state``
            raise the same error if automatic naming is used without a ``project_dir``.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(
                f"total_limit={self.total_limit} would keep no checkpoint; use at least 1, or None"
            )
        if self.iteration < 0:
            raise ValueError(f"iteration={self.iteration} is negative")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set ``project_dir``, and ``logging_dir`` if it is not set."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    @property
    def checkpoints(self) -> Path:
        """The folder for automatically named checkpoints.

        Raises:
            ValueError: there is no ``project_dir``.
        """
        if self.project_dir is None:
            raise ValueError(
                "automatic_checkpoint_naming needs a project_dir: Accelerator(project_dir=...) or "
                "ProjectConfiguration(project_dir=...)"
            )
        return Path(self.project_dir) / "checkpoints"


def project_of(
    project_dir: str | os.PathLike[str] | None, config: ProjectConfiguration | None
) -> ProjectConfiguration:
    """Return the project configuration from two arguments. If they differ, ``config`` takes precedence."""
    config = config or ProjectConfiguration()
    if project_dir is None:
        return config
    folder = os.fspath(project_dir)
    if config.project_dir is None:
        config.set_directories(folder)
    elif os.fspath(config.project_dir) != folder:
        warn(
            f"project_dir={folder!r} has no effect, because project_config already has "
            f"project_dir={config.project_dir!r}, perhaps from an earlier Accelerator. Create a project_config for "
            "each training run, and set project_dir there"
        )
    return config
