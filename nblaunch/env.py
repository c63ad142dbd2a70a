"""Environment variables. No other module uses ``os.environ``.

``TABLE`` lists every variable that nblaunch reads. Users or clusters set these variables. Parts of nblaunch pass values
to each other as arguments or in the payload of a launch.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

MixedPrecision = Literal["no", "fp16", "bf16", "fp8"]
MIXED_PRECISIONS: tuple[str, ...] = get_args(MixedPrecision)
DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CP_STRATEGIES = ("allgather", "alltoall")


@dataclass(frozen=True)
class VariableType:
    """The type of a variable's values, and the conversion from text.

    Args:
        convert: returns the value; raises ValueError if the text is invalid.
        valid: the valid values in words, as the end of a sentence.
    """

    convert: Callable[[str], Any]
    valid: str


@dataclass(frozen=True)
class Variable:
    """One row of the table."""

    name: str
    type: VariableType
    default: Any
    meaning: str


def as_flag(text: str) -> bool:
    """Parse a boolean written as 1, true, yes, on, 0, false, no, off, none or empty; raise ValueError otherwise."""
    flag = text.strip().lower()
    if flag in ("1", "true", "yes", "y", "t", "on"):
        return True
    if flag in ("", "0", "false", "no", "n", "f", "off", "none"):
        return False
    raise ValueError(text)


def _as_whole(text: str, least: int) -> int:
    if int(text) < least:
        raise ValueError(text)
    return int(text)


def _as_one_of(text: str, choices: Sequence[str]) -> str:
    if text.lower() not in choices:
        raise ValueError(text)
    return text.lower()


CHECKS = (
    "clipping_after_step", "clipping_scaled_gradients", "collectives_differ", "epoch_not_set", "equal_noise",
    "evaluation_in_train_mode", "gradients_not_cleared", "learning_rates_differ", "loaders_in_different_orders",
    "loss_divided_twice", "loss_scale_collapsed", "metric_of_one_share", "nan_on_one_rank", "no_optimizer_steps",
    "optimizer_without_gradients", "parameters_without_gradients", "repeated_training", "replicas_differ", "same_file",
    "same_samples", "samples_in_other_orders", "scheduler_per_epoch", "scheduler_per_micro_step", "shared_pipe",
    "slow_imports", "slow_steps", "statistics_differ", "steps_on_some_ranks", "training_in_eval_mode",
    "zero_learning_rate",
)  # fmt: skip
"""Names of all checks, which ``NBLAUNCH_CHECKS`` can turn off."""


def _as_skipped_checks(text: str) -> frozenset[str]:
    names = frozenset(text.lower().replace(",", " ").split())
    if names not in ({"on"}, {"off"}) and not names <= {f"-{name}" for name in CHECKS}:
        raise ValueError(text)
    return names


def _one_of(*choices: str) -> VariableType:
    return VariableType(partial(_as_one_of, choices=choices), f"one of {', '.join(choices)}")


_TEXT = VariableType(str, "text")
_SKIPPED_CHECKS = VariableType(
    _as_skipped_checks,
    f"on, off, or names after a minus, as in -replicas_differ,-same_file; the names are {', '.join(CHECKS)}",
)
_FLAG = VariableType(as_flag, "true or false (or 1, 0, yes, no, on, off)")
_COUNT = VariableType(partial(_as_whole, least=1), "a whole number of at least 1")
_NUMBER = VariableType(partial(_as_whole, least=0), "a whole number of at least 0")
_LEVELS = VariableType(
    # The first number in OpenMP's list is for the outermost level; the others are not read.
    lambda text: _as_whole(text.partition(",")[0], least=0),
    "a whole number of at least 0, or several, such as 4,2",
)
_PRECISION = _one_of(*MIXED_PRECISIONS)
_LOG_LEVEL = _one_of("notset", "debug", "info", "warn", "warning", "error", "critical", "fatal")
_DYNAMO_MODE = _one_of(*DYNAMO_MODES)

TABLE = {
    row.name: row
    for row in (
        Variable("NBLAUNCH_LOG_DIR", _TEXT, "", "folder for jobs' logs; default: nblaunch-<uid> in $TMPDIR or /tmp"),
        Variable("NBLAUNCH_NUM_PROCESSES", _COUNT, 0, "default number of workers; unset: one per device"),
        Variable("NBLAUNCH_KEEP_JOBS", _NUMBER, 20, "number of jobs whose logs are kept"),
        Variable("NBLAUNCH_LOG_LIMIT_MB", _COUNT, 256, "maximum size of a rank's log in MB; older output is dropped"),
        Variable("NBLAUNCH_CHECKS", _SKIPPED_CHECKS, frozenset(), "off: check no training loops; -NAME: skip a check"),
        Variable("NBLAUNCH_CONFIG_FILE", _TEXT, "", "file with settings of nblaunch launch; default: in ~/.config"),
        Variable("NBLAUNCH_GPUS_BY_LOCAL_RANK", _FLAG, False, "set in workers: whether ranks choose their GPUs"),
        Variable("RAY_ADDRESS", _TEXT, "", "address of a Ray cluster, for engine='ray'"),
        Variable("RAY_AUTH_MODE", _TEXT, "", "token: the Ray cluster accepts only commands with its token"),
        Variable("RAY_RAYLET_PID", _NUMBER, 0, "set by Ray in its workers: process id of their daemon"),
        Variable("SLURM_JOB_ID", _TEXT, "", "set by Slurm in an allocation, for engine='slurm'"),
        Variable("SLURM_JOB_NODELIST", _TEXT, "", "set by Slurm: the nodes of the allocation"),
        Variable("SSH_CONNECTION", _TEXT, "", "set by sshd: how this machine was reached, for engine='ssh'"),
        Variable("TERM", _TEXT, "", 'kind of terminal; "dumb" turns colours off'),
        Variable("NO_COLOR", _TEXT, "", "any value turns colours off"),
        Variable("FORCE_COLOR", _TEXT, "", "any value turns colours on, even outside a terminal"),
        Variable("HF_HOME", _TEXT, "", "Hugging Face's folder; default: huggingface in XDG_CACHE_HOME"),
        Variable("XDG_CACHE_HOME", _TEXT, "", "folder of caches; default: ~/.cache"),
        Variable("XDG_CONFIG_HOME", _TEXT, "", "folder for configuration files; default: ~/.config"),
        Variable("XDG_STATE_HOME", _TEXT, "", "folder for nblaunch/jobs (detached jobs); default: ~/.local/state"),
        Variable("OMP_NUM_THREADS", _LEVELS, 0, "CPU threads of a worker; default: usable cores / workers"),
        Variable("CUDA_DEVICE_ORDER", _TEXT, None, "PCI_BUS_ID: number GPUs by bus, not by speed"),
        Variable("CUDA_VISIBLE_DEVICES", _TEXT, None, "GPUs to use, in CUDA's format"),
        Variable("HIP_VISIBLE_DEVICES", _TEXT, None, "AMD GPUs to use; default: CUDA_VISIBLE_DEVICES"),
        Variable("ROCR_VISIBLE_DEVICES", _TEXT, None, "AMD GPUs from which HIP_VISIBLE_DEVICES chooses"),
        Variable("ZE_AFFINITY_MASK", _TEXT, None, "Intel GPUs to use, in Level Zero's format"),
        Variable("ZE_FLAT_DEVICE_HIERARCHY", _TEXT, None, "COMPOSITE: the tiles of an Intel GPU count as one device"),
        Variable("ONEAPI_DEVICE_SELECTOR", _TEXT, None, "Intel GPUs to use, in SYCL's format"),
        Variable("PYTORCH_NVML_BASED_CUDA_CHECK", _TEXT, None, "how torch counts GPUs; set to 1 if unset"),
        Variable("NCCL_P2P_DISABLE", _TEXT, None, "disable peer access between GPUs; set for GPUs without it"),
        Variable("PJRT_DEVICE", _TEXT, None, "device of torch_xla: TPU or CPU; default: TPU if there is one"),
        Variable("TORCH_DEVICE_BACKEND_AUTOLOAD", _TEXT, None, "0: torch imports no device packages on its own"),
        Variable("TPU_ACCELERATOR_TYPE", _TEXT, "", "kind of TPU, set by the host's image, such as v5litepod-8"),
        Variable("TPU_SKIP_MDS_QUERY", _TEXT, "", "any value: do not query the TPU host's metadata server"),
        Variable("TPU_WORKER_HOSTNAMES", _TEXT, "", "hosts in this machine's TPU slice"),
        Variable("NBLAUNCH_XLA_CACHE", _TEXT, "", "folder for compiled graphs; default on TPU: ~/.cache/nblaunch/xla"),
        Variable("ACCELERATE_MIXED_PRECISION", _PRECISION, "", "mixed precision, if the script sets none"),
        *(
            Variable(f"ACCELERATE_FP8_{name}", _FLAG, True, f"{name.lower()} of AORecipeKwargs")
            for name in ("PAD_INNER_DIM", "ENABLE_FSDP_FLOAT8_ALL_GATHER")
        ),
        Variable("ACCELERATE_USE_CPU", _FLAG, False, "use the CPU in processes that nblaunch has not started"),
        Variable("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", _COUNT, 1, "micro-steps per optimizer step; default: 1"),
        Variable("ACCELERATE_DEBUG_MODE", _FLAG, False, "compare shapes across ranks in every collective"),
        Variable("ACCELERATE_LOG_LEVEL", _LOG_LEVEL, "", "log level of get_logger, if the script sets none"),
        Variable("ACCELERATE_USE_PARALLELISM_CONFIG", _FLAG, False, "divide ranks by PARALLELISM_CONFIG_*_SIZE"),
        *(
            Variable(f"PARALLELISM_CONFIG_{name}_SIZE", _COUNT, 1, f"{name.lower()}_size of the ParallelismConfig")
            for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
        ),
        Variable(
            "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
            _one_of(*CP_STRATEGIES),
            "allgather",
            "how ranks exchange keys and values",
        ),
        Variable("ACCELERATE_DYNAMO_BACKEND", _TEXT, "no", "compile models with this backend of torch.compile"),
        Variable("ACCELERATE_DYNAMO_MODE", _DYNAMO_MODE, "", "mode of torch.compile"),
        Variable("ACCELERATE_DYNAMO_USE_FULLGRAPH", _FLAG, False, "compile models without graph breaks"),
        Variable("ACCELERATE_DYNAMO_USE_DYNAMIC", _FLAG, None, "compile for dynamic shapes"),
        Variable("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", _FLAG, False, "compile only repeated blocks"),
    )
}  # fmt: skip


def read(name: str) -> Any:
    """Return the converted value of a variable in the table, or its default if it is unset or empty.

    Raises:
        KeyError: the variable is not in the table.
        ValueError: the text is invalid; the message names the variable, its text and the valid values.
    """
    row = TABLE[name]
    text = os.environ.get(name)
    if text is None or (text == "" and row.default is not None):
        return row.default
    try:
        return row.type.convert(text)
    except ValueError:
        raise ValueError(f"environment variable {name}={text!r:.80} must be {row.type.valid}") from None


def check() -> None:
    """Check every variable in the table, and look for misspelt names, before anything starts.

    Raises:
        ValueError: variables are invalid; the message lists all of them.
    """
    problems = []
    for name in (name for name in TABLE if name in os.environ):
        try:
            read(name)
        except ValueError as error:
            problems.append(str(error))
    problems += _misspelt_names()
    if problems:
        raise ValueError("; ".join(problems))


def _misspelt_names() -> Iterator[str]:
    prefix = "NBLAUNCH_"
    names = {name.removeprefix(prefix): name for name in TABLE if name.startswith(prefix)}
    for name in sorted(name for name in os.environ if name.startswith(prefix) and name not in TABLE):
        # Other names are not errors: users may give variables of their own this prefix.
        if near := difflib.get_close_matches(name.removeprefix(prefix), names, n=1, cutoff=0.7):
            yield f"nblaunch reads no environment variable {name}: did you mean {names[near[0]]}?"


def is_check_off(name: str) -> bool:
    """Return whether the user has turned off a check, or all checks, with ``NBLAUNCH_CHECKS``.

    Raises:
        KeyError: ``name`` is not in :data:`CHECKS`.
    """
    if name not in CHECKS:
        raise KeyError(name)
    return bool({"off", f"-{name}"} & read("NBLAUNCH_CHECKS"))


def snapshot() -> dict[str, str]:
    """Return a copy of the environment, for :class:`nblaunch.topology.Topology` and fresh interpreters."""
    return dict(os.environ)


def split_by_size(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return as many variables as every system can pass to a new program, smallest first, and the remaining ones."""
    small, room = {}, _ROOM_BYTES
    for name, value in sorted(environment.items(), key=lambda item: len(item[1])):
        room -= len(os.fsencode(name)) + len(os.fsencode(value)) + _OVERHEAD_BYTES
        if room < 0:
            break
        small[name] = value
    return small, {name: value for name, value in environment.items() if name not in small}


_ROOM_BYTES = 64 << 10
"""Half of the minimum that Linux provides for arguments and environment. Source: execve(2), "Limits on size of
arguments".
"""

_OVERHEAD_BYTES = 10  # "=", the zero at the end, and a pointer


def apply(changes: Mapping[str, str | None]) -> None:
    """Set environment variables in this process; None removes a variable."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def patched(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables while the block runs, then restore them."""
    before = {name: os.environ.get(name) for name in changes}
    apply(changes)
    try:
        yield
    finally:
        apply(before)
