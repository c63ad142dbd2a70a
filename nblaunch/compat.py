"""Public names that are imported on first use: nblaunch's own, and those in Hugging Face Accelerate's modules.

A script written for Accelerate runs after you replace ``accelerate`` with ``nblaunch`` in its imports. Tables say which
module defines each name, which names Accelerate serves if it is installed, and what replaces names that nblaunch does
not have. An import hook serves the names.

The modules in these tables have no files: :func:`install` adds a finder that creates them. Type checkers and editors
read the stubs (``nblaunch/__init__.pyi``, ``nblaunch/utils.pyi`` and others), which ``make stubs`` writes from these
tables.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nblaunch import installation
from nblaunch.errors import LaunchError

_ROOT: Mapping[str, str] = {
    "debugging": "debug",
    "detached": "attach jobs",
    "engines.kept_nodes": "Nodes",
    "errors": (
        "CheckpointError CollectiveMismatch DistributedOperationException JobCancelled JobHung JobLost LaunchError "
        "NblaunchError NodeLost PayloadError ResultError WorkerDied WorkerError WorkerFailed"
    ),
    "launcher.job": "Job last_job",
    "notebook": "debug_launcher launch notebook_launcher",
    "session.session": "Session",
    "training.accelerator": "Accelerator",
    "training.checkpoints.load_weights": "load_checkpoint_and_dispatch load_checkpoint_in_model",
    "training.collectives.rng": "set_seed synchronize_rng_states",
    "training.data.resuming": "skip_first_batches",
    "training.options": (
        "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs "
        "GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs ProfileKwargs ProjectConfiguration"
    ),
    "training.parallelism": "ParallelismConfig",
    "training.state": "AcceleratorState DistributedType GradientState PartialState",
    "training.strategies.deepspeed.strategy": "DeepSpeedPlugin",
    "training.strategies.fsdp2.strategy": "FullyShardedDataParallelPlugin",
    "training.utilities.local_sgd": "LocalSGD",
    "training.utilities.memory": "find_executable_batch_size init_empty_weights init_on_device",
    "training.joining": "one_at_a_time",
}
"""Module -> the public names of ``nblaunch`` itself that the module defines."""

_MODULES: Mapping[str, Mapping[str, str]] = {
    "accelerator": {
        "training.accelerator": "Accelerator",
    },
    "big_modeling": {
        "training.checkpoints.load_weights": "load_checkpoint_and_dispatch load_checkpoint_in_model",
        "training.utilities.memory": "init_empty_weights init_on_device",
    },
    "data_loader": {
        "training.data.adapter": "DataLoaderAdapter DataLoaderStateMixin",
        "training.data.dispatcher": "DataLoaderDispatcher",
        "training.data.loader": "DataLoaderShard get_sampler",
        "training.data.prepare": "prepare_data_loader",
        "training.data.resuming": "SkipDataLoader skip_first_batches",
        "training.data.samplers": "SeedableRandomSampler SkipBatchSampler",
        "training.data.sharding": "BatchSamplerShard IterableDatasetShard",
    },
    "launchers": {
        "notebook": "debug_launcher notebook_launcher",
    },
    "local_sgd": {
        "training.utilities.local_sgd": "LocalSGD",
    },
    "logging": {
        "training.utilities.log": "MultiProcessAdapter get_logger",
    },
    "optimizer": {
        "training.optimizer": "AcceleratedOptimizer",
    },
    "parallelism_config": {
        "training.parallelism": "ParallelismConfig",
    },
    "scheduler": {
        "training.optimizer": "AcceleratedScheduler",
    },
    "state": {
        "training.state": "AcceleratorState DistributedType GradientState PartialState is_initialized",
    },
    "tracking": {
        "training.tracking": "LOGGER_TYPE_TO_CLASS register_tracker_class",
        "training.trackers": (
            "CometMLTracker GeneralTracker JsonlTracker MLflowTracker SwanLabTracker TensorBoardTracker TrackioTracker "
            "WandBTracker on_main_process"
        ),
    },
    "utils": {
        "cli.config": "write_basic_config",
        "errors": "DistributedOperationException",
        "training.checkpoints.load_weights": "load_checkpoint_in_model",
        "training.checkpoints.model_files": "load save",
        "training.checkpoints.files": (
            "MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME "
            "SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME "
            "SCHEDULER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME"
        ),
        "training.collectives.nested": (
            "TensorInformation concatenate convert_to_fp32 find_batch_size find_device get_data_structure honor_type "
            "initialize_tensors is_namedtuple is_tensor_information is_torch_tensor listify "
            "pad_input_tensors recursively_apply send_to_device slice_tensors"
        ),
        "training.collectives.operations": (
            "CannotPadNestedTensorWarning broadcast broadcast_object_list gather gather_object "
            "pad_across_processes reduce"
        ),
        "training.collectives.rng": "set_seed synchronize_rng_state synchronize_rng_states",
        "training.models": "is_compiled_module",
        "training.options": (
            "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs "
            "DynamoBackend GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler "
            "PrecisionType ProfileKwargs ProjectConfiguration RNGType TorchDynamoPlugin"
        ),
        "training.parallelism": (
            "ParallelismConfig TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin"
        ),
        "training.precision": "AORecipeKwargs convert_outputs_to_fp32",
        "training.prepare": "extract_model_from_parallel is_peft_model",
        "training.state": "DistributedType wait_for_everyone",
        "training.strategies.deepspeed.config": "DummyOptim DummyScheduler HfDeepSpeedConfig",
        "training.strategies.deepspeed.settings": "get_active_deepspeed_plugin",
        "training.strategies.deepspeed.strategy": (
            "DeepSpeedOptimizerWrapper DeepSpeedPlugin DeepSpeedSchedulerWrapper"
        ),
        "training.strategies.fsdp2.strategy": "FullyShardedDataParallelPlugin",
        "training.strategies.fsdp2.settings": (
            "FSDP2_STATE_DICT_TYPE FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_SHARDING_STRATEGY "
            "FSDP_STATE_DICT_TYPE"
        ),
        "training.checkpoints.fsdp_states": (
            "FSDP_MODEL_NAME load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model "
            "save_fsdp_optimizer"
        ),
        "training.tracking": "LoggerType",
        "training.utilities.helpers": (
            "check_os_kernel clear_environment compare_versions get_int_from_env "
            "is_aim_available is_amdsmi_available is_bf16_available is_bnb_available is_boto3_available "
            "is_clearml_available is_comet_ml_available is_cuda_available is_datasets_available "
            "is_deepspeed_available is_dvclive_available is_fp16_available is_fp8_available is_hpu_available "
            "is_import_timer_available is_lomo_available is_matplotlib_available is_megatron_lm_available "
            "is_mlflow_available is_mlu_available is_mps_available is_msamp_available is_musa_available "
            "is_neuron_available is_npu_available is_numpy_available is_pandas_available is_peft_available "
            "is_pippy_available is_pynvml_available is_pytest_available is_rich_available is_rocm_available "
            "is_sagemaker_available is_schedulefree_available is_sdaa_available is_swanlab_available "
            "is_tensorboard_available is_timm_available is_torch_distributed_available is_torch_version "
            "is_torch_xla_available is_torchao_available is_torchdata_available "
            "is_torchdata_stateful_dataloader_available is_torchvision_available is_tqdm_available "
            "is_trackio_available is_transformer_engine_available is_transformer_engine_mxfp8_available "
            "is_transformers_available is_triton_available is_wandb_available is_weights_only_available "
            "is_xccl_available is_xpu_available parse_choice_from_env parse_flag_from_env patch_environment "
            "purge_accelerate_environment "
            "str_to_bool "
            "BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION "
            "BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION DTENSOR_PYTORCH_VERSION "
            "FSDP2_PYTORCH_VERSION FSDP_PYTORCH_VERSION "
            "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION TORCH_DYNAMO_MODES XPU_PROFILING_AVAILABLE_PYTORCH_VERSION "
            "are_libraries_initialized check_cuda_fp8_capability convert_dict_to_env_variables "
            "disable_fsdp_ram_efficient_loading dtype_byte_size enable_fsdp_ram_efficient_loading "
            "find_tied_parameters id_tensor_storage ignorant_find_batch_size is_port_in_use "
            "compile_regions_fsdp2 convert_bytes get_pretty_name has_compiled_regions merge_dicts model_has_dtensor "
            "recursive_getattr"
        ),
        "training.utilities.log": "tqdm",
        "training.utilities.memory": (
            "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size"
        ),
    },
}
"""Module -> home -> names that the module takes from that home; modules and homes lack the prefix ``nblaunch.``."""

_SAME_AS_UTILS = (
    "checkpointing", "memory_utils", "utils.constants", "utils.dataclasses", "utils.deepspeed", "utils.environment",
    "utils.fsdp_utils", "utils.imports", "utils.launch", "utils.memory", "utils.modeling", "utils.operations",
    "utils.other", "utils.random", "utils.torch_xla", "utils.tqdm", "utils.versions",
)  # fmt: skip
"""Modules in which Accelerate defines the names of its ``utils``. In nblaunch, each has all of these names."""

_DELEGATED: Mapping[str, str] = {
    "big_modeling": (
        "attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook disk_offload dispatch_model"
    ),
    "hooks": (
        "AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook "
        "add_hook_to_module attach_align_device_hook attach_align_device_hook_on_blocks "
        "attach_execution_device_hook remove_hook_from_module remove_hook_from_submodules"
    ),
    "inference": "prepare_pippy",
    "test_utils": "torch_device",  # Accelerate's examples import it
    "test_utils.training": "mocked_dataloaders mocked_dataloaders_for_autoregressive_models",
    "utils": (
        "PrepareForLaunch TORCH_DISTRIBUTED_OPERATION_TYPES "
        "TORCH_LAUNCH_PARAMS "
        "check_cuda_p2p_ib_support clean_state_dict_for_safetensors compile_regions "
        "compile_regions_deepspeed compute_module_sizes "
        "convert_file_size_to_int copy_tensor_to_devices deepspeed_required "
        "ensure_weights_retied "
        "get_cpu_distributed_information get_current_device_type get_gpu_info get_grad_scaler "
        "get_model_tp_size get_module_children_bottom_up has_4bit_bnb_layers "
        "install_xla is_4bit_bnb_available "
        "is_8bit_bnb_available is_bitsandbytes_multi_backend_available is_habana_gaudi1 "
        "load_state_dict prepare_deepspeed_cmd_env prepare_multi_gpu_env "
        "prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu "
        "set_numa_affinity torchao_required"
    ),
    "utils.ao": "convert_model_to_fp8_ao filter_first_and_last_linear_layers has_ao_layers",
    "utils.bnb": "load_and_quantize_model",
    "utils.dataclasses": (
        "BnbQuantizationConfig ComputeEnvironment CustomDtype DeepSpeedSequenceParallelConfig SageMakerDistributedType "
        "get_module_class_from_name"
    ),
    "utils.deepspeed": "map_pytorch_optim_to_deepspeed",
    "utils.fsdp_utils": "get_parameters_from_modules",
    "utils.modeling": (
        "align_module_device calculate_maximum_sizes check_device_map check_tied_parameters_in_config "
        "check_tied_parameters_on_same_device clean_device_map get_balanced_memory get_max_layer_size "
        "get_max_memory get_state_dict_from_offload get_state_dict_offloaded_model has_offloaded_params "
        "infer_auto_device_map load_offloaded_weights named_module_tensors retie_parameters "
        "set_module_tensor_to_device"
    ),
    "utils.offload": (
        "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight "
        "offload_state_dict offload_weight save_offload_index"
    ),
}
"""Accelerate module -> the names that it defines and ``finder.from_accelerate`` serves."""

_WITHOUT_OWN_NAMES = (
    "hooks",
    "inference",
    "test_utils",
    "test_utils.training",
    "utils.ao",
    "utils.bnb",
    "utils.offload",
)
"""Modules whose names all come from Accelerate, if it is installed."""


def _homes(names_of: Mapping[str, str]) -> dict[str, str]:
    return {name: f"nblaunch.{home}" for home, names in names_of.items() for name in names.split()}


PUBLIC: Mapping[str, str] = _homes(_ROOT)
"""Public name of ``nblaunch`` -> the module that defines it."""

HOMES: Mapping[str, Mapping[str, str]] = {
    **{f"nblaunch.{module}": {} for module in _WITHOUT_OWN_NAMES},
    **{f"nblaunch.{module}": _homes(names_of) for module, names_of in _MODULES.items()},
    **{f"nblaunch.{module}": _homes(_MODULES["utils"]) for module in _SAME_AS_UTILS},
}
"""Module -> public name -> the module that defines it."""

FILES = tuple(f"nblaunch.{module}" for module in _MODULES)
"""Modules with a stub."""

DELEGATED: Mapping[str, str] = {
    name: f"accelerate.{module}" for module, names in _DELEGATED.items() for name in names.split()
}
"""Name -> the Accelerate module that defines it."""

# --- names that nblaunch does not have -------------------------------------------------------------------------------

_PARALLELISM = (
    "nblaunch trains models with DistributedDataParallel, with FSDP2 "
    "(Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())) and with DeepSpeed "
    "(Accelerator(deepspeed_plugin=DeepSpeedPlugin())). For other forms of parallelism, use accelerate itself "
    "inside the function that notebook_launcher starts"
)
_FP8 = (
    "nblaunch uses torchao for fp8: Accelerator(mixed_precision='fp8', kwargs_handlers=[AORecipeKwargs()]). For "
    "Transformer Engine and MS-AMP, use accelerate itself inside the function that notebook_launcher starts"
)
_MIXED = "use accelerator.autocast() with Accelerator(mixed_precision='bf16')"
_SHARDING = "use accelerator.prepare(model) with Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())"
_TRACKER = (
    "nblaunch has trackers for tensorboard, wandb, mlflow, comet_ml, swanlab, trackio and jsonl. For others, write "
    "a subclass of nblaunch.tracking.GeneralTracker and pass an instance: Accelerator(log_with=MyTracker(...))"
)

_INSTEAD = {
    _PARALLELISM: (
        "AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "MegatronLMDummyDataLoader",
        "MegatronLMDummyScheduler", "MegatronLMPlugin", "T5TrainStep", "add_model_config_to_megatron_parser",
        "avg_losses_across_data_parallel_group", "megatron_lm",
    ),
    "with DeepSpeed's stage 3, use deepspeed.zero.GatheredParameters(parameters) directly": ("GatheredParameters",),
    "accelerator.prepare(model, optimizer) creates DeepSpeed's engine": ("DeepSpeedEngineWrapper",),
    _MIXED: ("get_mixed_precision_context_manager",),
    _SHARDING: (
        "fsdp2_apply_ac", "fsdp2_canonicalize_names", "fsdp2_load_full_state_dict",
        "fsdp2_prepare_model", "fsdp2_switch_optimizer_parameters", "get_fsdp2_grad_scaler",
    ),
    _FP8: (
        "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs", "apply_fp8_autowrap", "contextual_fp8_autocast",
        "convert_model", "has_transformer_engine_layers", "transformer_engine",
    ),
    _TRACKER: (
        "AimTracker", "ClearMLTracker", "DVCLiveTracker",
    ),
    "use the command line (nblaunch launch, nblaunch config), or nblaunch.launch(function, args) in Python": (
        "commands", "prepare_extend_env_parallelism_config",
    ),
}  # fmt: skip

INSTEAD = {name: text for text, names in _INSTEAD.items() for name in names}
"""Name -> explanation of what to use instead."""


def explanation(name: str) -> str:
    """Return the explanation for an unsupported ``name``; empty for any other name."""
    text = INSTEAD.get(name, "")
    return f"nblaunch has no {name}: {text}" if text else ""


# --- the import hook --------------------------------------------------------------------------------------------------

# ``nblaunch.utils.operations`` is a module without a file. Its attributes are imported on first use, from the modules
# that define them. If Accelerate is installed, every module also has the names that nblaunch takes from it. An
# unsupported module or attribute raises an error that says what to use instead.
#
# On systems that can't run jobs, ``import nblaunch`` works, but importing any of its names raises a ``LaunchError``. So
# does importing a module after another version of nblaunch was installed (``nblaunch/installation.py``).


def install() -> None:
    """Add the finder to ``sys.meta_path``.

    It must be the first finder, because a folder left by an older version (``nblaunch/utils`` with only compiled files)
    would otherwise be imported as an empty package.
    """
    sys.meta_path.insert(0, _Finder())


def submodules_of(package: str) -> list[str]:
    """Return the names of the modules directly below ``package`` in the table, relative to ``package``."""
    below = (name.removeprefix(f"{package}.") for name in HOMES if name.startswith(f"{package}."))
    return sorted(name for name in below if "." not in name)


def attribute(module: str, name: str) -> Any:
    """Return the attribute ``name`` of ``nblaunch`` or of a module in the table, from the module that defines it.

    Raises:
        AttributeError: the module lacks the name; the message names a replacement if there is one.
        LaunchError: no job can run on this system.
    """
    home = (PUBLIC if module == "nblaunch" else HOMES[module]).get(name)
    if home is not None:
        if system_problem() is not None and home != "nblaunch.errors":
            raise LaunchError(system_problem())
        return getattr(importlib.import_module(home), name)
    if f"{module}.{name}" in HOMES:
        return importlib.import_module(f"{module}.{name}")
    if name in DELEGATED:
        return from_accelerate(name)
    raise AttributeError(explanation(name) or f"module {module!r} has no attribute {name!r}")


class _ForwardingModule(ModuleType):
    """A module whose public names are defined in other modules."""

    def __getattr__(self, name: str) -> Any:
        value = attribute(self.__name__, name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets an imported submodule as an attribute of its parent, but ``utils.tqdm`` must remain the function.
        if not (isinstance(value, ModuleType) and name in HOMES[self.__name__]):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*HOMES[self.__name__], *submodules_of(self.__name__)})

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)  # cloudpickle handles plain modules only


class _Finder:
    """Finds the modules in the table, and raises an ImportError with an explanation for unsupported modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith("nblaunch."):
            if system_problem() is not None:
                raise LaunchError(system_problem())  # instead of an error about a missing Python module
            installation.check_import()
        if fullname in HOMES:
            # The modules are packages, so that Python asks the finders for missing submodules, and this
            # finder can raise an error that says what to use instead.
            return ModuleSpec(fullname, _Loader(), is_package=True)
        reason = explanation(fullname.rpartition(".")[2]) if fullname.startswith("nblaunch.") else ""
        if reason:
            raise ImportError(reason, name=fullname)
        return None


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _ForwardingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = HOMES[module.__name__]
        homes = ", ".join(f"``{home}``" for home in sorted(set(names.values())))
        module.__doc__ = (
            f"Names of ``{module.__name__.replace('nblaunch', 'accelerate', 1)}``; defined in {homes}."
        )
        module.__dict__["__all__"] = sorted(names)


# --- names that an installed Accelerate serves -----------------------------------------------------------------------


def from_accelerate(name: str) -> Any:
    """Return Hugging Face Accelerate's object, or a placeholder if Accelerate is not installed.

    The placeholder raises an ImportError when it is used.

    nblaunch trains models. It does not split models for inference, and lacks some helpers and constants that
    Accelerate exports. Programs that both train models and split models import such names along with those for
    training, and libraries import them without using them. Each name is therefore Accelerate's own object, and can be
    imported even if Accelerate is not installed.

    Args:
        name: a name in :data:`nblaunch.compat.DELEGATED`, or a function of ``accelerate.big_modeling``.
    """
    try:
        value = getattr(importlib.import_module(DELEGATED.get(name, "accelerate.big_modeling")), name)
    except (ImportError, AttributeError, RecursionError) as error:
        return _without_accelerate(name, error)
    if not str(getattr(value, "__module__", "accelerate.")).startswith("accelerate."):  # constants lack it
        # Another package, perhaps nblaunch itself, is imported under Accelerate's name.
        return _without_accelerate(name, None)
    return value


def _without_accelerate(name: str, cause: Exception | None) -> Any:
    def reject(*args: Any, **kwargs: Any) -> Any:
        raise ImportError(
            f"{name} comes from Hugging Face Accelerate, which is not installed: pip install accelerate. To train "
            "a model that does not fit on one device, use nblaunch's "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()) or "
            "Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))",
            name="accelerate",
        ) from cause

    reject.__name__ = reject.__qualname__ = name
    # Libraries use isinstance() with such a class, or derive from it.
    return type(name, (), {"__init__": reject, "__doc__": reject.__doc__}) if name[0].isupper() else reject


# --- systems that can't run jobs -------------------------------------------------------------------------------------


def system_problem() -> str | None:
    """Return the reason why no job can run on this system, and what to do; None if jobs can run."""
    if hasattr(os, "fork") and sys.platform != "emscripten":
        return None
    return (
        f"nblaunch needs Linux or macOS, but this is {sys.platform}. On Windows, run `wsl --install` in a "
        "terminal, and install Jupyter and nblaunch inside WSL"
    )
