"""The table of all settings of a launch, and functions that merge their values and reject contradictions.

The table contains the fields of ``LaunchSpec``, the arguments of ``Accelerator``'s plugins, and a few other settings.
Each row is an option of ``nblaunch launch``, a key of configuration files and an argument of :func:`nblaunch.launch`.
If Hugging Face Accelerate has the same setting, its name is used.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nblaunch import backends, formatting
from nblaunch.env import CP_STRATEGIES, DYNAMO_MODES
from nblaunch.setting import Choice, Converter, Flag, FlagOrName, Number, Setting, Switch, Text, Whole
from nblaunch.spec import options

GROUPS = {
    "devices": "devices",
    "processes": "number of processes, and how they start",
    "machines": "several machines",
    "training": "defaults for Accelerator() in the script",
    "dynamo_config": "compiling models (torch.compile)",
    "fp8_config": "training in 8 bits, with --mixed_precision fp8",
    "fsdp_config": "fully sharded data parallel, with --use_fsdp",
    "deepspeed_config": "DeepSpeed, with --use_deepspeed",
    "parallelism_config": "forms of parallelism; the product of the sizes is the number of processes",
    "running": "while the job runs",
}
"""Group -> title. Groups that end in ``_config`` are mappings in files, as Accelerate writes them."""

STRATEGIES = ("auto", "ddp", "fsdp", "deepspeed", "spmd")
OFFLOAD_DEVICES = ("none", "cpu", "nvme")
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
COMPILERS = (
    "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
    "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "ipex", "tvm", "hpu_backend", "neuron",
)  # fmt: skip
"""Compilers that Accelerate lists; device families add others."""


def _compilers() -> tuple[str, ...]:
    family_compilers = [name for family in backends.discover().values() for name in family.compilers]
    return tuple(dict.fromkeys([*COMPILERS, *family_compilers]))


_TABLE: dict[str, tuple[tuple[str, Converter, Any, str], ...]] = {
    "devices": (
        ("gpu_ids", Text("IDS"), "all", "GPUs to use on this machine, for example 0,2"),
    ),
    "training": (
        ("gradient_accumulation_steps", Whole(1), None, "micro-batches per optimizer step; default: 1"),
        ("strategy", Choice(STRATEGIES), "auto", "how several processes train a model; auto = data parallel (ddp)"),
        ("downcast_bf16", Switch(), False, "TPU with bf16: store float as bfloat16 and double as float32"),
        ("debug", Switch(), False, "compare shapes across ranks in every collective"),
    ),
    "dynamo_config": (
        ("dynamo_backend", Choice(_compilers(), "NAME"), "no",
         "compile models with this torch.compile backend, such as inductor"),
        ("dynamo_mode", Choice(DYNAMO_MODES), None, "what compilation optimises for"),
        ("dynamo_use_fullgraph", Switch(), False, "compile models without graph breaks, or fail"),
        ("dynamo_use_dynamic", Switch(), None, "compile for dynamic shapes; default: torch decides"),
        ("dynamo_use_regional_compilation", Switch(), False, "compile only repeated blocks"),
    ),
    "fp8_config": (
        ("fp8_backend", Choice(("AO",)), None, "the library: torchao"),
        ("fp8_pad_inner_dim", Flag(), None, "pad matrices to multiples of 16; default: true"),
        ("fp8_enable_fsdp_float8_all_gather", Flag(), None, "gather sharded weights in fp8; default: true"),
    ),
    "fsdp_config": (
        ("fsdp_version", Choice(("1", "2")), "2", "1 or 2; nblaunch always uses version 2 (fully_shard)"),
        ("fsdp_reshard_after_forward", FlagOrName(), None, "free gathered weights after the forward pass"),
        ("fsdp_offload_params", Flag(), None, "keep parameters and gradients on the CPU"),
        ("fsdp_auto_wrap_policy", Choice(WRAP_POLICIES), None,
         "how to choose the submodules that are sharded as units"),
        ("fsdp_transformer_layer_cls_to_wrap", Text("CLASS,..."), None,
         "classes of blocks, for TRANSFORMER_BASED_WRAP"),
        ("fsdp_min_num_params", Whole(0), None, "minimum number of parameters, for SIZE_BASED_WRAP"),
        ("fsdp_state_dict_type", Choice(STATE_DICT_TYPES), None,
         "weights in checkpoints: full, or one shard per rank"),
        ("fsdp_cpu_ram_efficient_loading", Flag(), None, "load the pretrained weights only on rank 0"),
        ("fsdp_activation_checkpointing", Flag(), None, "recompute activations instead of storing them"),
        ("fsdp_activation_checkpointing_offload", Flag(), None,
         "store the inputs of recomputed blocks in host memory"),
        ("fsdp_sharding_strategy", Text("NAME"), None, "as in version 1: FULL_SHARD, SHARD_GRAD_OP, ..."),
    ),
    "deepspeed_config": (
        ("deepspeed_config_file", Text("FILE"), None, "DeepSpeed's JSON file, instead of the options below"),
        ("zero_stage", Whole(0, 3), None, "1 shards optimizer states, 2 also gradients, 3 also parameters"),
        ("offload_optimizer_device", Choice(OFFLOAD_DEVICES), None, "where to store optimizer states"),
        ("offload_param_device", Choice(OFFLOAD_DEVICES), None, "where to store parameters (stage 3)"),
        ("offload_optimizer_nvme_path", Text("FOLDER"), None, "folder on the disk, for nvme"),
        ("offload_param_nvme_path", Text("FOLDER"), None, "folder on the disk, for nvme"),
        ("gradient_clipping", Number(0.0), None, "maximum norm of the gradients"),
        ("zero3_save_16bit_model", Flag(), None, "stage 3: save 16-bit weights in one file"),
        ("deepspeed_moe_layer_cls_names", Text("CLASS,..."), None, "classes of mixture-of-experts blocks"),
    ),
    "parallelism_config": (
        ("use_parallelism_config", Switch(), False, "combine forms of parallelism; implied by any size below"),
        ("parallelism_config_dp_replicate_size", Whole(1), None,
         "number of replicas of the model; each reads different data"),
        ("parallelism_config_dp_shard_size", Whole(1), None, "number of processes that share a replica (FSDP2)"),
        ("parallelism_config_tp_size", Whole(1), None, "number of processes that compute each layer together"),
        ("parallelism_config_cp_size", Whole(1), None, "number of processes that share a sequence"),
        ("parallelism_config_cp_backend", Choice(("torch",)), None, "how sequences are sharded"),
        ("parallelism_config_cp_comm_strategy", Choice(CP_STRATEGIES), None,
         "how processes that share a sequence exchange keys and values"),
        ("parallelism_config_sp_size", Whole(1), None, "only 1: DeepSpeed's sequence parallelism is not available"),
    ),
    "running": (
        ("dashboard", Choice(("text", "none")), "text", "text = progress lines and a final table on stderr"),
        ("stop_grace_s", Number(0.0), 20.0,
         "seconds that ranks have after SIGTERM to save a checkpoint, before they are interrupted"),
    ),
}  # fmt: skip


def _settings() -> Iterator[Setting]:
    """Yield all settings in the order used in the help and in files: by group, fields of ``LaunchSpec`` first."""
    of_launches = options()
    of_launches["backend"] = replace(of_launches["backend"], converter=Choice(tuple(backends.names())))
    for group in GROUPS:
        yield from (setting for setting in of_launches.values() if setting.group == group)
        yield from (Setting(*row, group) for row in _TABLE.get(group, ()))


FIELDS = {setting.name: field for field, setting in options().items()}
"""Setting -> field of ``LaunchSpec``."""

SETTINGS = {setting.name: setting for setting in _settings()}
"""Name -> setting, in the order used in the help and in files."""

SECTIONS = tuple(group for group in GROUPS if group.endswith("_config"))
"""Groups that are mappings in files."""

_ON_EVERY_MACHINE = "run `nblaunch launch` on every machine, with --num_machines and --machine_rank"
_HOST_SETTINGS = tuple(
    f"deepspeed_{name}" for name in ("hostfile", "exclusion_filter", "inclusion_filter", "multinode_launcher")
)
_FSDP_1_SETTINGS = (
    "fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states",
)  # fmt: skip
_SEQUENCE_SETTINGS = tuple(
    f"parallelism_config_sp_{name}"
    for name in ("backend", "seq_length", "seq_length_is_variable", "attn_implementation")
)

UNUSED: dict[str, int | None] = {
    **dict.fromkeys(("same_network", "no_tpu_cluster", "quiet", "enable_cpu_affinity"), 0),
    **dict.fromkeys(("tee", "role", "main_training_function", "monitor_interval"), 1),
    **dict.fromkeys(_SEQUENCE_SETTINGS, 1),
    # FSDP2 always prefetches and keeps the original parameters, and ranks compare their weights.
    **dict.fromkeys(_FSDP_1_SETTINGS, 1),
    "zero3_init_flag": 1,
    # PyTorch now includes the features of Intel's extension. nblaunch needs no list of hosts, because the user runs it
    # on every machine.
    **dict.fromkeys(("ipex_config", "fsdp_backward_prefetch_policy", *_HOST_SETTINGS), None),
}
"""Accelerate's settings that have no effect -> number of values that the option takes; None: only in files."""

_AS_NBLAUNCH_DOES: dict[str, tuple[str, ...]] = {
    "main_training_function": ("main",),  # the script runs as a whole, and calls its function itself
    "deepspeed_multinode_launcher": ("standard",),
    "fsdp_backward_prefetch": ("backward_pre",),
    "fsdp_backward_prefetch_policy": ("backward_pre",),
    "fsdp_use_orig_params": ("true",),
    "fsdp_sync_module_states": ("true",),
}
"""Setting in :data:`UNUSED` -> the values, in lower case, that ask for what nblaunch does in any case."""

_WITHOUT_LOSS = ("same_network", "no_tpu_cluster", "quiet", "tee", "monitor_interval", *_SEQUENCE_SETTINGS)
"""Settings in :data:`UNUSED` that no user misses: nblaunch needs no such choice, or rejects it with another setting."""

_UNSUPPORTED = {
    "no_python": "nblaunch launches only Python scripts and modules",
    **dict.fromkeys(("use_megatron_lm", "megatron_lm_"), "Megatron-LM is not available in nblaunch"),
    "fp8_": "it belongs to Transformer Engine or MS-AMP; nblaunch trains in fp8 with torchao, --fp8_backend AO",
    **dict.fromkeys(("mpirun_", "tpu_", "vm", "env", *_HOST_SETTINGS), _ON_EVERY_MACHINE),
    **dict.fromkeys(("command", "commands", "command_file"), _ON_EVERY_MACHINE),
    "aws_": "launching on Amazon SageMaker is not available in nblaunch",
}
"""Accelerate's settings, or prefixes that end in _, for features that nblaunch does not have -> the reason."""


SHORTHANDS: dict[str, tuple[str, str, str]] = {
    "cpu": ("backend", "cpu", "compute on the CPU: --backend cpu"),
    "multi_gpu": ("backend", "cuda", "compute on GPUs: --backend cuda"),
    "tpu": ("backend", "xla", "compute on TPUs: --backend xla"),
    "use_fsdp": ("strategy", "fsdp", "shard models across the processes: --strategy fsdp"),
    "use_deepspeed": ("strategy", "deepspeed", "train with DeepSpeed: --strategy deepspeed"),
}
"""Option -> its setting, the value that it gives the setting, and its line in the help."""


def unsupported_reason(name: str) -> str | None:
    """Return why nblaunch does not support an Accelerate setting; None if it does, or if the setting is unknown."""
    if name in SETTINGS:
        return None
    for unsupported, reason in _UNSUPPORTED.items():
        if name == unsupported or (unsupported.endswith("_") and name.startswith(unsupported)):
            return reason
    return None


def is_off(value: Any) -> bool:
    """Return whether a value switches a feature off; for a section or a list, whether all its values do."""
    if isinstance(value, (dict, list)):
        return all(map(is_off, value.values() if isinstance(value, dict) else value))
    return value is None or str(value).lower() in ("", "~", "null", "no", "none", "false")


def notes_on_unused(given: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """Return a sentence about the settings in :data:`UNUSED` that ask for something that nblaunch does not do.

    Args:
        given: setting of any kind -> value.
        source: where the values come from.
    """
    missed = [name for name, value in given.items() if name in UNUSED and _is_missed(name, value)]
    if not missed:
        return ()
    verb = "has" if len(missed) == 1 else "have"
    return (f"{formatting.joined(missed)} ({source}) {verb} no effect in nblaunch",)


def _is_missed(name: str, value: Any) -> bool:
    if name in _WITHOUT_LOSS or is_off(value):
        return False
    return str(value).lower() not in _AS_NBLAUNCH_DOES.get(name, ())


# --- values from several sources --------------------------------------------------------------------------------------


DEFAULT = "default"

GPU_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""Backend -> the environment variable that selects its GPUs by number."""

_NEEDS: dict[str, tuple[str, Callable[[str], bool], str]] = {
    "fsdp_config": ("strategy", lambda chosen: chosen == "fsdp", "strategy fsdp"),
    "deepspeed_config": ("strategy", lambda chosen: chosen == "deepspeed", "strategy deepspeed"),
    "dynamo_config": (
        "dynamo_backend",
        lambda chosen: chosen != "no",
        "compilation, for example with dynamo_backend inductor",
    ),
    "downcast_bf16": ("backend", lambda chosen: chosen in ("auto", "xla"), "TPUs"),
    "gpu_ids": ("backend", lambda chosen: chosen in ("auto", *GPU_VARIABLES), "GPUs"),
}
"""Setting or group -> the setting that it depends on, a test of its value, and what passes the test."""


class ConfigError(ValueError):
    """A setting is invalid, or two settings contradict each other. The message is one line."""


@dataclass(frozen=True)
class Layer:
    """The settings from one source.

    Args:
        source: name of the source, such as ``command line`` or the path of a file.
        values: setting -> converted value. None is also a value, for settings that accept it.
        notes: sentences about the source that the user sees when the job starts.
    """

    source: str
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resolved:
    """A value for every setting.

    Args:
        values: setting -> value.
        sources: setting -> source of the value.
        notes: sentences about the sources.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def is_set(self, name: str) -> bool:
        """Return whether the setting's value comes from a source other than the table's default."""
        return self.sources[name] != DEFAULT

    def group(self, group: str) -> dict[str, Any]:
        """Return the settings in a group that the user has set."""
        return {
            name: self.values[name]
            for name in self.values
            if SETTINGS[name].group == group and self.is_set(name)
        }


def convert(name: str, value: Any, given: str = "") -> Any:
    """Convert ``value`` to the type of the setting ``name``.

    Args:
        name: name of the setting.
        value: value of any type.
        given: how the user wrote the name and value, such as ``--debug 2``; empty if they come from a file.

    Raises:
        ConfigError: the value is invalid, or the setting is unknown.
    """
    if name not in SETTINGS:
        raise ConfigError(unknown(name, SETTINGS))
    try:
        return SETTINGS[name].converter.convert(value)
    except ValueError as error:
        raise ConfigError(f"{given or f'{name}: {shown(value)}'} {error}") from None


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: Any) -> str:
    """Return ``value`` for a message: one line of at most about 80 characters."""
    return _SHORT.repr(value)


def named(name: Any) -> str:
    """Return ``name`` for a message: without quotes if it is an identifier."""
    return name if isinstance(name, str) and name.isidentifier() and len(name) <= 80 else shown(name)


def unknown(name: str, valid: Sequence[str] | Mapping[str, Any]) -> str:
    """Return a message that says that ``name`` is unknown, with the nearest of the ``valid`` names."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else "")


def instead_of(name: str) -> str:
    """Return the last part of a message, which says what to write instead of ``name``; empty if nothing fits.

    Args:
        name: a name that is not a setting.
    """
    if name in SHORTHANDS:
        setting, value, _ = SHORTHANDS[name]
        return f"; use {setting}={value!r}"
    if reason := unsupported_reason(name):
        return f"; {reason}"
    return unknown(name, SETTINGS).removeprefix(f"{name} is unknown")


def resolve(layers: Sequence[Layer]) -> Resolved:
    """Merge layers into one value per setting; earlier layers override later ones and the defaults.

    Raises:
        ConfigError: two settings contradict each other.
    """
    values, sources = {}, {}
    for name, setting in SETTINGS.items():
        layer = next((layer for layer in layers if name in layer.values), None)
        values[name] = layer.values[name] if layer is not None else setting.default
        sources[name] = layer.source if layer is not None else DEFAULT
    resolved = Resolved(values, sources, tuple(note for layer in layers for note in layer.notes))
    order = {layer.source: i for i, layer in enumerate(layers)} | {DEFAULT: len(layers)}
    _check_needs(resolved, order)
    _check_machines(resolved)
    _check_training(resolved)
    return resolved


def _check_needs(resolved: Resolved, order: Mapping[str, int]) -> None:
    """Reject settings that another setting makes ineffective, unless a higher layer sets that other setting.

    A file may have been written for a different strategy or device than the command line selects.
    """
    for name, setting in SETTINGS.items():
        needs = _NEEDS.get(name) or _NEEDS.get(setting.group)
        if needs is None or resolved[name] is False or resolved[name] == setting.default:
            continue
        other, is_used, purpose = needs
        overrides = order[resolved.sources[other]] < order[resolved.sources[name]]
        if not is_used(resolved[other]) and not overrides:
            raise ConfigError(
                f"{name} ({resolved.sources[name]}) has an effect only with {purpose}, but {other} is "
                f"{resolved[other]} ({resolved.sources[other]})"
            )


def most_machines(resolved: Resolved) -> int:
    """Return ``num_machines``, or its maximum if it is a range."""
    return int(str(resolved["num_machines"]).rpartition(":")[2])


def _check_machines(resolved: Resolved) -> None:
    num_machines, machine_rank = most_machines(resolved), resolved["machine_rank"]
    if machine_rank >= num_machines:
        raise ConfigError(
            f"machine_rank={machine_rank} ({resolved.sources['machine_rank']}) must be less than "
            f"num_machines={num_machines} ({resolved.sources['num_machines']}); ranks are numbered from 0"
        )
    if num_machines == 1:
        return
    if resolved["rdzv_endpoint"] is None and resolved["main_process_ip"] is None:
        raise ConfigError(
            f"num_machines={num_machines} needs main_process_ip, the address at which the other machines reach "
            "machine 0"
        )
    num_processes = resolved["num_processes"]
    if num_processes is not None and num_processes % num_machines:
        raise ConfigError(
            f"num_processes={num_processes} is the total on all machines and must be a multiple of "
            f"num_machines={num_machines}"
        )


def _check_training(resolved: Resolved) -> None:
    backend = resolved["backend"]
    if resolved["strategy"] == "spmd" and backend not in ("auto", "xla"):
        raise ConfigError(
            f"strategy=spmd works only on TPUs, but backend is {backend} ({resolved.sources['backend']})"
        )
    if resolved["deepspeed_config_file"] is not None:
        # DeepSpeed's file has no entry for the classes of blocks.
        besides = ("deepspeed_config_file", "deepspeed_moe_layer_cls_names")
        both = [name for name in resolved.group("deepspeed_config") if name not in besides]
        if both:
            raise ConfigError(f"deepspeed_config_file replaces {', '.join(both)}; set these in that file")
