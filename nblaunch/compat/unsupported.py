"""Names of Hugging Face Accelerate that nblaunch does not support, with what to use instead."""

from __future__ import annotations

LARGE_MODELS = (
    "nblaunch does not split models by a device map. To train a model that does not fit on one device, use "
    "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()) or Accelerator(deepspeed_plugin="
    "DeepSpeedPlugin(zero_stage=3)), both from nblaunch.utils. For inference with a device map, import this name from "
    "accelerate itself; both packages can be used together"
)
_PARALLELISM = (
    "nblaunch trains models with DistributedDataParallel, with FSDP2 (Accelerator(fsdp_plugin="
    "FullyShardedDataParallelPlugin())) and with DeepSpeed (Accelerator(deepspeed_plugin=DeepSpeedPlugin())). For "
    "other forms of parallelism use accelerate itself inside the function that notebook_launcher starts"
)
_FP8 = "nblaunch computes in full precision, fp16 or bf16: Accelerator(mixed_precision='bf16')"
_TRACKER = (
    "nblaunch has trackers for tensorboard, wandb, mlflow and jsonl. Any other is a subclass of "
    "nblaunch.tracking.GeneralTracker: Accelerator(log_with=MyTracker(...))"
)

_INSTEAD = {
    LARGE_MODELS: (
        "AlignDevicesHook", "BnbQuantizationConfig", "CpuOffload", "CustomDtype", "LayerwiseCastingHook", "ModelHook",
        "OffloadedWeightsLoader", "PrefixedDataset", "SequentialHook", "UserCpuOffloadHook", "add_hook_to_module",
        "align_module_device", "attach_align_device_hook", "attach_align_device_hook_on_blocks",
        "attach_execution_device_hook", "attach_layerwise_casting_hooks", "bnb", "calculate_maximum_sizes",
        "check_device_map",
        "cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model", "get_balanced_memory",
        "get_max_layer_size", "get_max_memory", "has_offloaded_params", "hooks", "infer_auto_device_map",
        "load_and_quantize_model", "load_offloaded_weight", "load_offloaded_weights", "offload", "offload_state_dict",
        "offload_weight", "remove_hook_from_module", "remove_hook_from_submodules", "save_offload_index",
        "set_module_tensor_to_device",
    ),
    _PARALLELISM: (
        "GatheredParameters", "MegatronLMPlugin", "ParallelismConfig", "TorchContextParallelConfig",
        "TorchTensorParallelConfig", "TorchTensorParallelPlugin", "inference", "megatron_lm", "parallelism_config",
        "prepare_pippy",
    ),
    _FP8: (
        "AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs", "ao", "apply_fp8_autowrap",
        "convert_model", "convert_model_to_fp8_ao", "transformer_engine",
    ),
    _TRACKER: (
        "AimTracker", "ClearMLTracker", "CometMLTracker", "DVCLiveTracker", "SwanLabTracker", "TrackioTracker",
    ),
    "the command line is nblaunch: nblaunch launch, nblaunch config; in Python it is nblaunch.launch(function, args)": (
        "commands",
    ),
}  # fmt: skip

INSTEAD = {name: text for text, names in _INSTEAD.items() for name in names}
"""Name -> explanation with what to use instead."""


def explanation(name: str) -> str:
    """Return the explanation for an unsupported ``name``; empty for any other name."""
    text = INSTEAD.get(name, "")
    return f"nblaunch has no {name}: {text}" if text else ""
