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

import sys
import weakref
from collections import deque
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
