"""Reports loops without nblaunch's Accelerator in which all ranks train on the same samples.

The type of a loader or sampler proves nothing, because a dataset may contain only the rank's share. Ranks therefore
compare what they read for the first backward passes and what they compute in them:

    batches, gradients before their exchange    equal on all ranks: a warning
    samples in the batches                      several are equal, in a different order: a hint
    losses, if no process group connects ranks  equal on all ranks: a warning

Batches alone are not enough, because ranks may read the same batch and use different parts of it. A loop that repeats a
batch on purpose, for example to test overfitting, is not reported.

A library's own ``fit`` uses the ranks of a launch only if it is asked to. Otherwise each rank trains a complete model
on all samples, without a process group. This raises no error and takes as long as training in one process.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from nblaunch import env
from nblaunch.context import ProcessContext
from nblaunch.progress import batches, replicas
from nblaunch.user_code import innermost_user_frame

CHECK = "same_samples"
"""Name of this check in ``NBLAUNCH_CHECKS``; ``training/checks/data.py`` is for loops with an Accelerator."""

HINT = "samples_in_other_orders"

REPEATED = "repeated_training"
"""Name of the check of losses."""

_NUM_STEPS = 5
"""Number of consecutive steps whose batches and gradients are compared."""

_MAX_PASSES = 64
_MAX_ROWS = 32  # per batch
_NUM_LOSSES = 10


class SameSamples:
    """Collects what this rank reads for its first backward passes and what it computes in them.

    Args:
        here: the context of this process.

    Attributes:
        is_looking: whether the check still needs batches and backward passes.
    """

    def __init__(self, here: ProcessContext) -> None:
        is_off = env.is_check_off(CHECK) and env.is_check_off(replicas.CHECK)
        self.is_looking = here.topology.world_size > 1 and not here.backend.is_lazy and not is_off
        self._replicas = replicas.PlainReplicas(here)
        self._here = here
        self._read: tuple[weakref.ref[Any], Any] | None = None
        self._num_passes = 0
        self._digests: list[int | None] = []  # of the batches since the last exchange of gradients
        self._steps: deque[tuple[str, str]] = deque(maxlen=_NUM_STEPS)  # batches, gradients
        self._is_reported = self._is_exchanged = False
        self._loader: weakref.ref[Any] | None = None  # iterator of the loader whose rows are collected
        self._rows: list[list[int]] | None = []  # of each batch

    def note_batch(self, iterator: Any, batch: Any) -> None:
        """Keep a batch until the backward pass that may follow."""
        self._read = weakref.ref(iterator), batch

    def before_backward(self) -> None:
        """Compute the digests of the last batch, and start watching the gradients of this backward pass."""
        gradients = self._here.slot.local_gradients
        self._end_step(gradients)
        self._num_passes += 1
        if self._num_passes > _MAX_PASSES:
            self.finish()
            return
        read, self._read = self._read, None
        if read is not None:
            self._add(*read)
        if gradients is not None and not self._is_reported:
            gradients.begin_pass(self._replicas.before_step)

    def after_backward(self) -> None:
        """Stop watching the backward pass itself. Ranks may still exchange gradients afterwards."""
        if (gradients := self._here.slot.local_gradients) is not None:
            gradients.end_pass()

    def finish(self) -> None:
        """Stop looking, and report this rank's samples, which other ranks may have read as well."""
        if not self.is_looking:
            return
        gradients = self._here.slot.local_gradients
        self._end_step(gradients)
        self.is_looking, self._read = False, None
        if gradients is not None:
            gradients.end()
        # The last batch of an epoch may be padded with samples from other ranks.
        rows, self._rows = [row for batch in (self._rows or [])[:-1] for row in batch], None
        if rows and self._is_exchanged and len(set(rows)) == len(rows):  # a dataset may contain equal samples
            self._report(
                HINT,
                "ranks train on the same samples, each in its own order",
                "If each rank should read its own share, " + _ADVICE[0].lower() + _ADVICE[1:],
                ("samples", *rows),
                "overlapping",
            )

    def _add(self, reference: weakref.ref[Any], batch: Any) -> None:
        self._digests.append(batches.digest(batch))
        if self._loader is None:
            self._loader = reference
        if self._rows is not None and self._loader() is reference():  # samples of one epoch
            self._rows.append(batches.row_digests(batch, _MAX_ROWS))

    def _end_step(self, gradients: Any) -> None:
        """Record a step if ranks have exchanged gradients; report the steps for comparison once there are enough."""
        exchanged = None if gradients is None or self._is_reported else gradients.take()
        if exchanged is None:
            return
        self._is_exchanged = True
        digests, self._digests = self._digests, []
        if None in digests or not digests:
            self._steps.clear()
            return
        self._steps.append((str(digests), exchanged))
        if len(self._steps) < _NUM_STEPS or any(
            len(set(each)) < _NUM_STEPS for each in zip(*self._steps, strict=True)
        ):
            return  # a loop that repeats a batch does so on purpose
        self._is_reported = True
        gradients.end()
        iterator = self._loader() if self._loader is not None else None
        self._report(
            CHECK,
            f"each rank trains on the same {_samples_of(iterator)}, in the same order",
            _advice(iterator),
            ("batches and gradients", *map(str, self._steps)),
            "distinct",
        )

    def _report(self, check: str, problem: str, advice: str, value: tuple[Any, ...], judged_by: str) -> None:
        self._here.observe(
            check,
            problem,
            advice,
            innermost_user_frame(),
            step=self._num_passes,
            value=value,
            judged_by=judged_by,
            is_hint=check == HINT,
        )


_ADVICE = (
    "Pass sampler=DistributedSampler(dataset) to the DataLoader instead of shuffle=True, and call "
    "sampler.set_epoch(epoch) before each epoch"
)


def _samples_of(iterator: Any) -> str:
    """Return ``1,000 samples``, or ``samples`` if their number is unknown."""
    sampler: Any = getattr(getattr(iterator, "_index_sampler", None), "sampler", None)
    try:
        return f"{len(sampler):,} samples"
    except Exception:  # TypeError, or whatever a user's sampler raises if it has no length
        return "samples"


def _advice(iterator: Any) -> str:
    from torch.utils.data import DistributedSampler, IterableDataset

    if isinstance(getattr(iterator, "_dataset", None), IterableDataset):
        return (
            "Let each rank take its share of the IterableDataset, for example with "
            "itertools.islice(samples, rank, None, world_size)"
        )
    if isinstance(getattr(getattr(iterator, "_index_sampler", None), "sampler", None), DistributedSampler):
        return "Create DistributedSampler(dataset) after init_process_group(), without num_replicas and rank"
    return _ADVICE


class FirstLosses:
    """This rank's first losses, which the launcher compares across ranks if the ranks are not in a process group.

    Args:
        here: the context of this process.
    """

    def __init__(self, here: ProcessContext) -> None:
        is_off = here.topology.world_size == 1 or env.is_check_off(REPEATED)
        self._losses: list[str] | None = None if is_off else []
        self._here = here

    def add(self, loss: Any) -> None:
        """Add the single-element loss tensor of a backward pass."""
        if self._losses is None:
            return
        if _has_group():
            self._losses = None
            return
        self._losses.append(float(loss).hex())
        if len(self._losses) < _NUM_LOSSES:
            return
        losses, self._losses = self._losses, None
        if len(set(losses)) > 1:
            self._here.observe(
                REPEATED,
                f"every rank repeats the same training: the first {len(losses)} losses are equal on all ranks, and "
                "no process group connects the ranks",
                "Divide the samples among the ranks, with accelerator.prepare(), DistributedDataParallel or an option "
                "of the library, such as strategy='ddp' in Lightning; or launch with num_processes=1",
                innermost_user_frame(),
                value=tuple(losses),
                judged_by="distinct",
            )


def _has_group() -> bool:
    """Return whether this process communicates with other ranks through torch."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and c10d.is_initialized() and c10d.get_world_size() > 1


# --- gradients before their exchange ----------------------------------------------------------------------------------

#     DistributedDataParallel     hooks on a few parameters, for one backward pass
#     FSDP, fully_shard           the arguments of reduce_scatter and all_reduce, which FSDP calls
#     all_reduce(parameter.grad)  the argument, if it is the gradient of a parameter that the optimizer then updates
#
# If ranks exchange gradients that are already equal, they have computed the same thing. Nothing else proves this: ranks
# that read the same batch may each use a part of it, and losses may be averaged before ``backward``.

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
