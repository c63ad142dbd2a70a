"""What training keeps per process (:class:`Session`), and the views on it that users know by name.

``PartialState``, ``AcceleratorState`` and ``GradientState`` hold nothing: they read the session, which lives in
``context.current().training``. ``DistributedType`` is a label for people, derived when asked for; no code here decides
anything by it.
"""

from __future__ import annotations

import enum
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from nblaunch import context
from nblaunch.training import advice, process
from nblaunch.training.accumulation import GradientSync
from nblaunch.training.losses import LossReport
from nblaunch.training.options import InitProcessGroupKwargs
from nblaunch.training.passes import PassStack
from nblaunch.training.precision import Precision
from nblaunch.training.process import Member, ProcessControl


class DistributedType(str, enum.Enum):
    """How a job computes, as one word for people."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    XLA = "XLA"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"

    def __str__(self) -> str:
        return f"DistributedType.{self.name}"


@dataclass
class Session:
    """One process of a training job: what all its Accelerators, loaders and optimizers share.

    Args:
        member: its place in the job.
        gradients: its accumulation window and active loaders.
        passes: what it shows on the board.
        losses: the loss that it shows there.
        models: prepared models, to tell training from evaluating.
        precision: of the first Accelerator; None before there is one.
        is_resuming: the middle of an epoch was loaded, and is not read yet.
    """

    member: Member
    gradients: GradientSync
    passes: PassStack
    losses: LossReport
    models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    precision: Precision | None = None
    is_resuming: bool = False

    def take_resuming(self) -> bool:
        """Whether the middle of an epoch was loaded that now begins to be read; True once."""
        is_resuming, self.is_resuming = self.is_resuming, False
        return is_resuming

    @property
    def is_training(self) -> bool:
        """Whether gradients are recorded and a prepared model is in training mode."""
        return torch.is_grad_enabled() and any(model.training for model in self.models)


def open_session(cpu: bool = False, init: InitProcessGroupKwargs | None = None) -> Session:
    """The session of this process; the first call joins the job.

    Raises:
        ValueError: ``cpu`` was asked for, but the process computes on another device already.
    """
    ctx = context.current()
    timeout = init.timeout if init is not None else None
    if timeout is not None and process.is_distributed():
        advice.warn(f"timeout={timeout} has no effect: this process has joined its process group already")
    if ctx.training is None:
        member = process.join(cpu, timeout.total_seconds() if timeout is not None else None)
        ctx.training = Session(member, GradientSync(), PassStack(member.slot), LossReport(member.slot))
    session: Session = ctx.training
    if cpu and session.member.device.type != "cpu":
        raise ValueError(
            f"cpu=True, but this process computes on {session.member.device} since its first Accelerator "
            "or PartialState"
        )
    return session


def _has_session() -> bool:
    return context.current().training is not None


def label(member: Member) -> DistributedType:
    """The ``DistributedType`` of a job."""
    if member.topology.world_size == 1:
        return DistributedType.NO
    labels = {"cuda": DistributedType.MULTI_GPU, "xla": DistributedType.XLA}
    return labels.get(member.device.type, DistributedType.MULTI_CPU)


class PartialState(ProcessControl):
    """The place of this process in its job, without an Accelerator.

    Args:
        cpu: compute on the CPU.
        timeout: how long a collective may wait, as :class:`datetime.timedelta`; None: torch's default.

    Raises:
        ValueError: ``cpu=True`` where the process computes on another device already.
    """

    def __init__(self, cpu: bool = False, *, timeout: Any = None) -> None:
        self._session = open_session(cpu, InitProcessGroupKwargs(timeout=timeout))

    @property
    def _member(self) -> Member:
        return self._session.member

    @property
    def distributed_type(self) -> DistributedType:
        """A label for people."""
        return label(self._member)

    @property
    def initialized(self) -> bool:
        """True: a state that exists has joined its job."""
        return True

    @staticmethod
    def _reset_state() -> None:
        context.current().training = None

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type.value}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class AcceleratorState(ProcessControl):
    """What the Accelerator of this process decided.

    Args:
        mixed_precision: None, or the precision that is expected.

    Raises:
        ValueError: no Accelerator was built yet, or it has another precision.
    """

    def __init__(self, mixed_precision: str | None = None) -> None:
        session = context.current().training if _has_session() else None
        if session is None or session.precision is None:
            raise ValueError("AcceleratorState() needs an Accelerator; build `Accelerator()` first")
        if mixed_precision is not None and mixed_precision != session.precision.name:
            raise ValueError(
                f"mixed_precision={mixed_precision!r}, but the Accelerator of this process was built with "
                f"mixed_precision={session.precision.name!r}"
            )
        self._session: Session = session

    @property
    def _member(self) -> Member:
        return self._session.member

    @property
    def distributed_type(self) -> DistributedType:
        """A label for people."""
        return label(self._member)

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"`` or ``"bf16"``."""
        assert self._session.precision is not None
        return self._session.precision.name

    @property
    def initialized(self) -> bool:
        """True: a state that exists has an Accelerator."""
        return True

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        if reset_partial_state:
            PartialState._reset_state()
        elif _has_session():
            context.current().training.precision = None

    def __repr__(self) -> str:
        return f"{PartialState()!r}Mixed precision type: {self.mixed_precision}\n"


class GradientState:
    """Gradient accumulation and the loader being read, as users look at them."""

    @property
    def _gradients(self) -> GradientSync:
        return open_session().gradients

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends in an optimizer step."""
        return self._gradients.sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-steps per optimizer step."""
        return self._gradients.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers count the calls that they leave out."""
        return self._gradients.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends the window."""
        return self._gradients.plugin.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The accumulation settings in force, as keyword arguments."""
        plugin = self._gradients.plugin
        return {
            "num_steps": self._gradients.num_steps,
            "adjust_scheduler": plugin.adjust_scheduler,
            "sync_with_dataloader": plugin.sync_with_dataloader,
            "sync_each_batch": plugin.sync_each_batch,
        }

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in the user's hands is the last one of the active loader."""
        return self._gradients.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real rows in the last global batch of the active loader: 0 = all, -1 = not known."""
        return self._gradients.remainder

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader being read, the innermost of several; None outside of any."""
        return self._gradients.active_loader

    @property
    def dataloader_references(self) -> list[Any]:
        """None, then the prepared loaders being read, outermost first."""
        return [None, *self._gradients.loaders]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self._gradients.active_loader is not None

    @staticmethod
    def _reset_state() -> None:
        if _has_session():
            context.current().training.gradients = GradientSync()
