"""What a job takes of the host's memory once its models are placed: shown to users as a note of the job."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nblaunch import context, formatting
from nblaunch.host import memory
from nblaunch.training.collectives import operations
from nblaunch.training.joining import JoinedProcess, barrier


@dataclass(frozen=True)
class JobHostMemory:
    """Memory of the host that the workers of a job take, and the process that launched them.

    Args:
        num_workers: workers of the job.
        total_bytes: what they take together with the process that launched them, if nblaunch did; a page that
            several share is counted once; without ``device_bytes``.
        has_launcher: nblaunch launched them.
        model_bytes: parameters and buffers of the model.
        device_bytes: host memory in which simulated devices (PJRT CPU) keep their tensors.
        is_built_in_workers: every worker has built a model of its own, instead of one that was passed to it.
    """

    num_workers: int
    total_bytes: int
    has_launcher: bool
    model_bytes: int
    device_bytes: int
    is_built_in_workers: bool


def gather_host_memory(model: torch.nn.Module, process: JoinedProcess) -> JobHostMemory | None:
    """Measure what the job takes of the host's memory. A collective: all ranks must call it once they placed ``model``.

    Returns:
        The measurement, on rank 0. None on the others, and where the device family reports none or the host can't be
        read.
    """
    model_bytes = sum(
        tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())
    )
    device_bytes = process.backend.host_bytes_of_device(model_bytes)
    if device_bytes is None:
        return None
    barrier(process.device)  # no rank is still moving
    sizes = operations.gather_object([memory.proportional_bytes()])
    if process.topology.rank != 0 or None in sizes:
        return None
    has_launcher = context.is_worker()
    launcher_bytes = memory.proportional_bytes(context.current().parent_pid) if has_launcher else 0
    world_size = process.topology.world_size
    return JobHostMemory(
        num_workers=world_size,
        total_bytes=sum(sizes) + (launcher_bytes or 0) - world_size * device_bytes,
        has_launcher=has_launcher,
        model_bytes=model_bytes,
        device_bytes=world_size * device_bytes,
        is_built_in_workers=world_size > 1 and context.current().slot.built_bytes >= model_bytes,
    )


def describe_host_memory(usage: JobHostMemory) -> str:
    """Return the line that is shown: how much, and what could be saved."""
    model = f"model {formatting.size(usage.model_bytes)}"
    held = (
        f"{model} built in every worker; held once if it is built in the notebook and passed: "
        "notebook_launcher(function, (model,))"
        if usage.is_built_in_workers
        else f"{model} held once"
    )
    whose = formatting.count(usage.num_workers, "worker")
    whose += " and the launching process" if usage.has_launcher else ""  # the table has the workers alone
    line = f"{whose}, host memory {formatting.size(usage.total_bytes)} ({held})"
    if usage.device_bytes:
        line += f", besides {formatting.size(usage.device_bytes)} that stand for device memory"
    allocator = memory.other_allocator()
    return line if not allocator else f"{line}; {allocator} gives memory back by its own rules"
