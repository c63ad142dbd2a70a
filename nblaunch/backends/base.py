"""What a device family has to say: :class:`Backend`.

A backend holds all that depends on the device and nothing that depends on how a model is spread over processes. It
has two halves. The *launcher's half* is called in the person's kernel and must never create a device context there:
a context in the kernel is what makes fork impossible. The *worker's half* runs in the process that computes.

Methods with an empty body are steps that only some devices need.

A new device family is one file in this folder with a ``BACKEND`` instance; ``backends/__init__.py`` finds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch


class Backend(ABC):
    """One device family."""

    name: str
    """As in ``notebook_launcher(..., backend=name)``."""

    device_noun: str
    """What one worker gets, for messages: "CPU core", "GPU"."""

    process_group: str
    """The torch.distributed backend that its workers join: "gloo", "nccl"."""

    # --- launcher's half: must not create a device context -------------------------------------------------------

    @abstractmethod
    def affinity(self) -> int:
        """How well this backend suits this machine: 0 = not usable here; the highest wins for ``backend="auto"``."""

    @abstractmethod
    def unavailable_reason(self) -> str:
        """Why ``affinity()`` is 0 and what would change that; asked only then."""

    @abstractmethod
    def device_count(self) -> int:
        """Number of devices on this host, which is the default number of workers."""

    @property
    @abstractmethod
    def is_oversubscribable(self) -> bool:
        """Whether more workers than devices make sense (CPU cores: yes; GPUs: no)."""

    @abstractmethod
    def fork_hazard(self) -> str | None:
        """Why workers forked from *this* process now could not use the device; None where they can.

        A sentence that completes "fork is not possible here: ...".
        """

    @abstractmethod
    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        """Environment that a worker needs besides ``Topology.to_env()``; None removes a variable."""

    # --- worker's half -------------------------------------------------------------------------------------------

    @abstractmethod
    def device(self, topology: Topology) -> torch.device:
        """The device of this worker; may create its context."""

    @abstractmethod
    def supports_precision(self, precision: str) -> str | None:
        """None where ``"no"``, ``"fp16"`` or ``"bf16"`` can be used on this device, otherwise why not."""

    def join(self, topology: Topology, device: torch.device, timeout_s: float | None = None) -> None:
        """Join the default process group of the job, unless that was done. A process on its own joins none."""
        from nblaunch.backends import process_group

        process_group.join(self.process_group, topology, timeout_s)

    def autocast(self, dtype: torch.dtype, **options: Any) -> AbstractContextManager[Any]:
        """Autocast to ``dtype`` on this device."""
        import torch

        return torch.autocast(device_type=self.device_type, dtype=dtype, **options)

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """A gradient scaler for fp16 on this device."""
        import torch

        return torch.amp.GradScaler(self.device_type, **options)

    @property
    def device_type(self) -> str:
        """``torch.device.type`` of its devices."""
        return self.name

    def rng_state(self) -> Mapping[str, Any]:
        """The device's random number state, beyond the CPU generator's; empty where there is none."""
        return {}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`rng_state` returned."""

    def downcast_to_bf16(self) -> None:
        """Represent fp32 numbers as bf16 everywhere; called before the device is first used.

        Raises:
            ValueError: the device has no such mode.
        """
        raise ValueError(
            f"downcast_bf16=True is for XLA devices and can't be used on {self.name}; there, mixed_precision='bf16' "
            "computes in bf16 and keeps weights in fp32"
        )

    def wrap_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a prepared loader on their way: a device that compiles for every shape may complete them."""
        return batches

    def empty_cache(self) -> None:
        """Give cached device memory back."""

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients over ranks before an optimizer step, where no wrapper of the model does it."""

    def step_boundary(self) -> None:
        """A training step ended: lazy devices cut and run their graph here."""

    def transfer_lock(self) -> AbstractContextManager[Any]:
        """Held while a model moves to the device, where all workers moving at once would need too much memory."""
        return nullcontext()
