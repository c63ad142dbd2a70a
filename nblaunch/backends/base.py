"""The interface of a device family: :class:`Backend`.

A backend holds all that depends on the device and nothing that depends on the strategy. It
has two halves. The *launcher's half* is called in the user's kernel and must never create a device context there:
a context in the kernel is what makes fork impossible. The *worker's half* runs in the process that computes.

Methods with an empty body are steps that only some devices need.

A new device family is one file in this folder with a ``BACKEND`` instance. Outside of nblaunch it is a subclass of
:class:`Backend`, in a cell or a module, of which an instance is registered before the launch::

    from nblaunch import backends

    class Npu(backends.base.Backend):
        name = "npu"
        ...

    backends.register(Npu())
    notebook_launcher(train)      # chosen where its affinity() is the highest, or by backend="npu"

Forked workers know it from the kernel; to fresh interpreters it travels pickled. A script that others launch (torchrun)
registers it itself. Nothing else of nblaunch names a device family where this interface has the answer.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from nblaunch.backends import process_group
from nblaunch.host.gpus import DeviceMeter
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The network interface of connections that stay on this machine."""

NO_FP8 = (
    "fp8 needs an NVIDIA GPU with compute capability 8.9 or higher (L4, H100); use mixed_precision='bf16'"
)
"""Why a device can't compute in fp8."""


def tensors(data: Any) -> Iterator[Any]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors(value)
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from tensors(item)


class Backend(ABC):
    """One device family."""

    name: str
    """As in ``notebook_launcher(..., backend=name)``."""

    dist_backend: str
    """The torch.distributed backend that its workers join: "gloo", "nccl"."""

    distributed_type = "MULTI_CPU"
    """What ``accelerator.distributed_type`` names a job of several processes: a member of ``DistributedType``."""

    drives = ""
    """The hardware, where another family drives the same, so that they are alternatives: "tpu"."""

    compilers: tuple[str, ...] = ("inductor",)
    """Compilers of ``torch.compile`` for it, the usual one first."""

    is_lazy = False
    """Whether a value exists only after :meth:`step_boundary`, so that reading it earlier costs an extra execution."""

    prefetches_to_device = False
    """Whether loaders bring a batch to the device while the one before is computed on."""

    needs_static_shapes = False
    """Whether every new batch shape costs a compilation, so that the last batch of an epoch is completed."""

    reduces_gradients_at_step = False
    """Whether :meth:`reduce_gradients` averages gradients when optimizers step; else a wrapper does in backward."""

    exchanges_on_host = False
    """Whether tensors of the device, other than gradients, travel between ranks by gloo, where the group has it too."""

    num_own_collectives = 0
    """How many collectives this process has begun on its device, outside of torch's process groups."""

    shares_devices = False
    """Whether several workers may use one device, where this backend is asked for by its name."""

    transfers_in_turn = False
    """Whether workers move their models one after the other: all at once would need too much host memory."""

    # --- launcher's half: must not create a device context -------------------------------------------------------

    @property
    @abstractmethod
    def device_noun(self) -> str:
        """What one worker gets, for messages: "CPU core", "GPU"."""

    @property
    def title(self) -> str:
        """What the family is called in a list of families: "GPUs"."""
        return f"{self.device_noun}s"

    @abstractmethod
    def affinity(self) -> int:
        """Return how well this backend suits this machine: 0 = not usable; the highest wins for ``backend="auto"``."""

    @abstractmethod
    def unavailable_reason(self) -> str:
        """Return why ``affinity()`` is 0 and what would change that; asked only then."""

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of devices on this host, which is the default number of workers."""

    def is_present(self) -> bool:
        """Return whether this host has such devices, also where this process can't use them."""
        return self.affinity() > 0 and self.device_count() > 0

    @property
    @abstractmethod
    def is_oversubscribable(self) -> bool:
        """Whether more workers than devices make sense (CPU cores: yes; GPUs: no)."""

    @abstractmethod
    def fork_hazard(self) -> str | None:
        """Return why workers forked from *this* process now can't use the device; None if they can.

        A sentence that completes "fork is not possible here: ...".
        """

    def clean_start_reason(self) -> str | None:
        """Return why workers start from a clean process, unless asked for otherwise, where a fork is possible as well.

        A clause. None: they are forked from this process.
        """
        return None

    def overlooked(self) -> str | None:
        """Return why devices of this family are here, but can't be used and so were not chosen."""
        return None

    def launch_refusal(self) -> str | None:
        """Return why no worker, however it starts, can use the devices now, and what to do; None if they can."""
        return None

    def count_refusal(self, num_processes: int) -> str | None:
        """Return why this number of workers can't start, though there are enough devices; None if it can."""
        return None

    def first_use(self) -> tuple[tuple[str, int, str], ...]:
        """Return where this process first used the device: (file name, line, function), innermost first; or nothing."""
        return ()

    def launch_notes(self, num_processes: int) -> tuple[str, ...]:
        """Return what the user has to know about a launch of so many workers, a sentence each."""
        return ()

    def open_meter(self) -> DeviceMeter:
        """Open what reads the utilisation of the devices from outside."""
        return DeviceMeter()

    def prepare_launcher(self) -> None:
        """Prepare this process before workers are forked from it, with what each would otherwise do by itself.

        Raises:
            RuntimeError: the device's library can't be imported, with the reason.
        """

    def preload(self) -> None:
        """Import in a clean process, from which all workers are about to be forked, what each would import.

        The clean process calls this before :meth:`fork_hazard`. Unlike a kernel, it has loaded nothing but the call,
        and runs no other code.

        Raises:
            RuntimeError: the device's library can't be imported, or the process has used the device already.
        """

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        """Return the environment that a worker needs besides ``Topology.to_env()``; None removes a variable.

        A family adds what its devices need.
        """
        changes: dict[str, str | None] = {**process_group.ALL_JOIN_BEFORE_ANY_GOES_ON}
        if topology.num_nodes == 1:
            # Gloo listens on the address that the host name resolves to; nothing of one machine's job leaves it.
            changes["GLOO_SOCKET_IFNAME"] = LOOPBACK
        return changes

    def spmd_env(self) -> dict[str, str | None] | None:
        """Return changes to :meth:`worker_env` for one worker that drives all devices; None if it can't."""
        return None

    # --- worker's half -------------------------------------------------------------------------------------------

    def prepare_worker(self, topology: Topology) -> None:
        """Prepare a worker, once its environment is set; before its threads are limited and its function is loaded."""

    @abstractmethod
    def device(self, topology: Topology) -> torch.device:
        """Return the device of this worker; may create its context."""

    @abstractmethod
    def precision_refusal(self, precision: str) -> str | None:
        """Return None if ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"`` can be used on this device, else why not."""

    def computes_in_full(self, precision: str) -> bool:
        """Return whether full precision takes the place of one that this device refuses."""
        return False

    def check_precision(self, precision: str) -> None:
        """Raise ValueError, with the reason, where ``precision`` can neither be used on this device nor be replaced."""
        reason = self.precision_refusal(precision)
        if reason is not None and not self.computes_in_full(precision):
            raise ValueError(f"mixed_precision={precision!r} can't be used on {self.name}: {reason}")

    def join(self, topology: Topology, device: torch.device, timeout_s: float | None = None) -> None:
        """Join the default process group of the job, unless that was done. One without an address joins none."""
        process_group.join(self.dist_backend, topology, timeout_s)

    def enable_spmd(self) -> None:
        """Let this process drive all devices of the host as one; called before the device is first used.

        Raises:
            ValueError: the device has no such mode.
            RuntimeError: it is too late: the process uses one device already.
        """
        raise ValueError(
            f"strategy='spmd' needs XLA devices, but this process uses {self.name}; leave it out"
        )

    @property
    def num_spmd_devices(self) -> int:
        """The number of devices that this process drives as one; 0 if each process has its own."""
        return 0

    def shard(self, tensor: torch.Tensor, dimension: int) -> None:
        """Shard ``tensor`` along ``dimension`` over the devices that this process drives as one.

        The tensor is sharded in place: for the process it stays one tensor of the global shape.
        """
        raise NotImplementedError(f"{self.name} has one device per process")

    def set_reporters(
        self,
        *,
        note: Callable[[str], None],
        compiling: Callable[[bool], None],
        fact: Callable[[str, str], None],
    ) -> None:
        """Set the functions by which the device reports to the launcher.

        Args:
            note: takes a sentence for the user.
            compiling: takes whether this process is, most likely, compiling.
            fact: takes a name and a few words for the head of the job's table, as ``("precision", "bf16")``.
        """

    def autocast(self, dtype: torch.dtype, **options: Any) -> AbstractContextManager[Any]:
        """Autocast to ``dtype`` on this device."""
        import torch

        return torch.autocast(device_type=self.device_type, dtype=dtype, **options)

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """Return a gradient scaler for fp16 on this device."""
        import torch

        return torch.amp.GradScaler(self.device_type, **options)

    @property
    def device_type(self) -> str:
        """``torch.device.type`` of its devices."""
        return self.name

    def rng_state(self) -> Mapping[str, Any]:
        """Return the device's random number state, beyond the CPU generator's; empty if there is none."""
        return {}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`rng_state` returned."""

    def downcast_to_bf16(self) -> None:
        """Let ``mixed_precision="bf16"`` leave double precision in fp32; called before the device is first used.

        Raises:
            ValueError: the device has no such mode.
        """
        raise ValueError(
            f"downcast_bf16=True needs XLA devices and can't be used on {self.name}, where mixed_precision='bf16' "
            "computes in bf16 and keeps weights in fp32"
        )

    def switch_to_bf16(self) -> bool:
        """Represent fp32 as bf16 from now on, where the device can, and return whether it does: no autocast then."""
        return False

    def seed(self, seed: int) -> None:
        """Seed the device's generator, where ``torch.manual_seed`` doesn't. Do not take a device to do so."""

    def to_device(self, module: torch.nn.Module, device: torch.device) -> None:
        """Move ``module`` to the device, in place. Its parameters may be other objects afterwards."""
        module.to(device)

    def device_memory(self) -> tuple[int, int, int] | None:
        """Return bytes of its device that this process has taken: now, peak, and total of the device; None: unknown."""
        return None

    def explain_failure(self, error: BaseException) -> tuple[str, ...]:
        """Explain what the device has to do with ``error``, which ended the function, and what to try, line by line."""
        return ()

    def empty_cache(self) -> None:
        """Give cached device memory back."""

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients over ranks before an optimizer step. Called where :attr:`reduces_gradients_at_step`."""

    def begin_step(self, phase: str, batch: Any) -> None:
        """Handle the start of a step of ``phase`` ("training", "evaluating") on ``batch``. Called at every step."""

    def end_step(self) -> None:
        """Handle the end of the step that began last. Called where :attr:`is_lazy`, before the next one begins."""

    def end_loop(self) -> None:
        """Handle the end of a loader."""

    def leave_loop(self) -> None:
        """Handle that a loader's loop is left before its end, as by ``break``."""

    def step_boundary(self) -> None:
        """Handle the end of a training step: cut the graph and run it. Called where :attr:`is_lazy`."""
