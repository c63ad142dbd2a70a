"""Names of Hugging Face Accelerate that nblaunch does not support, with what to use instead."""

from __future__ import annotations

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
    _PARALLELISM: (
        "GatheredParameters", "MegatronLMPlugin", "megatron_lm",
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
