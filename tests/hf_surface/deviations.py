"""Deliberate differences between nblaunch's and Hugging Face Accelerate's API: reasons, and the names they cover.

Names are patterns as in :mod:`fnmatch`, except that brackets are literal. Every pattern must match something.
"""

from __future__ import annotations

PARALLELISM_FORMS = (
    "models are spread with DistributedDataParallel; asking for another form is rejected by name"
)
LARGE_MODELS = (
    "of models cut by a device map, an installed Accelerate serves the names that programs use; these are not"
)
FP8 = "fp8 is trained by torchao; recipes of other libraries are not passed on"
INTERNAL = "an inner part of Accelerate that scripts don't call"
CONSTRUCTED_BY_PREPARE = "the Accelerator makes it; its other arguments are the parts that it is made of"
KEYWORD_ONLY = "keyword-only behind the first arguments, because Accelerate inserts new ones in the middle"
CONFIGURATION_FILES = "nblaunch has a default file of its own"

DEVIATIONS: dict[str, list[str]] = {
    PARALLELISM_FORMS: [
        "Accelerator(*_plugin)", "Accelerator(deepspeed_plugins)",
        "*(parallelism_config)",
        "*(fsdp_plugin)", "*(torch_tp_plugin)", "*egatron*", "*MEGATRON*", "*(torch_device_mesh)",
        "*fsdp*", "utils.*TrainStep",
        "utils.GatheredParameters", "utils.avg_losses_across_data_parallel_group",
        "inference.*", "utils.dataclasses.parse_*_config",
        "*(full_state_dict)", "*(broadcast_from_rank0)",
    ],
    LARGE_MODELS: [
        "*offload*",
        "*load_checkpoint_in_model(*)",
        "utils.*quantize*", "utils.*bnb_*",
        "load_checkpoint_and_dispatch(*)",
        "*SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "utils.bnb.get_*",
        "utils.modeling.*",
    ],
    FP8: ["*fp8*", "*FP8*", "utils.*RecipeKwargs", "utils.*transformer_engine*",
          "utils.convert_model",
          "utils.ao.*"],
    CONFIGURATION_FILES: ["utils.write_basic_config(save_location)"],
    "only SageMaker, or only Accelerate's own command line, needs it": [
        "launchers.test_launch",
        "*SAGEMAKER*", "*DEEPSPEED_MULTINODE_LAUNCHERS",
        "utils.launch.env_var_path_add", "utils.launch.prepare_*", "utils.environment.*",
    ],
    "a constant that only Accelerate's own checks and questions read": [
        "*ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",
        "*CUDA_DISTRIBUTED_TYPES",
        "*STR_OPERATION_TO_FUNC",
        "utils.imports.USE_TORCH_XLA", "utils.operations.TENSOR_*", "utils.other.TORCH_SAFE_GLOBALS",
    ],
    "DeepSpeed's engine is made, and called, by the strategy": [
        "Accelerator.deepspeed_*", "*DeepSpeed*Wrapper*",
    ],
    "what a part is made of is its own affair": ["data_loader.DataLoaderShard.dl_state_dict"],
    "the Accelerator saves and loads: `save_state`, `load_state`": ["checkpointing.*"],
    "the libraries behind it are not among the trackers; write a GeneralTracker": [
        "tracking.AimTracker", "tracking.ClearMLTracker", "tracking.DVCLiveTracker",
    ],
    "a tracker hands out the library's own object for everything beyond logging values: `tracker.tracker`": [
        "tracking.MLflowTracker.log_artifacts",
    ],
    INTERNAL: [
        "*FullyShardedDataParallelPlugin.set_auto_wrap_policy",
        "*FullyShardedDataParallelPlugin.validate_mixed_precision_policy",
        "data_loader.*.adjust_state_dict_for_prefetch",
        "optimizer.move_to_device", "optimizer.patch_optimizer_step", "state.do_nothing",
        "state.ThreadLocalSharedDict",
        "tracking.filter_trackers", "tracking.get_available_trackers", "is_rich_available",
        "*DistributedDataParallelKwargs.register_comm_hook", "*DistributedDataParallelKwargs.to_dict(ignore_keys)",
        "utils.contextual_*",
        "utils.get_mixed_precision_context_manager",
        "state.AcceleratorState.downcast_bfloat", "utils.dataclasses.BaseEnum",
        "utils.dataclasses.EnumWithContains",
        "utils.operations.ConvertOutputsToFp32", "utils.operations.chained_operation",
        "utils.operations.gather_tensor_shape", "utils.operations.get_shape", "utils.operations.is_torch_xpu_tensor",
        "utils.operations.verify_operation", "utils.other.get_free_port", "utils.other.*repeated_blocks",
    ],
    KEYWORD_ONLY: [
        "Accelerator(rng_types)", "Accelerator(log_with)", "Accelerator(project_*)",
        "Accelerator(gradient_accumulation_plugin)", "Accelerator(step_scheduler_with_optimizer)",
        "Accelerator(kwargs_handlers)", "Accelerator(dynamo_backend)",
    ],
    CONSTRUCTED_BY_PREPARE: [
        "data_loader.DataLoaderShard(*)", "data_loader.DataLoaderDispatcher(*)",
        "optimizer.AcceleratedOptimizer(*)",
        "scheduler.AcceleratedScheduler(*)", "state.AcceleratorState(cpu)", "state.AcceleratorState(dynamo_plugin)",
        "state.AcceleratorState(_from_accelerator)", "state.AcceleratorState(deepspeed_plugin)",
    ],
    "without a number: behind what was seen at the checkpoint that was loaded, if any": [
        "*skip_first_batches(num_batches)",
    ],
    "the port is chosen by the system, so that two notebooks never fight for one": ["*notebook_launcher(use_port)"],
    "the kind of the group follows from the device": ["*InitProcessGroupKwargs(backend)"],
    "`prepare` completes DeepSpeed's configuration for each engine, and leaves the plugin as it is": [
        "*DeepSpeedPlugin.deepspeed_config_process", "*DeepSpeedPlugin.fill_match", "*DeepSpeedPlugin.select",
        "*DeepSpeedPlugin.set_*", "*DeepSpeedPlugin.zero3_init_context_manager",
    ],
    "the one of several plugins must be named": ["state.AcceleratorState.select_deepspeed_plugin(name)"],
    "there is one process group": ["*.destroy_process_group(group)"],
    "None means the default there; here the default itself is written": [
        "Accelerator.clip_grad_norm_(norm_type)", "utils.GradientAccumulationPlugin(num_steps)",
    ],
    "a type must be given: without one nothing would happen": ["utils.synchronize_rng_state(rng_type)"],
    "a positional argument": ["tracking.register_tracker_class(tracker_class)"],
}  # fmt: skip
