"""Library settings that cells have changed, for workers that are not copies of the kernel.

    kernel   KernelSettings.of_this_process(): reads the settings of every loaded library in the table
    worker   restore(): writes the settings that differ, once the worker has imported the library

For this, nblaunch imports no library in the kernel or in a worker, because the function might not use it. The table has
a row for each setting. Other modules handle warnings and loggers (``message_settings.py``), attributes of modules that
cells have changed (``cell_assignments.py``), and registrations (``registrations.py``).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from nblaunch.user_code import is_user_function
from nblaunch.worker.inheritance import cell_assignments, message_settings, registrations, tracker_runs
from nblaunch.worker.inheritance.sent_changes import SentChange

_TINY = sys.float_info.min


@dataclass(frozen=True)
class LibrarySetting:
    """A setting, or several settings that one function reads.

    Args:
        name: name that the user knows.
        module: the module whose import creates the setting.
        read: returns the current value, given the module.
        write: sets a value.
    """

    name: str
    module: str
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


@dataclass(frozen=True)
class KernelSettings:
    """The settings of a process at a point in time.

    Args:
        changes: library settings, attributes that cells have changed, and registrations, in the order in which they
            are made.
        warning_filters: see :mod:`nblaunch.worker.inheritance.message_settings`.
        loggers: see the same module.
        left: settings that can't be sent to another process, as text.
    """

    changes: Sequence[SentChange]
    warning_filters: Sequence[message_settings.WarningFilter]
    loggers: message_settings.LoggerSettings
    left: tuple[str, ...]

    @classmethod
    def of_this_process(cls, cells: Iterable[str] = ()) -> KernelSettings:
        """Return the current settings without importing anything.

        Args:
            cells: the text of the cells that this process has run.
        """
        loggers = message_settings.read_loggers()
        filters = message_settings.read_warning_filters()
        changes, left = _read_libraries()
        left += loggers.left
        texts = list(cells)
        for read, what in (
            (cell_assignments.read, "attributes that cells have changed"),
            (registrations.read, "registrations by cells"),
        ):
            try:
                sent, not_sent = read(texts)
            except Exception as error:  # raised by the user's modules
                sent, not_sent = [], [f"{what} ({type(error).__name__}: {error})"]
            changes += sent
            left += not_sent
        return cls(changes, filters, loggers, tuple(left))

    def restore(self) -> None:
        """Apply these settings to this process; write a library's settings once the library is imported."""
        for change in self.changes:
            change.make()
        message_settings.write_loggers(self.loggers)
        message_settings.write_warning_filters(self.warning_filters)

    def note(self) -> str | None:
        """Return a sentence about the settings that could not be sent; None if all could."""
        if not self.left:
            return None
        return (
            "these kernel settings can't be sent to another process, so workers do not have them: "
            f"{'; '.join(self.left)}. Apply these settings inside the function"
        )


def _read_libraries() -> tuple[list[SentChange], list[str]]:
    """Return the settings of loaded libraries, and messages about settings that can't be sent."""
    changes, left = [], []
    with warnings.catch_warnings():  # libraries warn when a deprecated setting is read
        warnings.simplefilter("ignore")
        for name, setting in SETTINGS.items():
            module = sys.modules.get(setting.module)
            try:
                if module is None:
                    continue
                value = setting.read(module)
            except Exception:
                continue  # another version of the library, or a conflicting setting
            try:
                changes.append(SentChange.of(name, setting.module, value, partial(_write, name)))
            except Exception as error:
                left.append(f"{name} ({type(error).__name__}: {error})")
    return changes, left


def _write(name: str, module: Any, value: Any) -> None:
    if SETTINGS[name].read(module) != value:
        SETTINGS[name].write(module, value)


# --- how settings are read and written ------------------------------------------------------------------------------


def _attributes(module: str, *paths: str) -> Iterator[LibrarySetting]:
    """Yield a row for each attribute of ``module``, such as ``"backends.cudnn.benchmark"``."""
    for path in paths:
        yield LibrarySetting(f"{module}.{path}", module, attrgetter(path), partial(_set_attribute, path))


def _set_attribute(path: str, module: Any, value: Any) -> None:
    owner, _, name = path.rpartition(".")
    setattr(attrgetter(owner)(module) if owner else module, name, value)


def _calls(module: str, *pairs: tuple[str, str]) -> Iterator[LibrarySetting]:
    """Yield a row for each pair of a getter and a setter."""
    for read, write in pairs:
        yield LibrarySetting(f"{module}.{write}", module, partial(_call, read), partial(_call, write))


def _call(path: str, module: Any, *args: Any) -> Any:
    return attrgetter(path)(module)(*args)


def _keywords(module: str, *pairs: tuple[str, str]) -> Iterator[LibrarySetting]:
    """Yield a row for each pair of a getter that returns a dictionary and a setter that takes keyword arguments."""
    for read, write in pairs:
        yield LibrarySetting(f"{module}.{write}", module, partial(_call, read), partial(_set_keywords, write))


def _set_keywords(path: str, module: Any, values: Mapping[str, Any]) -> None:
    attrgetter(path)(module)(**values)


def _options(
    name: str,
    module: str,
    read: Callable[[Any], dict[str, Any]],
    set_option: Callable[[Any, str, Any], object],
) -> LibrarySetting:
    """Return a row for a library's options, of which only those that differ are set."""

    def write(library: Any, options: Mapping[str, Any]) -> None:
        present = read(library)
        for key, value in options.items():
            if key not in present or present[key] != value:
                set_option(library, key, value)

    return LibrarySetting(name, module, read, write)


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")
_entered: list[Any] = []
"""Torch modes that are active in this process."""


def _autocast(torch: Any) -> tuple[Any, ...]:
    states = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
    ]
    return (torch.is_autocast_cache_enabled(), *states)


def _set_autocast(torch: Any, value: tuple[Any, ...]) -> None:
    keeps_casts, *states = value
    torch.set_autocast_cache_enabled(keeps_casts)
    for device, is_enabled, dtype in states:
        torch.set_autocast_enabled(device, is_enabled)
        torch.set_autocast_dtype(device, dtype)


def _set_inference_mode(torch: Any, is_enabled: bool) -> None:
    mode = torch.inference_mode(is_enabled)
    mode.__enter__()
    _entered.append(mode)  # otherwise the mode would end here


def _modes(torch: Any) -> list[Any]:
    """Return this thread's active modes, outermost first, except the default device, which has its own row."""
    devices = sys.modules["torch.utils._device"].DeviceContext
    of_functions = sys.modules["torch.overrides"]._get_current_function_mode_stack()
    of_dispatch = sys.modules["torch.utils._python_dispatch"]._get_current_dispatch_mode_stack()
    return [mode for mode in (*of_functions, *of_dispatch) if not isinstance(mode, devices)]


def _enter_modes(torch: Any, modes: Sequence[Any]) -> None:
    for mode in modes:
        mode.__enter__()
        _entered.append(mode)


def _set_sparse_checks(torch: Any, is_enabled: bool) -> None:
    checks = torch.sparse.check_sparse_tensor_invariants
    (checks.enable if is_enabled else checks.disable)()


_HOOKS = (
    ("torch.nn.modules.module", "_global_forward_pre_hooks", "register_module_forward_pre_hook"),
    ("torch.nn.modules.module", "_global_forward_hooks", "register_module_forward_hook"),
    ("torch.nn.modules.module", "_global_backward_pre_hooks", "register_module_full_backward_pre_hook"),
    ("torch.nn.modules.module", "_global_backward_hooks", "register_module_full_backward_hook"),
    (
        "torch.nn.modules.module",
        "_global_buffer_registration_hooks",
        "register_module_buffer_registration_hook",
    ),
    (
        "torch.nn.modules.module",
        "_global_module_registration_hooks",
        "register_module_module_registration_hook",
    ),
    (
        "torch.nn.modules.module",
        "_global_parameter_registration_hooks",
        "register_module_parameter_registration_hook",
    ),
    ("torch.optim.optimizer", "_global_optimizer_pre_hooks", "register_optimizer_step_pre_hook"),
    ("torch.optim.optimizer", "_global_optimizer_post_hooks", "register_optimizer_step_post_hook"),
)
"""Module, its hooks (torch has no public function that lists them), and the function that adds a hook."""


def _global_hooks(torch: Any) -> list[tuple[str, str, Any, dict[str, bool]]]:
    """Return the hooks that the user, and not a library, has registered for all modules and optimizers."""
    return [
        (module, register, hook, _options_of_hook(sys.modules[module], hooks, key))
        for module, hooks, register in _HOOKS
        for key, hook in getattr(sys.modules[module], hooks).items()
        if is_user_function(hook)
    ]


def _options_of_hook(module: Any, hooks: str, key: int) -> dict[str, bool]:
    """Return the options that a hook was registered with."""
    suffixes = {"with_kwargs": "_with_kwargs", "always_call": "_always_called"}
    return {name: True for name, suffix in suffixes.items() if key in getattr(module, f"{hooks}{suffix}", ())}


def _register_hooks(torch: Any, hooks: Sequence[tuple[str, str, Any, dict[str, bool]]]) -> None:
    for module, register, hook, options in hooks:
        getattr(sys.modules[module], register)(hook, **options)


def _compiler_values(config: Any) -> dict[str, Any]:
    """Return the non-default values of one of torch's compiler configuration modules."""
    return {
        name: getattr(config, name)
        for name, entry in config._config.items()
        if getattr(config, name) != entry.default
    }


def _pandas_options(pandas: Any) -> dict[str, Any]:
    options = pandas._config.config._registered_options.items()
    return {key: value for key, option in options if (value := pandas.get_option(key)) != option.defval}


_FRONT_END = ("backend", "backend_fallback", "interactive", "toolbar")
"""Matplotlib parameters that only the kernel uses, because workers show figures differently."""


def _figure_parameters(matplotlib: Any) -> dict[str, Any]:
    parameters = matplotlib.rcParams
    return {name: parameters[name] for name in parameters if name not in _FRONT_END}


def _jax_options(jax: Any) -> dict[str, Any]:
    return {
        name: value for name, value in jax.config.values.items() if isinstance(value, (bool, int, float, str))
    }


def _stack_size(threading: Any) -> int:
    size: int = threading.stack_size()  # this call also restores the default
    threading.stack_size(size)
    return size


def _decimal_context(decimal: Any) -> tuple[Any, ...]:
    context = decimal.getcontext()
    traps = tuple(sorted(signal.__name__ for signal, is_set in context.traps.items() if is_set))
    return (
        context.prec,
        context.rounding,
        context.Emin,
        context.Emax,
        context.capitals,
        context.clamp,
        traps,
    )


def _set_decimal_context(decimal: Any, values: tuple[Any, ...]) -> None:
    *numbers, traps = values
    decimal.setcontext(decimal.Context(*numbers, flags=[], traps=[getattr(decimal, name) for name in traps]))


# --- the table ------------------------------------------------------------------------------------------------------

_PYTHON = (
    *_calls("sys", ("getrecursionlimit", "setrecursionlimit"), ("getswitchinterval", "setswitchinterval")),
    *_calls("sys", ("get_int_max_str_digits", "set_int_max_str_digits")),
    LibrarySetting(
        "gc.set_threshold", "gc", lambda gc: gc.get_threshold(), lambda gc, value: gc.set_threshold(*value)
    ),
    LibrarySetting(
        "gc.disable",
        "gc",
        lambda gc: gc.isenabled(),
        lambda gc, value: gc.enable() if value else gc.disable(),
    ),
    LibrarySetting(
        "locale.setlocale",
        "locale",
        lambda locale: locale.setlocale(locale.LC_ALL),
        lambda locale, value: locale.setlocale(locale.LC_ALL, value),
    ),
    LibrarySetting("decimal.setcontext", "decimal", _decimal_context, _set_decimal_context),
    LibrarySetting(
        "multiprocessing.set_start_method",
        "multiprocessing",
        lambda multiprocessing: multiprocessing.get_start_method(allow_none=True),
        lambda multiprocessing, method: multiprocessing.set_start_method(method, force=True),
    ),
    *_calls("socket", ("getdefaulttimeout", "setdefaulttimeout")),
    *_calls("csv", ("field_size_limit", "field_size_limit")),
    LibrarySetting(
        "threading.stack_size",
        "threading",
        _stack_size,
        lambda threading, value: threading.stack_size(value),
    ),
    *_attributes("tempfile", "tempdir"),
)

_TORCH = (
    *_calls(
        "torch",
        ("get_default_dtype", "set_default_dtype"),
        ("get_default_device", "set_default_device"),
        ("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
        ("is_grad_enabled", "set_grad_enabled"),
        ("is_warn_always_enabled", "set_warn_always"),
        ("get_float32_matmul_precision", "set_float32_matmul_precision"),
        ("__future__.get_overwrite_module_params_on_conversion",
         "__future__.set_overwrite_module_params_on_conversion"),
        ("__future__.get_swap_module_params_on_conversion", "__future__.set_swap_module_params_on_conversion"),
        ("multiprocessing.get_sharing_strategy", "multiprocessing.set_sharing_strategy"),
        ("backends.mha.get_fastpath_enabled", "backends.mha.set_fastpath_enabled"),
        ("backends.cuda.flash_sdp_enabled", "backends.cuda.enable_flash_sdp"),
        ("backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.enable_mem_efficient_sdp"),
        ("backends.cuda.math_sdp_enabled", "backends.cuda.enable_math_sdp"),
        ("backends.cuda.cudnn_sdp_enabled", "backends.cuda.enable_cudnn_sdp"),
        ("backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
         "backends.cuda.allow_fp16_bf16_reduction_math_sdp"),
        ("_C._get_sdp_priority_order", "_C._set_sdp_priority_order"),
        ("_C._is_multithreading_enabled", "_C._set_multithreading_enabled"),
        ("_C._is_view_replay_enabled", "_C._set_view_replay_enabled"),
        ("backends.cuda.preferred_linalg_library", "backends.cuda.preferred_linalg_library"),
    ),
    *_attributes(
        "torch",
        "utils.deterministic.fill_uninitialized_memory",
        "backends.opt_einsum.enabled",
        "backends.opt_einsum.strategy",
        "backends.cudnn.enabled",
        "backends.cudnn.benchmark",
        "backends.cudnn.benchmark_limit",
        "backends.cudnn.deterministic",
        "backends.cudnn.allow_tf32",
        "backends.cuda.matmul.allow_tf32",
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        "backends.cuda.matmul.allow_fp16_accumulation",
        "backends.mkldnn.enabled",
        "backends.mkldnn.deterministic",
        "backends.quantized.engine",
        # These come after the older names of the same settings, because setting an older name also sets
        # these.
        "backends.fp32_precision",
        "backends.cudnn.fp32_precision",
        "backends.cudnn.conv.fp32_precision",
        "backends.cudnn.rnn.fp32_precision",
        "backends.cuda.matmul.fp32_precision",
        "backends.mkldnn.fp32_precision",
        "backends.mkldnn.conv.fp32_precision",
        "backends.mkldnn.rnn.fp32_precision",
        "backends.mkldnn.matmul.fp32_precision",
    ),
    *_attributes("torch.utils.checkpoint", "_enable_checkpoint_early_stop", "_checkpoint_debug_enabled"),
    *_attributes("torch.nn.utils.parametrize", "_cache_enabled"),
    LibrarySetting("torch.autocast", "torch", _autocast, _set_autocast),
    LibrarySetting(
        "torch.autograd.graph.saved_tensors_hooks",
        "torch",
        # Torch calls only the innermost pair.
        lambda torch: torch._C._autograd._top_saved_tensors_default_hooks(True),
        lambda torch, hooks: torch._C._autograd._push_saved_tensors_default_hooks(*hooks),
    ),
    LibrarySetting(
        "torch.sparse.check_sparse_tensor_invariants",
        "torch",
        lambda torch: torch.sparse.check_sparse_tensor_invariants.is_enabled(),
        _set_sparse_checks,
    ),
    LibrarySetting(
        "Distribution.set_default_validate_args",
        "torch.distributions",
        lambda distributions: distributions.Distribution._validate_args,
        lambda distributions, value: distributions.Distribution.set_default_validate_args(value),
    ),
    LibrarySetting("torch hooks on all modules and optimizers", "torch", _global_hooks, _register_hooks),
    LibrarySetting(
        "torch.inference_mode", "torch", lambda torch: torch.is_inference_mode_enabled(), _set_inference_mode
    ),
    LibrarySetting("TorchFunctionMode or TorchDispatchMode", "torch", _modes, _enter_modes),
    LibrarySetting(
        "torch.autograd.set_detect_anomaly",
        "torch",
        lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, value: torch.set_anomaly_enabled(*value),
    ),
    LibrarySetting(
        "torch.set_printoptions",
        "torch",
        lambda torch: dict(vars(torch._tensor_str.PRINT_OPTS)),
        partial(_set_keywords, "set_printoptions"),
    ),
    # torch can't read this setting. While it is on, Python also treats denormal numbers as 0.
    LibrarySetting(
        "torch.set_flush_denormal",
        "torch",
        lambda torch: _TINY / 2 == 0,
        lambda torch, value: torch.set_flush_denormal(value),
    ),
    *(
        _options(module, module, _compiler_values, setattr)
        for module in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
    ),
)  # fmt: skip

_LIBRARIES = (
    *_keywords("numpy", ("geterr", "seterr"), ("get_printoptions", "set_printoptions")),
    *_calls("numpy", ("geterrcall", "seterrcall"), ("getbufsize", "setbufsize")),
    _options(
        "pandas.options", "pandas", _pandas_options, lambda pandas, key, value: pandas.set_option(key, value)
    ),
    _options(
        "matplotlib.rcParams",
        "matplotlib",
        _figure_parameters,
        lambda matplotlib, key, value: matplotlib.rcParams.update({key: value}),
    ),
    *_keywords("sklearn", ("get_config", "set_config")),
    *_attributes("PIL.Image", "MAX_IMAGE_PIXELS", "EXTENSION"),
    *_attributes("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"),
    *_attributes("transformers.utils.logging", "_tqdm_active"),
    LibrarySetting("wandb.run", "wandb", lambda wandb: wandb.run, tracker_runs.take_over_wandb_run),
    LibrarySetting(
        "mlflow.active_run",
        "mlflow.tracking.fluent",
        tracker_runs.mlflow_runs,
        tracker_runs.take_over_mlflow_runs,
    ),
    _options("jax.config", "jax", _jax_options, lambda jax, key, value: jax.config.update(key, value)),
    *_calls("keras", ("config.floatx", "config.set_floatx")),
    *_calls("cv2", ("getNumThreads", "setNumThreads")),
)

SETTINGS = {setting.name: setting for setting in (*_PYTHON, *_TORCH, *_LIBRARIES)}
"""Settings by name, written in this order. OpenMP's and torch's thread counts are left out, because workers share the
cores.
"""
