"""Trace a training step of an Accelerator on PJRT CPU, and write its program for a TPU compiler.

    python -m tests.tpu_compiler.trace_step FILE '{"precision": "bf16", "replicas": 8}'

It traces the second step, in which the optimizer has its state. With several replicas, gradients are averaged as on a
TPU, by XLA's own all-reduce. PJRT CPU can't execute that, but the program is only written. It prints the number of
parameters as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F


def network(width: int) -> nn.Module:
    """Return the network of notebook 03 if ``width`` is 0, or else layers of this width."""
    if width:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def write(
    file: Path,
    precision: str = "no",
    downcast: bool = False,
    replicas: int = 1,
    width: int = 0,
    spmd: bool = False,
    sharded: bool = False,
) -> dict[str, Any]:
    """Write the program of a training step; return its facts."""
    import torch_xla
    import torch_xla.runtime as xr

    from nblaunch import Accelerator, FullyShardedDataParallelPlugin
    from nblaunch.backends import xla, xla_runtime

    accelerator = Accelerator(
        mixed_precision=precision,
        downcast_bf16=downcast,
        strategy="spmd" if spmd else None,
        fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None,
    )
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    shape = (16, width) if width else (16, 1, 8, 8)
    batches = [(torch.rand(shape), torch.randint(0, 10, (16,)))] * 2
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    program = b""
    for number, (inputs, targets) in enumerate(loader):
        loss = F.cross_entropy(model(inputs).flatten(1), targets)
        accelerator.backward(loss)
        if number == 0:
            optimizer.step()
            optimizer.zero_grad()
            continue
        with _as_on_a_tpu(xla, xla_runtime, xr, replicas):
            optimizer.step()
        # Everything that exists when the step is executed, including gradients, which the loop drops only afterwards.
        kept = [loss, *model.parameters(), *(parameter.grad for parameter in model.parameters())]
        for state in optimizer.state.values():
            kept += [
                value for value in state.values() if torch.is_tensor(value) and value.device.type == "xla"
            ]
        program = torch_xla._XLAC._get_xla_tensors_hlo(kept).encode()
        break
    file.write_bytes(program)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "num_parameters": num_parameters,
        "devices": xr.global_runtime_device_count() if spmd else replicas,
    }


def _as_on_a_tpu(xla: Any, xla_runtime: Any, xr: Any, replicas: int) -> Any:
    """Make an optimizer's step reduce gradients over this many replicas, without executing the graph."""
    import torch.distributed as dist

    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(type(xla.BACKEND), "step_boundary"))
    if replicas > 1:
        patches.enter_context(mock.patch.object(xla_runtime, "kind", return_value="TPU"))
        patches.enter_context(mock.patch.object(xr, "_WORLD_SIZE", replicas))
        patches.enter_context(mock.patch.object(dist, "is_initialized", return_value=True))
        patches.enter_context(mock.patch.object(dist, "get_world_size", return_value=replicas))
    return patches


if __name__ == "__main__":
    print(json.dumps(write(Path(sys.argv[1]), **json.loads(sys.argv[2]))))
    sys.stdout.flush()
    os._exit(0)  # the unexecuted graph must not be executed at the end
