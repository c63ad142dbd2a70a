"""Settings for sharding a model over ranks: :class:`ShardingSettings`, with the fields of Hugging Face Accelerate.

The dataclass checks its own values. Nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from nblaunch import context
from nblaunch.errors import warn
from nblaunch.training.options import check_choice

WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
STATE_DICT_TYPES = ("sharded_state_dict", "full_state_dict")

_DTYPES = {
    "fp32": torch.float32,
    "no": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_FLAGS = ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading")
_TRUTH = {"true": True, "false": False}  # spellings in files and environment variables
_SHARDING = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
# Fields from FSDP version 1 without a counterpart in torch's fully_shard.
_VERSION_1_FIELDS = (
    "backward_prefetch", "forward_prefetch", "state_dict_config", "optim_state_dict_config", "use_orig_params",
    "sync_module_states",
)  # fmt: skip

FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
# The lists above are Accelerate's. Other libraries check their arguments against them, and number the entries from 1.
_SHARDING_NUMBERS = {str(number): name for number, name in enumerate(FSDP_SHARDING_STRATEGY, 1)}


@dataclass
class ShardingSettings:
    """Sharding of models over ranks with torch's ``fully_shard`` (FSDP2): ``Accelerator(fsdp_plugin=...)``.

    If one process drives all XLA devices (``strategy="spmd"``), XLA's compiler shards models over these devices, and
    checkpoints are the same as without sharding. In this case, only ``ignored_modules`` has an effect; fields that the
    compiler can't support raise an error.

    Later Accelerators in the process use the same plugin, unless they get another strategy or a ``parallelism_config``
    without sharding.

    A plain ``torch.save(model.state_dict(), path)`` writes only one rank's shards. Save full weights with
    ``accelerator.save_model(model, folder)``, or call ``accelerator.get_state_dict(model)`` on all ranks and save the
    dict on the main process. ``accelerator.save`` rejects shards.

    A field that is None comes from the launch (``nblaunch launch``, ``nblaunch.launch``) if it sets the field.

    Args:
        fsdp_version: must be 2.
        sharding_strategy: the older form of ``reshard_after_forward``: ``"FULL_SHARD"`` or ``"SHARD_GRAD_OP"``.
            ``"HYBRID_SHARD"`` and ``"HYBRID_SHARD_ZERO2"`` shard within each machine and replicate across
            machines.
        reshard_after_forward: True (default): free a layer's weights after its forward pass, and gather them again for
            backward. False: keep them until then, which needs more memory and less communication. A number: keep them
            sharded over this many ranks.
        mixed_precision_policy: torch's ``MixedPrecisionPolicy``, a dict of its fields (dtypes may be names), or
            ``"bf16"``, ``"fp16"`` or ``"fp32"`` for all of them. None: the Accelerator's ``mixed_precision`` for all of
            them, as in Accelerate. ``{"param_dtype": "bf16", "reduce_dtype": "fp32"}`` reduces gradients more
            accurately, and returns outputs in fp32.
        auto_wrap_policy: chooses the modules to gather as units: ``"transformer_based_wrap"`` (by class),
            ``"size_based_wrap"``, ``"no_wrap"`` (the model is one unit), or a function ``policy(module) -> bool``, such
            as a policy from ``torch.distributed.fsdp.wrap``. None: the two fields below decide or, if neither is set,
            the model's ``_no_split_modules``, or else its lists of equal blocks.
        transformer_cls_names_to_wrap: classes or their names; each module of these classes is a unit.
        min_num_params: a module with at least this many elements is a unit; 100 million by default.
        cpu_offload: keep shards of weights, gradients and optimizer states in host memory; True, or torch's
            ``CPUOffloadPolicy``.
        ignored_modules: modules that are not sharded, or a regular expression for their names. Every rank holds and
            trains these modules separately; nblaunch warns if they are not frozen.
        state_dict_type: ``"SHARDED_STATE_DICT"`` (default): ``save_state`` writes each rank's shards, and any number of
            ranks can load them. ``"FULL_STATE_DICT"``: the main process writes the same files as without sharding.
        activation_checkpointing: recompute the activations of units in backward instead of keeping them.
        activation_checkpointing_offload: keep the inputs of these units in host memory until backward.
        cpu_ram_efficient_loading: if only rank 0 has weights, and other ranks built the model on the meta device, rank
            0 sends the weights shard by shard. False: reject such a model instead.
        param_init_fn: initialises a module that is on the meta device on every rank. It is called with each module that
            directly holds uninitialised weights or buffers, which are in CPU memory for the call. None: call the
            module's ``reset_parameters``, then the model's ``_init_weights``, if they exist. It is an error if any
            tensors remain without values.
        limit_all_gathers: accepted, but has no effect: version 2 never gathers further ahead than memory allows.
        backward_prefetch, forward_prefetch, state_dict_config: fields from version 1, ignored with a warning.
        optim_state_dict_config, use_orig_params, sync_module_states: fields from version 1, ignored with a warning.

    Raises:
        ValueError: a field has no meaning in version 2, or has an unknown value. The message says what to write
            instead.
    """

    fsdp_version: int = 2
    sharding_strategy: Any = None
    reshard_after_forward: bool | int | None = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Callable[..., Any] | str | None = None
    cpu_offload: Any = None
    ignored_modules: Iterable[torch.nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[torch.nn.Module], Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        if str(self.fsdp_version) != "2":
            raise ValueError(
                f"fsdp_version={self.fsdp_version!r}: nblaunch shards with torch's fully_shard, which is version 2; "
                "leave fsdp_version out. In version 2, reshard_after_forward=True corresponds to FULL_SHARD, and False "
                "to SHARD_GRAD_OP"
            )
        self._complete_from_launch()
        self.sharding_strategy = _sharding_name(self.sharding_strategy)
        self.cpu_offload = _offload(self.cpu_offload)
        reshards = _TRUTH.get(str(self.reshard_after_forward).lower(), self.reshard_after_forward)
        if isinstance(reshards, str):  # in version 1, strategies are passed here
            self.sharding_strategy, reshards = _sharding_name(reshards, "reshard_after_forward"), None
        if reshards is None:
            reshards = _SHARDING.get(str(self.sharding_strategy), True)
        if not isinstance(reshards, int) or reshards < 0:
            raise ValueError(
                f"reshard_after_forward={reshards!r:.80} must be True, False or a number of ranks"
            )
        self.reshard_after_forward = reshards
        for name in _FLAGS:
            setattr(self, name, _truth(name, getattr(self, name)))
        if isinstance(self.auto_wrap_policy, str):
            self.auto_wrap_policy = self.auto_wrap_policy.lower()
            check_choice("auto_wrap_policy", self.auto_wrap_policy, WRAP_POLICIES)
        self.set_state_dict_type(self.state_dict_type)
        if self.min_num_params is not None:
            self.min_num_params = _count("min_num_params", self.min_num_params)
        self.transformer_cls_names_to_wrap = _class_names(self.transformer_cls_names_to_wrap)
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError("activation_checkpointing_offload=True needs activation_checkpointing=True")
        for name in _VERSION_1_FIELDS:
            if getattr(self, name):
                setting = f"FullyShardedDataParallelPlugin({name}={getattr(self, name)!r:.60})"
                warn(
                    f"{setting} has no effect: FSDP version 2, torch's fully_shard, does not have this setting"
                )

    def _complete_from_launch(self) -> None:
        """Take the fields that are None from the launch, for example from the file of ``accelerate config``."""
        given = self.sharding_strategy, self.reshard_after_forward
        context.complete_from_launch(self, "fsdp_plugin")
        if given != (None, None):  # two forms of one setting
            self.sharding_strategy, self.reshard_after_forward = given

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Make ``save_state`` write states of this type from now on; None: the default type."""
        name = str(getattr(state_dict_type, "name", state_dict_type or "SHARDED_STATE_DICT")).upper()
        if name == "LOCAL_STATE_DICT":
            raise ValueError(
                "state_dict_type='LOCAL_STATE_DICT' belongs to FSDP version 1; use 'SHARDED_STATE_DICT', which "
                "also writes each rank's shards and can be loaded on any number of ranks"
            )
        check_choice("state_dict_type", name.lower(), STATE_DICT_TYPES)
        self.state_dict_type = name

    def set_mixed_precision(
        self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Gather and reduce in this precision, unless a policy is already set.

        Args:
            mixed_precision: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
            buffer_autocast: a field from version 1 that has no effect: buffers keep their own precision.
            override: replace a policy that is already set.

        Raises:
            ValueError: the precision is unknown.
        """
        check_choice("mixed_precision", mixed_precision, tuple(_DTYPES))
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = mixed_precision

    @property
    def is_hybrid(self) -> bool:
        """Whether models are sharded within each machine and replicated across machines."""
        return str(self.sharding_strategy).startswith("HYBRID")

    @property
    def saves_shards(self) -> bool:
        """Whether checkpoints contain each rank's shards."""
        return bool(self.state_dict_type == "SHARDED_STATE_DICT")

    def offload_policy(self) -> Any:
        """Return torch's object for ``cpu_offload``."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        if isinstance(self.cpu_offload, OffloadPolicy):
            return self.cpu_offload
        return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self.cpu_offload else OffloadPolicy()

    def precision_policy(self, dtype: torch.dtype | None) -> Any:
        """Return torch's object for ``mixed_precision_policy``; ``dtype`` is the Accelerator's precision."""
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        policy = self.mixed_precision_policy
        if isinstance(policy, MixedPrecisionPolicy):
            return policy
        if isinstance(policy, MixedPrecision):  # version 1 reduces in param_dtype if reduce_dtype is None
            reduce_dtype = policy.reduce_dtype or policy.param_dtype
            return MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=reduce_dtype)
        if isinstance(policy, str):
            check_choice("mixed_precision_policy", policy, tuple(_DTYPES))
            dtype = _DTYPES[policy]
        if policy is None or isinstance(policy, str):
            return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
        if isinstance(policy, dict):
            fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
            for name in policy:
                if name != "buffer_dtype":  # a field from version 1: buffers keep their own dtype
                    check_choice("mixed_precision_policy field", name, fields)
            return MixedPrecisionPolicy(
                **{name: _value(name, policy[name]) for name in fields if name in policy}
            )
        raise ValueError(
            f"mixed_precision_policy={policy!r:.80} must be torch's MixedPrecisionPolicy, a dict of its fields, or one "
            f"of {', '.join(map(repr, _DTYPES))}"
        )


def _value(name: str, value: Any) -> Any:
    """Return the value of a policy's field, converting dtype names such as ``"bf16"`` or ``"bfloat16"``."""
    if not name.endswith("_dtype") or value is None or isinstance(value, torch.dtype):
        return value
    dtypes = {**_DTYPES, **{str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}}
    short = str(value).removeprefix("torch.")
    check_choice(f"mixed_precision_policy[{name!r}]", short, tuple(dtypes))
    return dtypes[short]


def _sharding_name(strategy: Any, argument: str = "sharding_strategy") -> str | None:
    """Return the name of a version 1 sharding strategy, given its name, its number or torch's enum member."""
    if strategy is None:
        return None
    name = str(getattr(strategy, "name", strategy)).upper()
    name = _SHARDING_NUMBERS.get(name, name)
    if name == "NO_SHARD":
        raise ValueError(
            f"{argument}='NO_SHARD' keeps the whole model on every rank; leave fsdp_plugin out, so "
            "that DistributedDataParallel trains the models"
        )
    check_choice(argument, name, tuple(_SHARDING))
    return name


def _offload(offload: Any) -> Any:
    """Return ``cpu_offload`` as True, False or torch's ``CPUOffloadPolicy``."""
    if offload is None or offload in (True, False):
        return bool(offload)
    if isinstance(offload, str) and offload.lower() in _TRUTH:
        return _TRUTH[offload.lower()]
    if hasattr(offload, "offload_params"):  # CPUOffload from version 1
        return bool(offload.offload_params)
    if hasattr(offload, "pin_memory"):  # CPUOffloadPolicy
        return offload
    if type(offload).__name__ == "OffloadPolicy":
        return False
    raise ValueError(f"cpu_offload={offload!r:.80} must be True, False or torch's CPUOffloadPolicy")


def _truth(name: str, value: Any) -> bool | None:
    value = _TRUTH.get(value.lower(), value) if isinstance(value, str) else value
    if value not in (None, True, False):
        raise ValueError(f"{name}={value!r:.80} must be True or False")
    return None if value is None else bool(value)


def _count(name: str, value: Any) -> int:
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if not isinstance(value, (int, float)) or value != int(value) or value < 0:
        raise ValueError(f"{name}={value!r:.80} is not a number of elements")
    return int(value)


def _class_names(names: Any) -> list[str] | None:
    """Return class names, given a list of names or classes, or names separated by commas."""
    if names is None:
        return None
    if isinstance(names, str):
        return [name.strip() for name in names.split(",")]
    return [str(getattr(name, "__name__", name)) for name in ([names] if isinstance(names, type) else names)]
