"""Where nblaunch's surface differs from the reference's on purpose: a reason, and the names that it covers.

Names are patterns as in :mod:`fnmatch`; brackets are plain text here. Every pattern must cover something.
"""

from __future__ import annotations

FORMS_OF_PARALLELISM = (
    "models are spread with DistributedDataParallel; asking for another form is refused by name"
)
LARGE_MODELS = (
    "models that don't fit into memory (offloading, device maps, quantisation) are not what a launcher does"
)
FP8 = "fp8 needs kernels of other libraries and is not offered"
OTHER_DEVICES = "there is no backend for this device family"
INTERNAL = "an inner part of the reference that scripts don't call"
CONSTRUCTED_BY_PREPARE = "the Accelerator makes it; its other arguments are the parts that it is made of"
KEYWORD_ONLY = "keyword-only behind the first arguments, because the reference inserts new ones in the middle"
CONFIGURATION_FILES = "nblaunch has a default file of its own"

DEVIATIONS: dict[str, list[str]] = {
    FORMS_OF_PARALLELISM: [
        "Accelerator(*_plugin)", "Accelerator(deepspeed_plugins)", "Accelerator(parallelism_config)",
        "Accelerator.deepspeed_ulysses_dl_adapter", "Accelerator.maybe_context_parallel",
        "utils.DeepSpeedSequenceParallelConfig", "*ParallelismConfig",
        "*(parallelism_config)",
        "*(fsdp_plugin)", "*(torch_tp_plugin)", "*egatron*", "*MEGATRON*", "prepare_pippy", "*(torch_device_mesh)",
        "*fsdp*", "*is_fsdp2", "utils.*TensorParallel*", "utils.*ContextParallel*", "utils.*TrainStep",
        "utils.GatheredParameters", "utils.avg_losses_across_data_parallel_group", "utils.model_has_dtensor",
        "utils.get_model_tp_size", "utils.is_pippy_available", "*(full_state_dict)", "*(broadcast_from_rank0)",
    ],
    LARGE_MODELS: [
        "*offload*", "*Offload*", "dispatch_model", "*infer_auto_device_map",
        "load_checkpoint_and_dispatch", "*load_checkpoint_in_model(*)", "Accelerator.verify_device_map",
        "utils.align_module_device", "utils.check_device_map", "utils.check_tied_parameters_*",
        "utils.compute_module_sizes",
        "utils.find_tied_parameters", "utils.retie_parameters", "utils.ensure_weights_retied",
        "utils.get_balanced_memory",
        "utils.get_max_*", "utils.named_module_tensors", "utils.set_module_tensor_to_device", "utils.dtype_byte_size",
        "utils.CustomDtype", "utils.*quantize*", "utils.*Quantization*", "utils.*bnb_*",
        "utils.is_bnb_available(min_version)",
        "utils.is_bitsandbytes_multi_backend_available", "utils.calculate_maximum_sizes", "utils.id_tensor_storage",
        "utils.get_module_children_bottom_up", "utils.load_state_dict", "utils.PrefixedDataset",
        "utils.extract_submodules_state_dict",
    ],
    FP8: ["*fp8*", "*FP8*", "utils.*RecipeKwargs", "utils.*transformer_engine*", "utils.*ao_layers", "utils.*torchao*",
          "utils.convert_model", "utils.is_msamp_available", "utils.filter_first_and_last_linear_layers"],
    OTHER_DEVICES: [
        "*DistributedType.MULTI_?*", "utils.RNGType.*", "utils.DynamoBackend.NEURON",
        "utils.is_habana_gaudi1", "utils.is_neuron_available",
        "utils.is_xccl_available", "utils.is_rocm_available",
        "utils.is_amdsmi_available", "utils.install_xla",
    ],
    CONFIGURATION_FILES: ["utils.write_basic_config(save_location)"],
    "only SageMaker, or only the reference's own command line, needs it": [
        "*agemak*", "*SageMaker*", "utils.ComputeEnvironment", "utils.PrepareForLaunch", "utils.prepare_*_env",
        "utils.prepare_sagemager_args_inputs",
        "utils.prepare_tpu", "utils.convert_dict_to_env_variables", "launchers.test_launch",
        "utils.merge_fsdp_weights", "utils.get_cpu_distributed_information", "utils.set_numa_affinity",
        "utils.check_cuda_p2p_ib_support", "utils.check_os_kernel", "utils.is_port_in_use",
        "utils.are_libraries_initialized",
        "utils.get_gpu_info",
    ],
    "the libraries behind it are not among the trackers; write a GeneralTracker": [
        "tracking.AimTracker", "tracking.ClearMLTracker", "tracking.CometMLTracker", "tracking.DVCLiveTracker",
        "tracking.SwanLabTracker", "tracking.TrackioTracker", "utils.LoggerType.*",
    ],
    "a tracker hands out the library's own object for everything beyond logging values: `tracker.tracker`": [
        "tracking.MLflowTracker.log_artifacts",
    ],
    INTERNAL: [
        "*FullyShardedDataParallelPlugin.set_auto_wrap_policy",
        "*FullyShardedDataParallelPlugin.validate_mixed_precision_policy",
        "data_loader.DataLoaderAdapter", "data_loader.DataLoaderStateMixin", "data_loader.get_sampler",
        "data_loader.*.adjust_state_dict_for_prefetch", "data_loader.*.begin", "data_loader.*.end",
        "data_loader.*.reset",
        "data_loader.*.get_sampler", "optimizer.move_to_device", "optimizer.patch_optimizer_step", "state.do_nothing",
        "state.ThreadLocalSharedDict", "state.GradientState.is_xla_gradients_synced",
        "tracking.filter_trackers", "tracking.get_available_trackers", "tracking.on_main_process", "is_rich_available",
        "*DistributedDataParallelKwargs.register_comm_hook", "*DistributedDataParallelKwargs.to_dict(ignore_keys)",
        "utils.clean_state_dict_for_safetensors", "utils.compile_regions*", "utils.has_compiled_regions",
        "utils.deepspeed_required",
        "utils.contextual_*", "utils.convert_bytes", "utils.convert_file_size_to_int", "utils.convert_outputs_to_fp32",
        "utils.copy_tensor_to_devices", "utils.get_current_device_type", "utils.get_grad_scaler",
        "utils.get_mixed_precision_context_manager", "utils.get_pretty_name", "utils.honor_type",
        "utils.ignorant_find_batch_size", "utils.is_import_timer_available",
        "utils.is_pynvml_available", "utils.is_weights_only_available", "utils.load", "utils.merge_dicts",
        "utils.recursive_getattr",
    ],
    "variables are read through one table, in nblaunch/env.py": [
        "utils.get_int_from_env", "utils.parse_choice_from_env", "utils.parse_flag_from_env", "utils.str_to_bool",
    ],
    "packaging.version does it": ["utils.compare_versions", "utils.is_torch_version"],
    "an optimizer that needs it is not supported": ["Accelerator.lomo_backward", "utils.is_lomo_available"],
    KEYWORD_ONLY: [
        "Accelerator(rng_types)", "Accelerator(log_with)", "Accelerator(project_*)",
        "Accelerator(gradient_accumulation_plugin)", "Accelerator(step_scheduler_with_optimizer)",
        "Accelerator(kwargs_handlers)", "Accelerator(dynamo_backend)",
    ],
    CONSTRUCTED_BY_PREPARE: [
        "data_loader.DataLoaderShard(*)", "data_loader.DataLoaderDispatcher(*)",
        "data_loader.SkipDataLoader(use_stateful_dataloader)", "optimizer.AcceleratedOptimizer(*)",
        "scheduler.AcceleratedScheduler(*)", "state.AcceleratorState(cpu)", "state.AcceleratorState(dynamo_plugin)",
        "state.AcceleratorState(_from_accelerator)", "state.AcceleratorState(deepspeed_plugin)",
    ],
    "an attribute of instances here": ["data_loader.*.end_of_dataloader", "data_loader.*.remainder"],
    "a loader of its own kind for streams that are not prepared; prepared ones can do it": [
        "data_loader.SkipDataLoader.*state_dict",
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
        "Accelerator.clip_grad_norm_(norm_type)", "optimizer.AcceleratedOptimizer.zero_grad(set_to_none)",
        "utils.GradientAccumulationPlugin(num_steps)", "utils.TorchDynamoPlugin(*)",
    ],
    "a type must be given: without one nothing would happen": ["utils.synchronize_rng_state(rng_type)"],
    "a positional argument": ["tracking.register_tracker_class(tracker_class)"],
}  # fmt: skip
