"""Constants of Accelerate's ``utils``: the oldest versions with a feature, for comparisons in scripts."""

from __future__ import annotations

FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"  # a version in NVIDIA's images, before the release
FSDP2_PYTORCH_VERSION = "2.6.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"
BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"

TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]
