"""Single program, multiple data (SPMD): one process drives all XLA devices of its host as one.

Tensors have their global shapes. Which part of a tensor each device holds is an annotation, from which XLA's compiler
derives how every operation is cut, and the collectives in between. What is not annotated is held whole by all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nblaunch.backends import first_use, xla_runtime
from nblaunch.backends.base import tensors

if TYPE_CHECKING:
    import torch

_AXIS = "devices"


class SpmdDevices:
    """The devices of the host as a mesh of one axis, once :meth:`switch_on` was called."""

    def __init__(self) -> None:
        self._mesh: Any = None
        self._has_reported = False

    def switch_on(self) -> None:
        """Have the runtime of this process drive all devices as one.

        Raises:
            RuntimeError: it drives one already.
        """
        runtime = xla_runtime.package().runtime
        if runtime.is_spmd():
            return
        if first_use.is_xla_initialised():
            raise RuntimeError(
                "strategy='spmd' must be chosen before the device is first used in the process: pass it to "
                "notebook_launcher, or build the Accelerator first"
            )
        runtime.use_spmd()

    @property
    def count(self) -> int:
        """Return the number of devices that this process drives as one; 0 where it drives one by itself."""
        return int(self._whole_mesh().size()) if xla_runtime.part("runtime").is_spmd() else 0

    def _whole_mesh(self) -> Any:
        if self._mesh is None:
            count = xla_runtime.part("runtime").global_runtime_device_count()
            self._mesh = xla_runtime.part("distributed.spmd").Mesh(list(range(count)), (count,), (_AXIS,))
        return self._mesh

    def shard(self, tensor: torch.Tensor, dimension: int) -> None:
        """Cut ``tensor`` along ``dimension``, in place. The last parts are padded where it does not come out even."""
        axes = [_AXIS if index == dimension else None for index in range(tensor.ndim)]
        xla_runtime.part("distributed.spmd").mark_sharding(tensor, self._whole_mesh(), tuple(axes))

    def cut_batch(self, batch: Any, note: Callable[[str], None]) -> None:
        """Have every device hold its rows of all tensors in ``batch``. What they don't divide is held by all of them.

        Args:
            batch: nested tensors.
            note: takes a sentence for the user, the first time that a batch can't be cut.
        """
        count = self.count
        if not count:
            return
        for tensor in tensors(batch):
            if tensor.device.type != "xla" or not tensor.ndim:
                continue
            if tensor.shape[0] % count == 0:
                self.shard(tensor, 0)
            elif not self._has_reported:
                self._has_reported = True
                note(
                    f"a batch of {tensor.shape[0]} rows can't be cut over {count} devices: each computes all of it. "
                    f"Choose a batch_size that {count} divides"
                )
