"""What a rank imports to train with DeepSpeed: the process from which ranks are forked imports it once for all.

Without it, each rank would import 900 modules and ask the compiler twice which of DeepSpeed's operators it can build.
"""

import deepspeed.ops
import deepspeed.runtime.zero.muon.original_muon
import torch._inductor.compile_fx
import torch.distributed.checkpoint  # noqa: F401

getattr(deepspeed.ops, "__compatible_ops__")  # noqa: B009  # found out at the first look
