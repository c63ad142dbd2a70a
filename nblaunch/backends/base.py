"""The interface of a device family: :class:`Backend`.

A backend contains everything that depends on the device, and nothing that depends on the strategy. It has two halves.
The *launcher's half* is called in the user's kernel and must never create a device context there, because a context in
the kernel makes forks impossible. The *worker's half* runs in the process that computes.

Methods with an empty body are steps that only some devices need.

To add a device family, add a module with an instance to this folder. Outside nblaunch, define a subclass of
:class:`Backend` in a cell or a module, and register an instance before the launch::

    from nblaunch import backends

    class Npu(backends.base.Backend):
        name = "npu"
        ...

    backends.register(Npu())
    notebook_launcher(train)      # chosen if its affinity() is the highest, or by backend="npu"

Forked workers inherit the registered backend; fresh interpreters receive a pickled copy. A script that another launcher
(torchrun) starts must register the backend itself. Code outside this folder uses this interface and does not name
device families.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nblaunch.backends import process_group
from nblaunch.host.gpus import DeviceMeter
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The network interface for connections that stay on this machine."""

NO_FP8 = (
    "fp8 needs an NVIDIA GPU with compute capability 8.9 or higher (L4, H100); use mixed_precision='bf16'"
)
"""Why a device can't compute in fp8, and what to use instead."""


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


def _drop(*values: object) -> None:
    """Drop a report, because the process has no launcher."""


@dataclass(frozen=True)
class Reporters:
    """The functions through which a device reports to the launcher.

    Args:
        note: called with a sentence for the user.
        compiling: called with a flag: whether this process is probably compiling.
        fact: called with a name and a few words for the header of the job's table: ``("precision", "bf16")``.
    """

    note: Callable[[str], None] = _drop
    compiling: Callable[[bool], None] = _drop
    fact: Callable[[str, str], None] = _drop

    def __reduce__(self) -> tuple[Any, ...]:
        # An object that refers to a backend, such as a prepared model, may be sent to a process without a launcher.
        return Reporters, ()


class Backend(ABC):
    """One device family."""

    name: str
    """The name in ``notebook_launcher(..., backend=name)``."""

    dist_backend: str
    """The torch.distributed backend that its workers use, such as "gloo" or "nccl"."""

    distributed_type = "MULTI_CPU"
    """``accelerator.distributed_type`` in a job with several processes: a member of ``DistributedType``."""

    reporters = Reporters()
    """How this process's device reports to the launcher; without a launcher, reports are dropped."""

    drives = ""
    """The hardware, such as "tpu"; families that drive the same hardware are alternatives."""

    compilers: tuple[str, ...] = ("inductor",)
    """The compilers that ``torch.compile`` can use for this family, starting with the default."""

    is_lazy = False
    """Whether values exist only after :meth:`step_boundary`, so that an earlier read costs an extra execution."""

    prefetches_to_device = False
    """Whether loaders move a batch to the device while the device is still computing on the previous batch."""

    needs_static_shapes = False
    """Whether every new batch shape triggers a compilation; if so, the last batch of an epoch is padded."""

    reduces_gradients_at_step = False
    """Whether :meth:`reduce_gradients` averages gradients in optimizer steps; if not, a wrapper does so in backward."""

    exchanges_on_host = False
    """Whether ranks exchange all device tensors except gradients through gloo, if the group also has it."""

    num_own_collectives = 0
    """Number of collectives that this process has started on its device outside torch's process groups."""

    shares_devices = False
    """Whether several workers may share a device if the user names this backend."""

    transfers_in_turn = False
    """Whether workers move their models one by one, because moving all at once would need too much host memory."""

    # --- launcher's half: must not create a device context -------------------------------------------------------

    @property
    @abstractmethod
    def device_noun(self) -> str:
        """The device of one worker, for messages: "CPU core", "GPU"."""

    @property
    def title(self) -> str:
        """The name of the family in a list of families: "GPUs"."""
        return f"{self.device_noun}s"

    @abstractmethod
    def affinity(self) -> int:
        """Return how well this backend suits this machine: 0 = unusable; ``backend="auto"`` chooses the highest."""

    @abstractmethod
    def unavailable_reason(self) -> str:
        """Return why ``affinity()`` is 0 and what would change that; called only if it is 0."""

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of devices on this host, which is the default number of workers."""

    def is_present(self) -> bool:
        """Return whether this host has such devices, even if this process can't use them."""
        return self.affinity() > 0 and self.device_count() > 0

    @property
    @abstractmethod
    def is_oversubscribable(self) -> bool:
        """Whether running more workers than devices makes sense (CPU cores: yes; GPUs: no)."""

    @abstractmethod
    def fork_hazard(self) -> str | None:
        """Return why workers forked from *this* process at this point can't use the device; None if they can.

        The text completes the sentence "fork is not possible here: ...".
        """

    def clean_start_reason(self) -> str | None:
        """Return why workers should start from a clean process by default although a fork is possible.

        The reason is a clause. None means that workers are forked from this process.
        """
        return None

    def overlooked(self) -> str | None:
        """Return why this family's devices on this host can't be used and were therefore not chosen."""
        return None

    def launch_problem(self) -> str | None:
        """Return why workers can't use the devices now, however they start, and what to do; None if they can."""
        return None

    def count_problem(self, num_processes: int) -> str | None:
        """Return why this number of workers can't start although there are enough devices; None if they can."""
        return None

    def first_use(self) -> tuple[tuple[str, int, str], ...]:
        """Return where the device was first used: (file name, line, function), innermost first; empty if unknown."""
        return ()

    def launch_notes(self, num_processes: int) -> tuple[str, ...]:
        """Return sentences that the user should read about a launch of this many workers."""
        return ()

    def open_meter(self) -> DeviceMeter:
        """Open a meter that reads the devices' utilisation without a device context."""
        return DeviceMeter()

    def prepare_launcher(self) -> None:
        """Prepare this process before it forks workers, by doing once what each worker would otherwise repeat.

        Raises:
            RuntimeError: the device's library can't be imported; the message gives the reason.
        """

    def preload(self) -> None:
        """Import packages in a clean process, so that the workers forked from it need not import them.

        The clean process calls this before :meth:`fork_hazard`. Unlike a kernel, the clean process has loaded
        only the call and runs no other code.

        Raises:
            RuntimeError: the device's library can't be imported, or the process has already used the device.
        """

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        """Return the environment variables that workers need besides ``Topology.to_env()``; None removes a variable.

        Subclasses add variables that their devices need.
        """
        changes: dict[str, str | None] = {**process_group.ALL_JOIN_BEFORE_ANY_GOES_ON}
        if topology.num_nodes == 1:
            # Gloo listens on the address that the host name resolves to; a job on one machine must not be reachable
            # from outside.
            changes["GLOO_SOCKET_IFNAME"] = LOOPBACK
        return changes

    def spmd_env(self) -> dict[str, str | None] | None:
        """Return changes to :meth:`worker_env` for a worker that drives all devices; None if no worker can."""
        return None

    # --- worker's half -------------------------------------------------------------------------------------------

    def prepare_worker(self, topology: Topology) -> None:
        """Prepare a worker whose environment is set, before its threads are limited and its function is loaded."""

    @abstractmethod
    def device(self, topology: Topology) -> torch.device:
        """Return the device of this worker. The call may create the device's context."""

    @abstractmethod
    def precision_problem(self, precision: str) -> str | None:
        """Return why this device can't use ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; None if it can."""

    def computes_in_full(self, precision: str) -> bool:
        """Return whether this device falls back to full precision if it does not support ``precision``."""
        return False

    def check_precision(self, precision: str) -> None:
        """Raise ValueError with the reason if this device can neither use nor replace ``precision``."""
        reason = self.precision_problem(precision)
        if reason is not None and not self.computes_in_full(precision):
            raise ValueError(f"mixed_precision={precision!r} can't be used on {self.name}: {reason}")

    def join(self, topology: Topology, device: torch.device, timeout_s: float | None = None) -> None:
        """Join the job's default process group unless this process is already in it. A job without an address has no
        group.
        """
        process_group.join(self.dist_backend, topology, timeout_s)

    def enable_spmd(self) -> None:
        """Let this process drive all devices of the host as one device; call this before the first use of the device.

        Raises:
            ValueError: the device has no such mode.
            RuntimeError: it is too late, because the process already uses one device.
        """
        raise ValueError(
            f"strategy='spmd' needs XLA devices, but this process uses {self.name}; leave the argument out"
        )

    @property
    def num_spmd_devices(self) -> int:
        """Number of devices that this process drives as one device; 0 if each process has its own device."""
        return 0

    def shard(self, tensor: torch.Tensor, dimension: int) -> None:
        """Shard ``tensor`` along ``dimension`` over the devices that this process drives as one device.

        The tensor is sharded in place: to the process it remains one tensor of the global shape.
        """
        raise NotImplementedError(f"{self.name} has one device per process")

    def set_reporters(self, reporters: Reporters) -> None:
        """Set :attr:`reporters`."""
        self.reporters = reporters

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
        """Return the device's random number state, in addition to the CPU generator's; empty if there is none."""
        return {}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`rng_state` returned."""

    def downcast_to_bf16(self) -> None:
        """Let ``mixed_precision="bf16"`` store doubles as fp32; call this before the first use of the device.

        Raises:
            ValueError: the device has no such mode.
        """
        raise ValueError(
            f"downcast_bf16=True needs XLA devices and can't be used on {self.name}, where mixed_precision='bf16' "
            "computes in bf16 and keeps weights in fp32"
        )

    def switch_to_bf16(self) -> bool:
        """Make the device store fp32 as bf16 from now on, so that autocast is not needed; return whether it does."""
        return False

    def seed(self, seed: int) -> None:
        """Seed the device's generator if ``torch.manual_seed`` does not. This must not acquire a device."""

    def to_device(self, module: torch.nn.Module, device: torch.device) -> None:
        """Move ``module`` to the device, in place. Its parameters may be replaced by other objects."""
        module.to(device)

    def device_memory(self) -> tuple[int, int, int] | None:
        """Return device memory in bytes: used by this process, its peak, and the device's total; None if unknown."""
        return None

    def explain_failure(self, error: BaseException) -> tuple[str, ...]:
        """Return lines that explain the device's role in ``error``, which ended the function, and suggest a remedy."""
        return ()

    def empty_cache(self) -> None:
        """Return cached device memory to the system."""

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients across ranks before an optimizer step. Called if :attr:`reduces_gradients_at_step`."""

    def begin_step(self, phase: str, batch: Any) -> None:
        """Handle the start of a step of ``phase`` ("training", "evaluating") on ``batch``. Called for every step."""

    def end_step(self) -> None:
        """Handle the end of the previous step. Called if :attr:`is_lazy`, before the next step begins."""

    def end_loop(self) -> None:
        """Handle the end of a loader."""

    def leave_loop(self) -> None:
        """Handle an early exit from a loop over a loader, for example by ``break``."""

    def step_boundary(self) -> None:
        """Handle the end of a training step: cut the graph and run it. Called if :attr:`is_lazy`."""
