"""Small functions and constants that scripts for Hugging Face Accelerate import from its ``utils``.

Functions that deal with packages look them up without importing them. No function uses any device except the one on
which this process computes.
"""

from __future__ import annotations

import functools
import importlib.metadata
import operator
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from nblaunch import context, env
from nblaunch.errors import warn
from nblaunch.packages import is_installed
from nblaunch.spec import DEFAULT_PORTS
from nblaunch.training.collectives.nested import find_batch_size
from nblaunch.training.models import is_compiled_module, repeated_blocks
from nblaunch.training.options import check_choice
from nblaunch.weights import is_sharded_model

# For each feature, the oldest version that has it, for comparisons in scripts.
FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"  # a pre-release version in NVIDIA's images
FSDP2_PYTORCH_VERSION = "2.6.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"
BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"

TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]

_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text, in the largest power of 1024 that fits: ``"1.5 GB"``."""
    whole = max(int(size), 1)
    power = min((whole.bit_length() - 1) // 10, len(_UNITS) - 1)
    scaled = size / 1024**power if power else size
    return f"{round(scaled, 2)} {_UNITS[power]}"


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge ``source`` into ``destination``, recursively for nested dicts, and return ``destination``."""
    pending: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = [(source, destination)]
    while pending:
        added, merged = pending.pop()
        nested = {key: items for key, items in added.items() if isinstance(items, dict)}
        merged.update((key, item) for key, item in added.items() if key not in nested)
        pending += [(items, merged.setdefault(key, {})) for key, items in nested.items()]
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return ``obj.a.b`` for ``attr="a.b"``."""
    return functools.reduce(getattr, attr.split("."), obj)


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether ranks hold shards of the parameters of ``model``."""
    return is_sharded_model(model)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether parts of ``module``, but not the whole, are compiled."""
    parts = [part for part in module.modules() if part is not module]
    return not is_compiled_module(module) and any(map(_is_compiled, parts))


def _is_compiled(module: nn.Module) -> bool:
    return is_compiled_module(module) or getattr(module, "_compiled_call_impl", None) is not None


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of ``module`` in place, or the whole module if it has none; return ``module``.

    Modules keep their hooks and names, so they can be sharded afterwards.

    Args:
        module: a module that is not sharded yet.
        **compile_kwargs: options for :func:`torch.compile`.
    """
    for block in repeated_blocks(module) or [module]:
        block.compile(**compile_kwargs)
    return module


# --- tensors and modules ---------------------------------------------------------------------------------------------

_BYTES = {"bool": 1 / 8, "int2": 1 / 4, "int4": 1 / 2, "fp8": 1}
"""Sizes in bytes of types that are counted in bits, and of types that torch does not have."""


def dtype_byte_size(dtype: torch.dtype | str) -> float:
    """Return the size in bytes of one element of a dtype; also accept ``"int2"``, ``"int4"`` and ``"fp8"``.

    Raises:
        ValueError: ``dtype`` is not a dtype.
    """
    name = str(getattr(dtype, "value", dtype)).removeprefix("torch.")
    if name in _BYTES:
        return _BYTES[name]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"{dtype!r} is not a dtype; valid values are torch's dtypes, 'int2', 'int4' and 'fp8'"
        )
    return dtype.itemsize


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return the device, address and size of the storage of ``tensor``: equal for tensors that share memory."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the sorted names of each tied parameter; ``kwargs`` from older callers are ignored."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(several) for several in names.values() if len(several) > 1]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the number of rows in the first tensor of nested ``data``; None if there is none."""
    try:
        return find_batch_size(data)
    except (TypeError, ValueError):
        return None


# --- the process and the machine -------------------------------------------------------------------------------------


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return ``NAME=value`` lines; warn about variables that are left out because a shell would misread them."""
    lines: list[str] = []
    left_out: list[str] = []
    for name, value in current_env.items():
        is_plain = name and value and not set(" ;<>\n") & set(name + value)
        (lines if is_plain else left_out).append(f"{name}={value}\n")
    if left_out:
        shown = ", ".join(repr(line[:-1]) for line in left_out)
        warn(
            f"variables left out, because they are empty or contain a space, a newline or one of ;<>: {shown}"
        )
    return lines


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a process is listening on a TCP port on ``localhost``; if ``port`` is None, on port 29500."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", DEFAULT_PORTS["static"] if port is None else port)) == 0


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the names in ``library_names`` whose modules this process has imported."""
    return [name for name in library_names if name in sys.modules]


def check_cuda_fp8_capability() -> bool:
    """Return whether the current NVIDIA GPU computes in FP8 (compute capability 8.9 or higher); False without a GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def enable_fsdp_ram_efficient_loading() -> None:
    """Make transformers load pretrained weights on rank 0 only; other ranks get them from ``prepare``."""
    env.apply({"ACCELERATE_USE_FSDP": "True", "FSDP_CPU_RAM_EFFICIENT_LOADING": "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make transformers load pretrained weights on every rank."""
    env.apply({"FSDP_CPU_RAM_EFFICIENT_LOADING": "False"})


# --- installed packages and usable devices ---------------------------------------------------------------------------

_COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Return whether a version meets a requirement: ``compare_versions("transformers", ">=", "4.51")``.

    Args:
        library_or_version: name of an installed library, or a version from :mod:`packaging`.
        operation: ``"<"``, ``"<="``, ``"=="``, ``"!="``, ``">="`` or ``">"``.
        requirement_version: the version to compare with.

    Raises:
        ValueError: ``operation`` is not one of these.
        importlib.metadata.PackageNotFoundError: no such library is installed.
    """
    check_choice("operation", operation, tuple(_COMPARISONS))
    version = library_or_version
    if isinstance(version, str):
        version = importlib.metadata.version(version)
    return bool(_COMPARISONS[operation](TorchVersion(str(version)), requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether the version of torch meets a requirement: ``is_torch_version(">=", "2.6")``.

    The function compares the package's version (for example, ``2.6.0``), because ``torch.__version__`` (for example,
    ``2.6.0+cu124``) would count as newer.
    """
    return compare_versions("torch", operation, version)


_LIBRARIES = (
    "aim amdsmi boto3 clearml comet_ml datasets deepspeed dvclive import_timer matplotlib mlflow msamp pandas peft "
    "pynvml pytest rich sagemaker schedulefree swanlab tensorboard timm torchao torchdata torchvision tqdm trackio "
    "transformer_engine transformers triton wandb"
)
_NOT_HERE = "hpu megatron_lm mlu musa neuron npu pippy sdaa transformer_engine_mxfp8"

_PACKAGES: Mapping[str, str | None] = {
    **{name: name for name in _LIBRARIES.split()},
    "fp8": "torchao",
    "lomo": "lomo_optim",
    "torchdata_stateful_dataloader": "torchdata",
    **dict.fromkeys(_NOT_HERE.split()),
}
"""Name in ``is_..._available()`` -> the package that it needs; None: nblaunch has no support for it."""


def __getattr__(name: str) -> Callable[..., bool]:
    """Create the function ``is_..._available`` for a name in :data:`_PACKAGES` on first use."""
    subject = name.removeprefix("is_").removesuffix("_available")
    if subject not in _PACKAGES or name != f"is_{subject}_available":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = _PACKAGES[subject]

    def is_available(*args: Any, **kwargs: Any) -> bool:
        return package is not None and is_installed(package)

    is_available.__name__ = is_available.__qualname__ = name
    is_available.__doc__ = (
        "Return False, because nblaunch does not support this device or library."
        if package is None
        else f"Return whether ``{package}`` is installed."
    )
    globals()[name] = is_available
    return is_available


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether ``bitsandbytes`` is installed in version ``min_version`` or newer."""
    return is_installed("bitsandbytes") and (
        min_version is None or compare_versions("bitsandbytes", ">=", min_version)
    )


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether NumPy ``min_version`` or newer is installed."""
    return compare_versions("numpy", ">=", min_version)


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with support for process groups."""
    return torch.distributed.is_available()


def is_weights_only_available() -> bool:
    """Return whether ``torch.load`` has ``weights_only``, which is true of every supported torch version."""
    return True


def is_rocm_available() -> bool:
    """Return whether AMD GPUs can be used."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed.

    Args:
        check_is_tpu: also check whether this process computes on an XLA device, such as a TPU.
        check_is_gpu: if True, return False, because nblaunch does not use GPUs through torch_xla.
    """
    if check_is_gpu or not is_installed("torch_xla"):
        return False
    return not check_is_tpu or context.current().backend.device_type == "xla"


def is_cuda_available() -> bool:
    """Return whether there is a CUDA device."""
    return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether this process computes on Metal; every supported torch is newer than ``min_version``."""
    return torch.backends.mps.is_available() and context.current().backend.device_type == "mps"


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether there is an Intel GPU."""
    return torch.xpu.is_available()


def is_xccl_available() -> bool:
    """Return whether process groups for Intel GPUs are available."""
    return torch.distributed.is_backend_available("xccl")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether this process's device can compute in bf16; with ``ignore_tpu``, False for XLA devices."""
    backend = context.current().backend
    return backend.precision_problem("bf16") is None and not (ignore_tpu and backend.drives == "tpu")


def is_fp16_available() -> bool:
    """Return whether this process's device accepts ``mixed_precision="fp16"``; a CPU does, and ignores it."""
    backend = context.current().backend
    return backend.precision_problem("fp16") is None or backend.computes_in_full("fp16")


# --- environment variables -------------------------------------------------------------------------------------------

_YES = ("y", "yes", "t", "true", "on", "1")
_NO = ("n", "no", "f", "false", "off", "0")


def patch_environment(**variables: Any) -> AbstractContextManager[None]:
    """Set variables, with upper-case names, for the block; restore the old values even after an error."""
    return env.patched({name.upper(): str(value) for name, value in variables.items()})


@contextmanager
def clear_environment() -> Iterator[None]:
    """Run the block in an empty environment; variables that it sets are gone afterwards."""
    before = env.snapshot()
    try:
        env.apply(dict.fromkeys(before))
        yield
    finally:
        env.apply({**dict.fromkeys(env.snapshot()), **before})


def str_to_bool(value: str, to_bool: bool = False) -> int:
    """Return 1 or 0 for a word that means yes or no.

    Args:
        value: ``y``, ``yes``, ``t``, ``true``, ``on``, ``1`` or ``n``, ``no``, ``f``, ``false``, ``off``, ``0``.
        to_bool: whether to return a bool instead.

    Raises:
        ValueError: the word means neither.
    """
    word = value.lower()
    if word not in (*_YES, *_NO):
        raise ValueError(f"{value!r} is not a truth value; valid values are {', '.join((*_YES, *_NO))}")
    return word in _YES if to_bool else int(word in _YES)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the boolean value of the variable ``key``; ``default`` if unset. Raise ValueError for other words."""
    return bool(str_to_bool(env.snapshot().get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the value of the variable ``key``, or ``default`` if it is not set."""
    return env.snapshot().get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first non-negative number among the variables ``env_keys``; ``default`` if there is none."""
    variables = env.snapshot()
    numbers = (int(variables[key]) for key in env_keys if key in variables)
    return next((number for number in numbers if number >= 0), default)


def check_os_kernel() -> None:
    """Warn if the Linux kernel is older than 5.5, because processes have been seen to hang on such kernels."""
    release = platform.uname().release
    numbers = re.match(r"(\d+)\.(\d+)", release) if platform.system() == "Linux" else None
    if numbers and (int(numbers[1]), int(numbers[2])) < (5, 5):
        warn(f"the Linux kernel {release} is older than 5.5.0, the recommended minimum; the process may hang")


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or tests in a class and its subclasses, to restore ``ACCELERATE_*`` variables afterwards.

    Args:
        func_or_cls: a function, or a class whose methods named ``test...`` are decorated.
    """
    if not isinstance(func_or_cls, type):
        return _leaving_variables(func_or_cls)
    _decorate_tests(func_or_cls)
    inherited = func_or_cls.__init_subclass__

    def init_subclass(cls: type, **kwargs: Any) -> None:
        inherited(**kwargs)
        _decorate_tests(cls)

    func_or_cls.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    return func_or_cls


def _decorate_tests(cls: type) -> None:
    for name, method in list(vars(cls).items()):
        if name.startswith("test") and callable(method):
            setattr(cls, name, _leaving_variables(method))


def _leaving_variables(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _accelerate_variables()
        try:
            return function(*args, **kwargs)
        finally:
            env.apply({**dict.fromkeys(_accelerate_variables().keys() - before.keys()), **before})

    return call


def _accelerate_variables() -> dict[str, str]:
    return {name: value for name, value in env.snapshot().items() if name.startswith("ACCELERATE_")}
