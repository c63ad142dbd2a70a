"""The base class of prepared loaders: wraps the loader that reads the data, and keeps the state of the epochs.

    DataLoaderAdapter ── base_dataloader: torch's DataLoader, or torchdata's StatefulDataLoader

An adapter passes ``isinstance`` checks for the class of the loader it wraps, and exposes that loader's attributes.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from nblaunch.errors import warn
from nblaunch.packages import is_installed
from nblaunch.training.data.sharding import EpochPosition
from nblaunch.training.joining import current_topology
from nblaunch.training.shared_state import get_shared_state

FINISHED = "_iterator_finished"  # torchdata's entry in every state: whether the epoch was read to its end
ORDER = "_order"  # the entry that nblaunch adds to torchdata's state


class DataLoaderStateMixin:
    """The state of a loader's current epoch, for gradient accumulation and ``gather_for_metrics``.

    ``end_of_dataloader`` is True while the user's loop is working on the last batch. ``remainder`` is the number of
    real rows in the last global batch: 0 means all of them, -1 that the number is unknown. A custom loader calls
    :meth:`begin` when an epoch begins and :meth:`end` when it ends.
    """

    end_of_dataloader = False
    remainder = -1
    shard: Any = None
    """The object that counts the real rows in the last global batch; None if no rows are ever added."""
    completed_rows = 0
    """Rows in the last global batch, including padding; without padding, rows in a full batch; 0: unknown."""
    adds_nothing = False
    """Whether a short last batch stays short."""
    is_uneven = False
    """Whether some ranks get fewer batches than others; True if this can't be known in advance."""

    def reset(self) -> None:
        """Clear the state of the previous epoch."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Make this loader the active one. Call it at the start of an epoch."""
        self.reset()
        self.remainder = self._expected_remainder()
        get_shared_state().loaders.enter(self)

    def end(self) -> None:
        """Make the enclosing loop's loader active again, if any. Call it when an epoch ends or is left early."""
        get_shared_state().loaders.leave(self)

    def _expected_remainder(self) -> int:
        """Compute, before the epoch is read, the number of real rows in its last global batch."""
        return -1


@dataclass(frozen=True)
class OrderStart:
    """Generator states, from the start of an epoch, that may decide the epoch's order.

    Args:
        generators: states of the loader's own generators.
        of_process: states of Python's, NumPy's and torch's global generators; empty if they can't decide the order.
    """

    generators: list[torch.Tensor] = field(default_factory=list)
    of_process: dict[str, Any] = field(default_factory=dict)


@dataclass
class Epochs:
    """A loader's progress through its epochs. A loader for the rest of an epoch shares it: see ``beginning_at``.

    Args:
        completed: number of epochs read to their end; samplers use it to shuffle.
        left: number of epochs that the user left early, for example with ``break``.
        start: states of the generators that decide the order, at the start of the epoch.
        resumed_start: states of the loader's own generators from a loaded checkpoint, for the start of the next epoch.
        global_start: the same for the process's global generators; empty if they don't decide the order.
        saved_position: the loaded checkpoint's position in the epoch; None once an epoch begins.
        is_resuming: whether a checkpoint from the middle of an epoch was loaded, and no epoch has begun since.
        state: the state of a stateful loader at the current batch; None before the first one.
        batches_behind: batches that were read before the loaded state was saved; 0 once an epoch begins.
        batches_to_drop: batches that the base loader must read again and drop, because its stream can only start at
            the beginning.
    """

    completed: int = 0
    left: int = 0
    start: OrderStart = field(default_factory=OrderStart)
    resumed_start: list[torch.Tensor] = field(default_factory=list)
    global_start: dict[str, Any] = field(default_factory=dict)
    saved_position: EpochPosition | None = None
    is_resuming: bool = False
    state: dict[str, Any] | None = None
    batches_behind: int = 0
    batches_to_drop: int = 0


if TYPE_CHECKING:
    Base = DataLoader  # type checkers see the wrapped loader's attributes
else:
    Base = object


class DataLoaderAdapter(Base):
    """A wrapper around the loader that reads the data.

    Args:
        dataset: as in :class:`torch.utils.data.DataLoader`.
        batch_sampler: as in :class:`torch.utils.data.DataLoader`.
        use_stateful_dataloader: read with torchdata, which makes :meth:`state_dict` return the position in the epoch.
        options: further arguments for the loader.

    Raises:
        ImportError: ``use_stateful_dataloader`` is set, but torchdata is not installed.
    """

    base_dataloader: DataLoader
    """The wrapped loader, which reads the data."""
    skip_batches = 0
    """Number of batches to leave out of the next epoch."""

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **options: Any
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        self.epochs = Epochs()
        self.base_dataloader = self._make_base(dataset, batch_sampler=batch_sampler, **options)

    def _make_base(self, dataset: Any, **options: Any) -> Any:
        return (stateful_loader if self.use_stateful_dataloader else DataLoader)(dataset, **options)

    def __getattr__(self, name: str) -> Any:
        if "base_dataloader" not in self.__dict__:  # during __init__ or unpickling
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.base_dataloader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        base = self.__dict__.get("base_dataloader")
        if base is not None and name in vars(base) and name not in vars(self):
            setattr(base, name, value)  # the base uses the value, or rejects the change
        else:
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the wrapped loader; ``isinstance`` accepts it and the adapter's own class."""
        base = self.__dict__.get("base_dataloader")
        return type(self) if base is None else type(base)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self.__dict__))

    # --- saving the position -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the current epoch, without the batch that was read ahead.

        The state has torchdata's format: this loader and torchdata's accept each other's states. If torchdata's state
        lacks the epoch or the order of the samples, nblaunch adds an entry for them.

        Raises:
            AttributeError: the loader was created without ``use_stateful_dataloader=True``.
        """
        self._check_stateful("state_dict")
        return self._with_order({}, False) if self.epochs.state is None else self.epochs.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration continue after the batch at which :meth:`state_dict` was called.

        Raises:
            AttributeError: the loader was created without ``use_stateful_dataloader=True``.
        """
        self._check_stateful("load_state_dict")
        base: Any = self.base_dataloader
        order = state_dict.get(ORDER, {})
        # A state from the end of an epoch starts a new epoch. torchdata would have to draw the order twice to notice
        # this.
        is_fresh = state_dict.get(FINISHED, True) or "position" in order
        self._forget_base_state()
        num_batches, knows_stream = _progress_of({} if is_fresh else state_dict)
        if not is_fresh:
            self.skip_batches = 0  # the loaded state already counts them as read
        self.epochs.batches_behind = num_batches
        buffer_size = _shuffle_buffer_size(base.dataset) if knows_stream else None
        if buffer_size is not None and num_batches:
            _warn_of_reading_again(buffer_size, num_batches)
        if (knows_stream and buffer_size is None) or not isinstance(base.dataset, IterableDataset):
            base.load_state_dict(
                {} if is_fresh else {key: state_dict[key] for key in state_dict if key != ORDER}
            )
        else:
            # torchdata 0.11 would also read and drop these batches, but count them twice. A loader that continued
            # from its next state would skip too many batches.
            base.load_state_dict({})
            self.epochs.batches_to_drop = num_batches
        self._resume_order_state(order)
        self.epochs.state = state_dict

    def _take_batches_to_drop(self) -> int:
        """Return how many batches the base loader has to drop; later calls return 0."""
        dropped, self.epochs.batches_to_drop = self.epochs.batches_to_drop, 0
        return dropped

    def _check_stateful(self, name: str) -> None:
        if not self.use_stateful_dataloader:
            raise AttributeError(f"{name} needs DataLoaderConfiguration(use_stateful_dataloader=True)")

    def _forget_base_state(self) -> None:
        """Make the base loader begin its next epoch at the start, even if a state was loaded."""
        self.epochs.batches_behind = self.epochs.batches_to_drop = 0
        if self.use_stateful_dataloader:
            # torchdata's load_state_dict({}) does not clear this attribute.
            vars(self.base_dataloader)["next_iter_state"] = None

    def _note_position(self, is_end: bool = False) -> None:
        """Store the current state. Called before each batch is read ahead, and at the end of the epoch."""
        if self.use_stateful_dataloader:
            base: Any = self.base_dataloader
            self.epochs.state = self._with_order({**base.state_dict(), FINISHED: is_end}, is_end)

    def _with_order(self, state: dict[str, Any], is_end: bool) -> dict[str, Any]:
        order = self._order_state(is_end)
        # The entry is missing in the first epoch if the order is not drawn from a generator.
        return {**state, ORDER: order} if any(order.values()) else state

    def _order_state(self, is_end: bool) -> dict[str, Any]:
        """Return what torchdata's state does not cover; all entries are zero or empty if it covers everything."""
        return {}

    def _resume_order_state(self, state: dict[str, Any]) -> None:
        """Restore the entries that :meth:`_order_state` returned."""


def _progress_of(state: dict[str, Any]) -> tuple[int, bool]:
    """Return torchdata's record of the progress through an epoch, whether one process or several read the data.

    Returns:
        The number of batches that the loader yielded, and whether the dataset, or its iterator, saved its own state.
    """
    snapshot = state.get("_snapshot")
    if snapshot is None:
        readers, num_batches = [state], state.get("_num_yielded", 0)
    else:
        readers = list(snapshot["_worker_snapshots"].values())
        num_batches = snapshot["_snapshot_step"] + state["_steps_since_snapshot"]
    knows_stream = any(
        reader.get("dataset_state") is not None
        or (reader.get("fetcher_state") or {}).get("dataset_iter_state") is not None
        for reader in readers
    )
    return num_batches, knows_stream


def _shuffle_buffer_size(dataset: Any) -> int | None:
    """Return the size, in rows, of the buffer in which a ``datasets`` stream shuffles; None if it has none.

    The stream's state does not include the rows in that buffer.
    """
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        attributes = getattr(parts.pop(), "__dict__", {})
        if "buffer_size" in attributes:
            size: int = attributes["buffer_size"]
            return size
        parts += [attributes["ex_iterable"]] if "ex_iterable" in attributes else []
        parts += attributes.get("ex_iterables", [])
    return None


def _warn_of_reading_again(buffer_size: int, num_batches: int) -> None:
    if current_topology().rank == 0:
        warn(
            f"the stream shuffles in a buffer of {buffer_size} rows, which its state does not include, so the loader "
            f"reads the first {num_batches} batches of the epoch again and drops them. Resuming from the stream's "
            "state would lose the rows in the buffer. To resume without reading these batches again, shuffle the data "
            "before you store it, and omit shuffle()"
        )


def _rebuild(cls: type[DataLoaderAdapter], state: dict[str, Any]) -> DataLoaderAdapter:
    adapter = cls.__new__(cls)
    adapter.__dict__.update(state)
    return adapter


def stateful_loader(dataset: Any, **options: Any) -> Any:
    """Return torchdata's loader. Raise ImportError if torchdata is not installed."""
    if not is_installed("torchdata"):
        raise ImportError(
            "use_stateful_dataloader=True requires torchdata, which is not installed: pip install torchdata"
        )
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        # torchdata 0.11 is the last release. It calls functions that torch 2.13 deprecates, and users can't fix that.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
        return StatefulDataLoader(dataset, **options)


_ACCEPTED = set(inspect.signature(DataLoader.__init__).parameters)
# Some torch versions lack some of these.
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
    """Return the options that a loader derived from ``loader`` inherits: workers, collation, memory."""
    options = {
        name: getattr(loader, name) for name in _INHERITED if name in _ACCEPTED and hasattr(loader, name)
    }
    if is_stateful(loader):
        options["snapshot_every_n_steps"] = loader.snapshot_every_n_steps  # type: ignore[attr-defined]
    if not options["num_workers"]:
        # Without worker processes, torch rejects these two options even at their defaults.
        options.pop("prefetch_factor", None)
        options.pop("multiprocessing_context", None)
    return options


def index_sampler_options(loader: DataLoader, index_sampler: Any) -> dict[str, Any]:
    """Return the options with which a loader derived from ``loader`` reads the items of ``index_sampler``."""
    if (
        loader.batch_sampler is None
    ):  # the dataset gets each item of the sampler unchanged: an index or a list
        return {"sampler": index_sampler, "batch_size": None}
    return {"batch_sampler": index_sampler}


def is_stateful(loader: DataLoader) -> bool:
    """Return whether ``loader`` is torchdata's ``StatefulDataLoader``."""
    # If torchdata was not imported, the loader can't be an instance of its class.
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    return torchdata is not None and isinstance(loader, torchdata.StatefulDataLoader)
