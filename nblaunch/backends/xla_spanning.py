"""One process for all XLA devices of a host (SPMD): choosing it in time, and cutting batches over the devices."""

from __future__ import annotations

from typing import Any

from nblaunch.backends import xla_in_kernel, xla_library
from nblaunch.backends.batches import tensors


def switch_on() -> None:
    """Have the runtime of this process drive all devices as one.

    Raises:
        RuntimeError: it drives one already.
    """
    runtime = xla_library.package().runtime
    if runtime.is_spmd():
        return
    if xla_in_kernel.is_initialised():
        raise RuntimeError(
            "strategy='spmd' must be chosen before the device is first used in the process: pass it to "
            "notebook_launcher, or build the Accelerator first"
        )
    runtime.use_spmd()


class BatchCutter:
    """Has every device hold its part of a batch's rows; does nothing where each process has one device."""

    def __init__(self) -> None:
        self._mesh: Any = None

    def cut(self, batch: Any) -> None:
        """Cut all tensors of ``batch`` on the device. What the devices don't divide is held by all of them."""
        runtime = xla_library.part("runtime")
        if not runtime.is_spmd():
            return
        spmd = xla_library.part("distributed.spmd")
        count = runtime.global_runtime_device_count()
        if self._mesh is None:
            self._mesh = spmd.Mesh(list(range(count)), (count,), ("data",))
        for tensor in tensors(batch):
            if tensor.device.type == "xla" and tensor.ndim and tensor.shape[0] % count == 0:
                spmd.mark_sharding(tensor, self._mesh, ("data", *[None] * (tensor.ndim - 1)))
