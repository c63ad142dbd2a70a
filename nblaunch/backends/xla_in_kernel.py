"""How this process has come to use XLA devices, if it has: what a fork of it has to know, and where it was."""

from __future__ import annotations

import re
import sys
from typing import Any

from nblaunch import env
from nblaunch.backends import autograd_probe, cell_history

# What initialises the runtime in the process that calls it; found by trying each in torch_xla 2.9.
INITIALISERS = re.compile(
    r"xla_device|torch_xla\.device|device_count\(|get_xla_supported_devices|world_size\(|global_ordinal|"
    r"is_master_ordinal|process_index\(|is_bf16_supported|mark_step|torch_xla\.sync|wait_device_ops|rendezvous\(|"
    r"torch_xla\.manual_seed|metrics_report|start_server|xla://|device=.?.xla|\.to\(.?.xla|xmp\.spawn|Accelerator\("
)


def is_initialised() -> bool:
    """Whether the runtime is up in this process. The question itself leaves it as it is."""
    torch_xla: Any = sys.modules.get("torch_xla")
    # A private name, and the one that torch_xla's own launcher asks.
    ask = getattr(getattr(torch_xla, "_XLAC", None), "_xla_runtime_is_initialized", None)
    return bool(ask()) if ask is not None else False


def who_initialised() -> str:
    """The cell and line that most likely did it; empty where there is none."""
    return cell_history.guess(INITIALISERS)


def backward_hazard() -> str | None:
    """Why the first backward of a forked copy would fail, because one ran here before; None where it would not.

    torch_xla must have been imported.
    """
    failure = autograd_probe.fork_failure(_small_backward)
    if failure is None:
        return None
    first_line = failure.splitlines()[0]
    return f"backward() ran in this process, and would fail in every forked worker ({first_line:.120})"


def _small_backward() -> None:
    """In a probing child: the first backward on an XLA device, which is the CPU whatever this host has."""
    env.apply({"PJRT_DEVICE": "CPU"})
    import torch

    leaf = torch.ones(2, device="xla", requires_grad=True)
    leaf.sum().backward()
