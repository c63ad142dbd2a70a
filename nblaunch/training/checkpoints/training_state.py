"""What is saved and loaded of one process: the prepared objects, the registered ones, and the hooks of the person."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from nblaunch.training.options import ProjectConfiguration
from nblaunch.training.prepare import Preparer
from nblaunch.training.session import Session
from nblaunch.training.strategies import Strategy

Hooks = OrderedDict[int, Callable[..., Any]]


class TrainingState:
    """One process's share of a job's state.

    Args:
        session: its session.
        preparer: has the prepared objects.
        project: says where checkpoints go, and how many are kept.

    Attributes:
        custom: the registered objects.
        save_hooks: called before weights are written, by the numbers of their handles.
        load_hooks: called before weights are read, likewise.
    """

    def __init__(self, session: Session, preparer: Preparer, project: ProjectConfiguration) -> None:
        self.session = session
        self.preparer = preparer
        self.project = project
        self.custom: list[Any] = []
        self.save_hooks: Hooks = OrderedDict()
        self.load_hooks: Hooks = OrderedDict()

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.session.member.topology.rank

    @property
    def world_size(self) -> int:
        """Of the job."""
        return self.session.member.topology.world_size

    @property
    def strategy(self) -> Strategy:
        """How models lie on the ranks."""
        return self.preparer.strategy

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Of fp16; None otherwise."""
        return self.session.precision.scaler if self.session.precision is not None else None


def add_hook(hooks: Hooks, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook; the handle removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
