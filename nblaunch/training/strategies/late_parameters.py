"""Parameters unfrozen, added, frozen or removed after ``prepare`` wrapped the model in DistributedDataParallel (DDP).

DDP averages only the gradients of parameters that required them when DDP was constructed. If a layer is unfrozen, added
or replaced later, each rank keeps its own gradients for it. :class:`LateParameters` finds such parameters before a
forward pass, in the same way on all ranks, and averages their gradients after a backward pass that synchronises.

DDP also waits for the gradients of parameters that were frozen or removed later. While it waits, it averages none of
the gradients in the same bucket. torch raises an error only in the next forward pass, so :class:`LateParameters` raises
one earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.nn.parallel import DistributedDataParallel

from nblaunch import context, formatting
from nblaunch.events import Note
from nblaunch.training.collectives import operations

_is_trained = attrgetter("requires_grad")
_MAX_NAMES = 3


class _Registrations:
    """Counts the parameters and modules that modules in this process gain or lose after the first call to ``watch``."""

    count = 0
    is_watching = False

    @classmethod
    def watch(cls) -> None:
        if not cls.is_watching:
            cls.is_watching = True
            torch_modules.register_module_parameter_registration_hook(cls._note)
            torch_modules.register_module_module_registration_hook(cls._note)
            delete = torch.nn.Module.__delattr__  # torch has no hook for this

            def noted_delete(module: torch.nn.Module, name: str) -> None:
                cls._note()
                delete(module, name)

            torch.nn.Module.__delattr__ = noted_delete  # type: ignore[method-assign]

    @classmethod
    def _note(cls, *registered: Any) -> None:
        cls.count += 1


class LateParameters:
    """Finds late parameters of a DDP model, and averages their gradients.

    Args:
        model: the DDP model, just after its construction.
        module: the user's module inside it.
    """

    were_found = False
    """Whether any model in this process has late parameters."""

    def __init__(self, model: DistributedDataParallel, module: torch.nn.Module) -> None:
        _Registrations.watch()
        named = dict(module.named_parameters())
        ignored = vars(module).get("_ddp_params_and_buffers_to_ignore") or ()  # set by the user
        covered = {name: parameter for name, parameter in named.items() if name not in ignored}
        self._kept = list(named.values())  # keeps them alive, so that new parameters can't get their ids
        self._covered = {name: parameter for name, parameter in covered.items() if parameter.requires_grad}
        self._removed: set[int] = set()
        self._frozen = [parameter for parameter in covered.values() if not parameter.requires_grad]
        self._not_late = {
            id(parameter) for name, parameter in named.items() if parameter.requires_grad or name in ignored
        }
        self._num_registrations = _Registrations.count
        self.parameters: list[torch.nn.Parameter] = []
        model.register_forward_pre_hook(self._look)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_not_late": [parameter for parameter in self._kept if id(parameter) in self._not_late],
            "_removed": [parameter for parameter in self._kept if id(parameter) in self._removed],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        LateParameters.were_found |= bool(self.parameters)
        _Registrations.watch()
        self._not_late = set(map(id, state["_not_late"]))  # unpickled parameters have new ids
        self._removed = set(map(id, state["_removed"]))
        self._num_registrations = -1  # another process has its own count

    def _look(self, model: torch.nn.Module, inputs: Any) -> None:
        """Find late and removed parameters before a forward pass with gradients."""
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return  # a compiled wrapper traces its hooks only once, with the parameters that exist then
        is_changed = self._num_registrations != _Registrations.count
        if is_changed or True in map(_is_trained, self._frozen):
            self._find(model)
        self._check_covered(model)

    def _find(self, model: torch.nn.Module) -> None:
        """Find late and removed parameters. This is a collective if there are late ones."""
        self._num_registrations = _Registrations.count
        present = dict(model.module.named_parameters())  # type: ignore[union-attr]
        self._removed = set(map(id, self._covered.values())) - set(map(id, present.values()))
        named = {
            name: parameter for name, parameter in present.items() if id(parameter) not in self._not_late
        }
        self._frozen = [parameter for parameter in named.values() if not parameter.requires_grad]
        late = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._not_late.update(map(id, late.values()))
        self.parameters += late.values()
        before = {id(parameter) for parameter in self._kept}
        self._kept += late.values()
        for parameter in late.values():
            if id(parameter) not in before:
                # Ranks may have initialised the parameter with different values.
                operations.broadcast(parameter.detach())
        if late:
            LateParameters.were_found = True
            _report(model, list(late))

    def _check_covered(self, model: Any) -> None:
        """Raise RuntimeError if DDP's reducer would wait for gradients of parameters that were frozen or removed."""
        if model.static_graph and learns_graph(model):  # DDP will wait for this pass's parameters
            self._covered = {
                name: parameter
                for name, parameter in self._covered.items()
                if parameter.requires_grad and id(parameter) not in self._removed
            }
            self._removed = set()
            return
        if not model.require_backward_grad_sync:
            return
        is_waited_for = model.static_graph or not model.find_unused_parameters
        if not is_waited_for or not (self._removed or False in map(_is_trained, self._covered.values())):
            return
        named = self._covered
        missing = [
            name
            for name, parameter in named.items()
            if id(parameter) in self._removed or not parameter.requires_grad
        ]
        if len(missing) == len(named):
            return  # the reducer does not wait if no parameter gets a gradient
        change = "removed or replaced" if self._removed else "frozen"
        listed = formatting.first(missing, _MAX_NAMES)
        raise RuntimeError(
            f"{listed} of the {type(model.module).__name__} was {change} after prepare, but "
            "DistributedDataParallel waits for the gradients of all parameters that it was constructed with, so it "
            "would not average the other gradients. Change the model before prepare, or pass "
            "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])"
            f"{' without static_graph' if model.static_graph else ''}"
        )

    def average_gradients(self, is_joining: bool) -> None:
        """Average the gradients of late parameters over ranks. This is a collective if there are any.

        Args:
            is_joining: whether the loop is running in ``join_uneven_inputs``, where ranks without data join only DDP's
                collectives.

        Raises:
            RuntimeError: ``is_joining`` is set, and there are late parameters.
        """
        if is_joining and self.parameters:
            raise RuntimeError(
                f"{len(self.parameters)} parameters were unfrozen or added after prepare. In join_uneven_inputs, "
                "ranks that have run out of data can't take part in averaging these gradients. Unfreeze or add "
                "parameters before prepare, or train with even_batches=True outside join_uneven_inputs"
            )
        groups: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for group in groups.values():
            _average(group)


def learns_graph(model: DistributedDataParallel) -> bool:
    """Return whether DDP will learn a static graph in the next backward pass.

    That pass must reduce gradients, or an internal assertion in the reducer fails (torch 2.13). One more reduction in
    the window does not change its averaged gradients.
    """
    return model.static_graph and not getattr(model, "_static_graph_delay_allreduce_enqueued", True)


@torch.no_grad()
def _average(group: Sequence[torch.nn.Parameter]) -> None:
    """Average gradients of one dtype on one device in one collective; a gradient that a rank lacks counts as zero."""
    grads = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in group]
    has_grad = torch.tensor([float(parameter.grad is not None) for parameter in group])
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    flat, has_any = operations.reduce([flat, has_grad.to(flat.device)], "mean")
    parts = flat.split([parameter.numel() for parameter in group])
    for parameter, part, is_given in zip(group, parts, has_any.tolist(), strict=True):
        if not is_given:
            continue
        if parameter.grad is None:
            parameter.grad = part.view_as(parameter).clone()
        else:
            parameter.grad.copy_(part.view_as(parameter))


def _report(model: torch.nn.Module, names: Sequence[str]) -> None:
    if operations.rank() == 0:
        listed = formatting.first(names, _MAX_NAMES)
        text = (
            f"{listed} of the {type(model.module).__name__} became trainable after prepare; nblaunch averages "
            "the new gradients, because DistributedDataParallel does not"
        )
        context.current().emit(Note.of_job(text))
