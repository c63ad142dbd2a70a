"""Names of Hugging Face Accelerate that nblaunch does not support, with what to use instead."""

from __future__ import annotations

_PARALLELISM = (
    "nblaunch trains models with DistributedDataParallel, with FSDP2 (Accelerator(fsdp_plugin="
    "FullyShardedDataParallelPlugin())) and with DeepSpeed (Accelerator(deepspeed_plugin=DeepSpeedPlugin())). For "
    "other forms of parallelism use accelerate itself inside the function that notebook_launcher starts"
)
_FP8 = (
    "nblaunch passes fp8 on to torchao: Accelerator(mixed_precision='fp8', kwargs_handlers=[AORecipeKwargs()]). For "
    "Transformer Engine and MS-AMP use accelerate itself inside the function that notebook_launcher starts"
)
_MIXED = "with Accelerator(mixed_precision='bf16'), accelerator.autocast() is the context manager"
_SHARDING = (
    "accelerator.prepare(model) does that with Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())"
)
_TRACKER = (
    "nblaunch has trackers for tensorboard, wandb, mlflow and jsonl. Any other is a subclass of "
    "nblaunch.tracking.GeneralTracker: Accelerator(log_with=MyTracker(...))"
)

_INSTEAD = {
    _PARALLELISM: (
        "AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "MegatronLMDummyDataLoader",
        "MegatronLMDummyScheduler", "MegatronLMPlugin", "T5TrainStep", "add_model_config_to_megatron_parser",
        "avg_losses_across_data_parallel_group", "megatron_lm",
    ),
    "with DeepSpeed's stage 3, use deepspeed.zero.GatheredParameters(parameters) itself": ("GatheredParameters",),
    "accelerator.prepare(model, optimizer) makes DeepSpeed's engine": ("DeepSpeedEngineWrapper",),
    _MIXED: ("get_mixed_precision_context_manager",),
    _SHARDING: (
        "compile_regions_fsdp2", "fsdp2_apply_ac", "fsdp2_canonicalize_names", "fsdp2_load_full_state_dict",
        "fsdp2_prepare_model", "fsdp2_switch_optimizer_parameters", "get_fsdp2_grad_scaler",
    ),
    _FP8: (
        "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs", "apply_fp8_autowrap", "contextual_fp8_autocast",
        "convert_model", "has_transformer_engine_layers", "transformer_engine",
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
