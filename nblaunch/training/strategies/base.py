"""How a model is spread over processes: :class:`Strategy`.

A strategy knows nothing of devices beyond the one it is given, nothing of precision and nothing of data. A new one is
one file in this folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from nblaunch.training import models
from nblaunch.training.joining import Member
from nblaunch.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from nblaunch.training.options import TorchDynamoPlugin
from nblaunch.training.precision import Precision


class Strategy(ABC):
    """One way to spread a model."""

    name: str

    moves_models = False
    """Whether :meth:`wrap` brings a model to its device by itself, part by part."""

    holds_parts = False
    """Whether a rank holds but a part of weights or optimizer states, so that all ranks take part in saving them."""

    # --- preparing -----------------------------------------------------------------------------------------------

    def precision(self, precision: Precision) -> Precision:
        """How models compute in ``precision`` where the strategy has a say in it."""
        return precision

    def begin(self, objects: Sequence[Any]) -> None:
        """Look at all that one call of ``prepare`` was given, before any of it is prepared."""

    def agree(self, model: torch.nn.Module) -> None:
        """Make the weights those of rank 0 on every rank, before ``model`` goes to its device; no need if wrap does."""

    @abstractmethod
    def wrap(self, model: torch.nn.Module, member: Member) -> torch.nn.Module:
        """``model``, which lies on its device, ready for training on this rank; the very same object if that is all."""

    def compile(self, model: torch.nn.Module, options: TorchDynamoPlugin) -> torch.nn.Module:
        """What :meth:`wrap` returned, compiled as ``options`` say."""
        return models.compile_model(model, options)

    def optimizer(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """The prepared optimizer that stands for ``optimizer``; None: it is prepared as it is, as most are.

        Models are prepared before it is asked.
        """
        return None

    def scheduler(self, scheduler: Any) -> AcceleratedScheduler | None:
        """The prepared scheduler that stands for ``scheduler``; None: it is prepared as it is, as most are."""
        return None

    def forget(self) -> None:
        """Let go of all that was prepared."""

    # --- gradients -----------------------------------------------------------------------------------------------

    @abstractmethod
    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """While it lasts, ``backward`` through ``model`` leaves gradients unreduced."""

    def backward(self, loss: torch.Tensor, precision: Precision, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)``, scaled where ``precision`` needs it."""
        precision.backward(loss, **kwargs)

    def multiply_gradients(self, model: torch.nn.Module, factor: float) -> None:
        """Multiply the gradients that were accumulated so far in ``model``."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip_grad_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip gradients by their total norm over all parts of all parameters; returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clip gradients elementwise to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """While it lasts, ranks that are through with their data answer for the others' steps."""
        return nullcontext()

    def gradient_order(self, model: torch.nn.Module) -> list[int]:
        """In which order gradients are reduced, as positions of parameters; empty where there is no such order, yet.

        Sums of floating-point numbers depend on it, from three ranks on.
        """
        return []

    def set_gradient_order(self, model: torch.nn.Module, order: Sequence[int]) -> None:
        """Reduce gradients in the order that :meth:`gradient_order` returned in another process, from now on."""

    # --- states; where the strategy holds parts, every rank calls these ------------------------------------------

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """The whole weights of a user's own module.

        Where the strategy holds parts: in CPU memory, on the main process of every machine; nothing on the others.
        """
        return module.state_dict()

    def optimizer_state_dict(self, optimizer: Any) -> dict[str, Any]:
        """The whole state of a prepared optimizer, as torch's optimizers give it. Of parts: see :meth:`state_dict`."""
        return dict(optimizer.state_dict())

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load a whole state that :meth:`optimizer_state_dict` gave."""
        optimizer.load_state_dict(state)

    def save_parts(self, folder: Path, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> bool:
        """Write this rank's parts of all models and optimizers to ``folder``; False: they are to be saved whole."""
        return False

    def own_files(self, folder: Path, rank: int) -> Sequence[Path]:
        """The files in ``folder`` that :meth:`save_parts` has written on ``rank``, as far as their names show."""
        return ()

    def load_parts(self, folder: Path, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> bool:
        """Load what :meth:`save_parts` wrote, over any number of ranks; False: ``folder`` has states as a whole."""
        return False
