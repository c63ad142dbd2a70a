"""Environment variables and installed packages, as functions that scripts call.

They look packages up without importing them, and touch no device except the one that this process computes on.
"""

from __future__ import annotations

import functools
import importlib.metadata
import operator
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.torch_version import TorchVersion

from nblaunch import context, env
from nblaunch.errors import warn
from nblaunch.packages import is_installed
from nblaunch.training.options import check_choice

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

    It compares the version of the package, such as ``2.6.0``, because ``torch.__version__``, such as ``2.6.0+cu124``,
    would count as newer.
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
    """Return whether ``bitsandbytes`` is installed, in version ``min_version`` or newer."""
    return is_installed("bitsandbytes") and (
        min_version is None or compare_versions("bitsandbytes", ">=", min_version)
    )


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether NumPy ``min_version`` or newer is installed."""
    return compare_versions("numpy", ">=", min_version)


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with process groups."""
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
    """Return whether process groups of Intel GPUs are available."""
    return torch.distributed.is_backend_available("xccl")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether this process's device can compute in bf16; with ``ignore_tpu``, False for XLA devices."""
    backend = context.current().backend
    return backend.precision_problem("bf16") is None and not (ignore_tpu and backend.drives == "tpu")


def is_fp16_available() -> bool:
    """Return whether this process's device accepts ``mixed_precision="fp16"``; a CPU does, and ignores it."""
    backend = context.current().backend
    return backend.precision_problem("fp16") is None or backend.computes_in_full("fp16")


_YES = ("y", "yes", "t", "true", "on", "1")
_NO = ("n", "no", "f", "false", "off", "0")


def patch_environment(**variables: Any) -> AbstractContextManager[None]:
    """Set variables, with upper-case names, during the block; restore the old values even after an error."""
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
        to_bool: return True and False instead.

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
    """Return the text of the variable ``key``, or ``default`` if it is not set."""
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
    """Decorate a function, or tests of a class and its subclasses, to restore ``ACCELERATE_*`` variables afterwards.

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
