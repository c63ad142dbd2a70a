"""Numbers from this rank's gradients, taken before ranks exchange them.

    DistributedDataParallel     hooks on a few parameters, for one backward pass
    FSDP, fully_shard           the arguments of reduce_scatter and all_reduce, which FSDP calls
    all_reduce(parameter.grad)  the argument, if it is the gradient of a parameter that the optimizer then updates

If ranks exchange gradients that are already equal, they have computed the same thing. Nothing else proves this: ranks
that read the same batch may each use a part of it, and losses may be averaged before ``backward``.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from nblaunch.progress import batches

_NUM_PARAMETERS, _NUM_ELEMENTS = 4, 8  # from a wrapped model, and from each gradient
_MAX_REDUCTIONS = 64  # of a step
_NUM_CALLERS = 16
_FSDP = "torch.distributed.fsdp"


BeforeStep = Callable[[Any, Sequence[Any]], None]
"""Takes the optimizer, and the ``DistributedDataParallel`` models."""


class LocalGradients:
    """Collects numbers from this rank's gradients while ``is_watched`` is True.

    Args:
        wrapped: weak references to the ``DistributedDataParallel`` models.
    """

    def __init__(self, wrapped: Sequence[weakref.ref[Any]]) -> None:
        self.is_watched = False
        self._wrapped = wrapped
        self._values: list[tuple[int, list[float]]] = []  # place, numbers
        self._reduced: list[tuple[int, list[float]]] = []  # address, numbers
        self._hooked: list[tuple[Any, Any]] = []  # parameter, handle of its hook
        self._before_step: BeforeStep | None = None

    @property
    def last_wrapped(self) -> weakref.ref[Any] | None:
        """The ``DistributedDataParallel`` model that was made last."""
        return self._wrapped[-1] if self._wrapped else None

    def begin_pass(self, before_step: BeforeStep) -> None:
        """Watch the backward pass that follows, the exchanges after it, and the step of an optimizer."""
        self.is_watched, self._before_step = True, before_step
        if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False):
            return  # compiled autograd would compile the hooks
        for reference in self._wrapped:
            model = reference()
            if model is None or not model.require_backward_grad_sync or model.process_group.size() == 1:
                continue
            trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
            step = max(1, len(trained) // _NUM_PARAMETERS)
            for parameter in trained[::step][:_NUM_PARAMETERS]:
                note = partial(self._note, len(self._hooked))
                self._hooked.append((parameter, parameter.register_hook(_harmless(note))))

    def end_pass(self) -> None:
        """Remove the hooks for the backward pass."""
        for parameter, handle in self._hooked:
            handle.remove()
            if not parameter._backward_hooks:
                parameter._backward_hooks = None  # an empty dictionary would cost time in all later passes
        self._hooked.clear()

    def end(self) -> None:
        """Stop watching."""
        self.end_pass()
        self.is_watched, self._before_step = False, None
        self._values.clear()
        self._reduced.clear()

    def note_reduction(self, tensor: Any) -> None:
        """Read the argument to a reduction that is about to begin."""
        if len(self._reduced) + len(self._values) >= _MAX_REDUCTIONS:
            return
        with suppress(Exception):
            if _is_called_by_fsdp():
                self._note(_NUM_PARAMETERS, tensor)
            elif _is_readable(tensor):
                self._reduced.append((tensor.data_ptr(), batches.numbers(tensor, _NUM_ELEMENTS)))

    def note_step(self, optimizer: Any) -> None:
        """Keep the reductions of gradients that ``optimizer`` is about to use, and examine the step."""
        if self._before_step is not None:
            with suppress(Exception):  # for example, a model on several devices
                self._before_step(
                    optimizer, [model for each in self._wrapped if (model := each()) is not None]
                )
        reduced, self._reduced = self._reduced, []
        if not reduced:
            return
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        addresses = {gradient.data_ptr() for gradient in gradients if _is_readable(gradient)}
        self._values += [(_NUM_PARAMETERS, values) for address, values in reduced if address in addresses]

    def take(self) -> str | None:
        """Return the numbers collected since the last call, as text; None if they are all zero or not all finite."""
        values, self._values = sorted(self._values), []
        flat = [number for _, numbers in values for number in numbers]
        if not any(flat) or not all(map(math.isfinite, flat)):
            return None
        return " ".join(f"{number:.4g}" for number in flat)  # devices round differently

    def _note(self, place: int, gradient: Any) -> None:
        if _is_readable(gradient):
            self._values.append((place, batches.numbers(gradient, _NUM_ELEMENTS)))


def _harmless(note: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a hook that neither changes the gradient nor makes the backward pass fail."""

    def note_if_possible(gradient: Any) -> None:
        with suppress(Exception):
            note(gradient)

    return note_if_possible


def _is_readable(tensor: Any) -> bool:
    """Return whether a tensor can be read without communication: a DTensor would gather its shards."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _is_called_by_fsdp() -> bool:
    frame = sys._getframe(2)
    for _ in range(_NUM_CALLERS):
        if str(frame.f_globals.get("__name__", "")).startswith(_FSDP):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
