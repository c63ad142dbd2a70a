"""The parts of prepared loaders: the loader that reads, its options, its epochs and the state of the current epoch.

    DataLoaderAdapter ── base_dataloader: torch's DataLoader, or torchdata's StatefulDataLoader

An adapter passes for an instance of its base's class, and shows its base's attributes.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from nblaunch.packages import is_installed
from nblaunch.training.data.sharding import EpochPosition
from nblaunch.training.shared_state import get_shared_state

FINISHED = "_iterator_finished"  # torchdata's entry, in every state: the epoch was read to its end
ORDER = "_order"  # nblaunch's entry, beside torchdata's


class DataLoaderStateMixin:
    """The state of the epoch that a loader reads, which gradient accumulation and ``gather_for_metrics`` look at.

    ``end_of_dataloader`` is True while the last batch is in the user's hands; ``remainder`` is the number of real rows
    in the last global batch (0 = all of them, -1 = not known). A user's own loader calls :meth:`begin` where an epoch
    begins and :meth:`end` where it ends.
    """

    end_of_dataloader = False
    remainder = -1
    shard: Any = None
    """The object that knows how many rows of the last global batch are real; None if no rows are ever added."""
    completed_rows = 0
    """Rows of the last global batch, added ones included; if none are added, rows of a full batch; 0: not known."""
    adds_nothing = False
    """Whether the last batch stays as short as it is."""
    is_uneven = False
    """Whether some ranks get fewer batches than others; True if that is not known in advance."""

    def reset(self) -> None:
        """Forget the state of the last epoch."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Make this loader the active one, at the start of its epoch."""
        self.reset()
        self.remainder = self._expected_remainder()
        get_shared_state().loaders.enter(self)

    def end(self) -> None:
        """Make the loader around this one active again, if any: this one's epoch is over, or was left."""
        get_shared_state().loaders.leave(self)

    def _expected_remainder(self) -> int:
        """Return the real rows of the last global batch by arithmetic, before the epoch is read."""
        return -1


@dataclass
class Epochs:
    """Where a loader is in its epochs. Loaders for the rest of an epoch share it, see ``beginning_at``.

    Args:
        completed: epochs that were read to their end, by which samplers shuffle.
        left: epochs that were left before their end, as with ``break``.
        start: states of the generators that decide the order, at the start of the epoch.
        resumed_start: the states that a loaded state has for these generators, for the start of the next epoch.
        global_start: the same for torch's global generator, if that decides the order.
        saved_position: the position in the epoch at the loaded checkpoint, until an epoch is read.
        state: the state of a loader that knows its position, as of the current batch; None: it was not read.
        batches_behind: batches that the reading loader had read before, according to the state that was loaded last,
            until an epoch begins.
        batches_to_drop: how many of these that loader reads again, since its stream can't begin in the middle.
    """

    completed: int = 0
    left: int = 0
    start: list[torch.Tensor] = field(default_factory=list)
    resumed_start: list[torch.Tensor] = field(default_factory=list)
    global_start: torch.Tensor | None = None
    saved_position: EpochPosition | None = None
    state: dict[str, Any] | None = None
    batches_behind: int = 0
    batches_to_drop: int = 0


if TYPE_CHECKING:
    Base = DataLoader  # it has what its base has
else:
    Base = object


class DataLoaderAdapter(Base):
    """A loader around another one, which reads.

    Args:
        dataset: as for :class:`torch.utils.data.DataLoader`, with its ``batch_sampler`` and other ``options``.
        use_stateful_dataloader: read with torchdata, so that :meth:`state_dict` says where in an epoch it is.

    Raises:
        ImportError: ``use_stateful_dataloader`` without torchdata.
    """

    base_dataloader: DataLoader
    """The loader that reads."""
    skip_batches = 0
    """Batches that are left out of the first epoch that is read."""

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **options: Any
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        self.epochs = Epochs()
        self.base_dataloader = self._make_base(dataset, batch_sampler=batch_sampler, **options)

    def _make_base(self, dataset: Any, **options: Any) -> Any:
        return (stateful_loader if self.use_stateful_dataloader else DataLoader)(dataset, **options)

    def __getattr__(self, name: str) -> Any:
        if "base_dataloader" not in self.__dict__:  # while it is being made, or unpickled
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.base_dataloader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        base = self.__dict__.get("base_dataloader")
        if base is not None and name in vars(base) and name not in vars(self):
            setattr(base, name, value)  # the base reads by it, or rejects the change
        else:
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the loader that reads: ``isinstance`` finds both."""
        base = self.__dict__.get("base_dataloader")
        return type(self) if base is None else type(base)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self.__dict__))

    # --- saving where it is --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where in its epoch the loader is. A batch that was read ahead does not count.

        The state is torchdata's, and each loader accepts the other's state. One more entry holds what torchdata does
        not know about epoch and order, where there is anything to know.

        Raises:
            AttributeError: the loader was made without ``use_stateful_dataloader=True``.
        """
        self._check_stateful("state_dict")
        return self._with_order({}, False) if self.epochs.state is None else self.epochs.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, in the next iteration, after the batch at which :meth:`state_dict` was called.

        Raises:
            AttributeError: the loader was made without ``use_stateful_dataloader=True``.
        """
        self._check_stateful("load_state_dict")
        base: Any = self.base_dataloader
        order = state_dict.get(ORDER, {})
        # After the end of an epoch the next one starts anew; torchdata would draw its order twice to find that out.
        is_fresh = state_dict.get(FINISHED, True) or "position" in order
        self._forget_base_state()
        progress = _Progress.of({} if is_fresh else state_dict)
        if not is_fresh:
            self.skip_batches = 0  # they are among what was read
        self.epochs.batches_behind = progress.batches
        if progress.knows_stream or not isinstance(base.dataset, IterableDataset):
            base.load_state_dict(
                {} if is_fresh else {key: state_dict[key] for key in state_dict if key != ORDER}
            )
        else:
            # torchdata (0.11) would also read and drop them, but count them twice: the next state would have that many
            # batches too many, and a loader that continues from it would lose them.
            base.load_state_dict({})
            self.epochs.batches_to_drop = progress.batches
        self._resume_order_state(order)
        self.epochs.state = state_dict

    def _take_batches_to_drop(self) -> int:
        """Return how many batches the reading loader has to drop; later calls return 0."""
        dropped, self.epochs.batches_to_drop = self.epochs.batches_to_drop, 0
        return dropped

    def _check_stateful(self, name: str) -> None:
        if not self.use_stateful_dataloader:
            raise AttributeError(f"{name} needs DataLoaderConfiguration(use_stateful_dataloader=True)")

    def _forget_base_state(self) -> None:
        """Make the reading loader begin its next epoch at the start, although a state was loaded."""
        self.epochs.batches_behind = self.epochs.batches_to_drop = 0
        if self.use_stateful_dataloader:
            vars(self.base_dataloader)["next_iter_state"] = None  # torchdata's: load_state_dict({}) leaves it

    def _note_position(self, is_end: bool = False) -> None:
        """Keep the state as of now: called before the next batch is read ahead, and when there is none."""
        if self.use_stateful_dataloader:
            base: Any = self.base_dataloader
            self.epochs.state = self._with_order({**base.state_dict(), FINISHED: is_end}, is_end)

    def _with_order(self, state: dict[str, Any], is_end: bool) -> dict[str, Any]:
        order = self._order_state(is_end)
        # Without the entry, a loader is in its first epoch, in an order that no generator draws.
        return {**state, ORDER: order} if any(order.values()) else state

    def _order_state(self, is_end: bool) -> dict[str, Any]:
        """Return what torchdata's state lacks; all zero or empty if it lacks nothing."""
        return {}

    def _resume_order_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`_order_state` has returned."""


@dataclass(frozen=True)
class _Progress:
    """What a state of torchdata says about the epoch.

    Args:
        batches: how many were handed out.
        knows_stream: the dataset, or its iterator, has a state of its own.
    """

    batches: int = 0
    knows_stream: bool = False

    @classmethod
    def of(cls, state: dict[str, Any]) -> _Progress:
        """Return the progress in a state, for one reading process or several."""
        snapshot = state.get("_snapshot")
        if snapshot is None:
            readers, batches = [state], state.get("_num_yielded", 0)
        else:
            readers = list(snapshot["_worker_snapshots"].values())
            batches = snapshot["_snapshot_step"] + state["_steps_since_snapshot"]
        knows_stream = any(
            reader.get("dataset_state") is not None
            or (reader.get("fetcher_state") or {}).get("dataset_iter_state") is not None
            for reader in readers
        )
        return cls(batches, knows_stream)


def _rebuild(cls: type[DataLoaderAdapter], state: dict[str, Any]) -> DataLoaderAdapter:
    adapter = cls.__new__(cls)
    adapter.__dict__.update(state)
    return adapter


def stateful_loader(dataset: Any, **options: Any) -> Any:
    """Return torchdata's loader. ImportError without torchdata."""
    if not is_installed("torchdata"):
        raise ImportError(
            "use_stateful_dataloader=True reads with torchdata, which is not installed: pip install torchdata"
        )
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        # torchdata 0.11 is the last one and calls functions that torch 2.13 deprecates; users can't help it.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
        return StatefulDataLoader(dataset, **options)


_ACCEPTED = set(inspect.signature(DataLoader.__init__).parameters)
# Not every torch has all of them.
_INHERITED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def inherited_options(loader: DataLoader) -> dict[str, Any]:
    """Return the options of ``loader`` for a loader made from it: workers, collation, memory."""
    options = {
        name: getattr(loader, name) for name in _INHERITED if name in _ACCEPTED and hasattr(loader, name)
    }
    if is_stateful(loader):
        options["snapshot_every_n_steps"] = loader.snapshot_every_n_steps  # type: ignore[attr-defined]
    if not options["num_workers"]:
        # torch refuses these two without worker processes of the DataLoader, even at their defaults.
        options.pop("prefetch_factor", None)
        options.pop("multiprocessing_context", None)
    return options


def index_sampler_options(loader: DataLoader, index_sampler: Any) -> dict[str, Any]:
    """Return the options by which a loader made from ``loader`` reads what ``index_sampler`` yields."""
    if loader.batch_sampler is None:  # the dataset gets the sampler's items as they are: an index, or a list
        return {"sampler": index_sampler, "batch_size": None}
    return {"batch_sampler": index_sampler}


def is_stateful(loader: DataLoader) -> bool:
    """Return whether ``loader`` is torchdata's ``StatefulDataLoader``."""
    # If torchdata was not imported, no loader can be one.
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    return torchdata is not None and isinstance(loader, torchdata.StatefulDataLoader)
