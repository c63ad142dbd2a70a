"""Which compilers ``torch.compile`` has, known without importing torch where the name is a well-known one."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from nblaunch.config.kinds import Word

WELL_KNOWN = (
    "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
    "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "ipex", "tvm", "hpu_backend",
)  # fmt: skip
"""Those that Accelerate names. Some are there only once a library is imported, which the script may still do."""


@dataclass(frozen=True)
class Compiler(Word):
    """The name of a compiler, or ``no`` for none."""

    def convert(self, value: Any) -> str:
        name = super().convert(value)
        reason = refusal(name)
        if reason:
            raise ValueError(reason)
        return name


def refusal(name: str) -> str:
    """Why there is no compiler called ``name``, as ``must be one of ...``; empty where there is one."""
    if name in WELL_KNOWN:
        return ""
    torch_compiler = importlib.import_module("torch.compiler")
    if name in torch_compiler.list_backends(exclude_tags=()):
        return ""
    usual = sorted({"eager", "aot_eager", *torch_compiler.list_backends()})
    return f"must be no, or one of torch's compilers: {', '.join(usual)}"
