"""The table of Hugging Face Accelerate's modules with their public names, and the modules of nblaunch that define them.

A script for Accelerate runs when ``accelerate`` is replaced by ``nblaunch`` in its imports. The modules of this table
have no files: :mod:`nblaunch.compat.finder` creates them. Type checkers and editors read the stubs
(``nblaunch/utils.pyi`` and others), which ``make stubs`` writes from this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nblaunch.compat import delegated

_NAMES: Mapping[str, Mapping[str, str]] = {
    "accelerator": {
        "training.accelerator": "Accelerator",
    },
    "big_modeling": {
        "training.checkpoints.loading": "load_checkpoint_and_dispatch load_checkpoint_in_model",
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
        "training.tracking.hub": "register_tracker_class",
        "training.tracking.trackers": (
            "GeneralTracker JsonlTracker MLflowTracker TensorBoardTracker WandBTracker"
        ),
    },
    "utils": {
        "cli.config": "write_basic_config",
        "errors": "DistributedOperationException",
        "training.checkpoints.loading": "load_checkpoint_in_model",
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
        "training.strategies.deepspeed.engine": "DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper",
        "training.strategies.deepspeed.settings": "get_active_deepspeed_plugin",
        "training.strategies.deepspeed.strategy": "DeepSpeedPlugin",
        "training.strategies.fsdp2.strategy": "FullyShardedDataParallelPlugin",
        "training.strategies.fsdp2.settings": (
            "FSDP2_STATE_DICT_TYPE FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_SHARDING_STRATEGY "
            "FSDP_STATE_DICT_TYPE"
        ),
        "training.checkpoints.fsdp_states": (
            "FSDP_MODEL_NAME load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model "
            "save_fsdp_optimizer"
        ),
        "training.tracking.hub": "LoggerType",
        "training.utilities.environment": (
            "check_os_kernel clear_environment compare_versions get_int_from_env is_4bit_bnb_available "
            "is_8bit_bnb_available is_port_in_use merge_dicts "
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
            "purge_accelerate_environment str_to_bool"
        ),
        "training.utilities.log": "tqdm",
        "training.utilities.modeling": (
            "clean_state_dict_for_safetensors compute_module_sizes convert_bytes convert_file_size_to_int "
            "dtype_byte_size find_tied_parameters get_module_children_bottom_up get_module_class_from_name "
            "get_parameters_from_modules get_pretty_name id_tensor_storage load_state_dict model_has_dtensor "
            "recursive_getattr"
        ),
        "training.utilities.memory": (
            "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size"
        ),
    },
}
"""Module -> home -> the names that it has from there, both without ``nblaunch.`` in front."""

_SAME_AS_UTILS = (
    "checkpointing", "memory_utils", "utils.constants", "utils.dataclasses", "utils.deepspeed", "utils.environment",
    "utils.fsdp_utils", "utils.imports", "utils.launch", "utils.memory", "utils.modeling", "utils.operations",
    "utils.other", "utils.random", "utils.torch_xla", "utils.tqdm", "utils.versions",
)  # fmt: skip
"""Modules in which Accelerate defines what its ``utils`` offers. Each has all of those names here."""


def _homes(module: str) -> Iterator[tuple[str, str]]:
    for home, names in _NAMES[module].items():
        for name in names.split():
            yield name, f"nblaunch.{home}"


HOMES: Mapping[str, Mapping[str, str]] = {
    **{f"nblaunch.{module}": {} for module in delegated.MODULES},
    **{f"nblaunch.{module}": dict(_homes(module)) for module in _NAMES},
    **{f"nblaunch.{module}": dict(_homes("utils")) for module in _SAME_AS_UTILS},
}
"""Module -> public name -> the module that defines it."""

FILES = tuple(f"nblaunch.{module}" for module in _NAMES)
"""Modules with a stub."""
