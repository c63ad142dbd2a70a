"""Turns the user's loader into a prepared one: each rank reads its share, or rank 0 reads for all ranks.

``Accelerator.prepare`` calls :func:`shard_loader`. Users call :func:`prepare_data_loader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from nblaunch.errors import warn
from nblaunch.training.collectives import operations
from nblaunch.training.data.adapter import index_sampler_options, inherited_options, is_stateful
from nblaunch.training.data.dispatcher import DataLoaderDispatcher
from nblaunch.training.data.loader import DataLoaderShard, PreparedLoader
from nblaunch.training.data.samplers import (
    SeedableRandomSampler,
    index_sampler_of,
    innermost,
    nested_samplers,
)
from nblaunch.training.data.sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    SampleShard,
    check_divisible,
)
from nblaunch.training.joining import current_topology
from nblaunch.training.options import DataLoaderConfiguration
from nblaunch.user_code import is_user_function, names_in


@dataclass(frozen=True)
class LoaderTarget:
    """The rank that a loader is prepared for, and how that rank reads it.

    Args:
        rank: the rank, from 0.
        world_size: number of ranks that share the data.
        device: where batches go; None: they stay where they are.
        rng_types: generators to synchronise with rank 0 at the start of every epoch. Generators of a shared order are
            always synchronised.
        slice_fn: returns a rank's part of a dispatched batch; None: divide the rows.
        is_static: pad the last batch even in a single process, because the device compiles for every new shape.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device | str | None = None
    rng_types: Sequence[str] = ("generator",)
    slice_fn: Callable[..., Any] | None = None
    is_static: bool = False


def prepare_data_loader(
    dataloader: DataLoader,
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    *,
    data_is_sharded: bool | None = None,
) -> PreparedLoader:
    """Return a rank's part of ``dataloader``, without an Accelerator.

    Args:
        dataloader: the user's loader. The prepared loader replaces it.
        device: where batches go with ``put_on_device``.
        num_processes: number of ranks that share the data; None: all ranks of the job.
        process_index: this rank; None: the process's rank.
        put_on_device: move batches to ``device``.
        rng_types: generators to synchronise with rank 0 at the start of every epoch, in a collective; None: only the
            samplers' generators, if all ranks of the job share the data.
        slice_fn_for_dispatch: see :class:`DataLoaderDispatcher`.
        split_batches, dispatch_batches, even_batches: see :class:`DataLoaderConfiguration`.
        use_seedable_sampler, data_seed, non_blocking, use_stateful_dataloader, data_is_sharded: see the same class.

    Raises:
        ValueError: the data can't be shared with these arguments; the message says why.
    """
    topology = current_topology()
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
        data_is_sharded=data_is_sharded,
    )
    target = LoaderTarget(
        rank=topology.rank if process_index is None else process_index,
        world_size=topology.world_size if num_processes is None else num_processes,
        device=device if put_on_device else None,
        rng_types=tuple(rng_types or ()),
        slice_fn=slice_fn_for_dispatch,
    )
    return shard_loader(dataloader, target, config)


def shard_loader(loader: DataLoader, target: LoaderTarget, config: DataLoaderConfiguration) -> PreparedLoader:
    """Return a new loader for a rank's part of ``loader``.

    Samplers that shuffle with torch's global generator get their own generator, in place: see
    :func:`_make_samplers_shareable_in_place`. Raises ValueError if the data can't be shared as ``config`` says.
    """
    is_sharded = _is_sharded(loader, target, config)
    _check_plain(loader, is_sharded)
    common = inherited_options(loader)
    common.update(
        device=target.device,
        num_processes=target.world_size,
        rng_types=target.rng_types,
        use_stateful_dataloader=config.use_stateful_dataloader or is_stateful(loader),
        _non_blocking=config.non_blocking,
    )
    is_iterable = isinstance(loader.dataset, IterableDataset)
    is_dispatched = not is_sharded and _is_dispatched(config, target, is_iterable)
    if is_sharded:
        _check_own_part(loader, config)
    elif is_dispatched and target.world_size > 1:
        _check_dispatched(loader, target, config)
    elif is_iterable and target.world_size > 1:
        return _shard_iterable(loader, target, config, common)
    if is_iterable:
        reading: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    else:
        index_sampler = index_sampler_of(loader)
        _make_samplers_shareable_in_place(index_sampler, config)
        if not is_sharded and not (is_dispatched and target.world_size > 1):
            index_sampler = _shard_of(loader, index_sampler, target, config)
        reading = index_sampler_options(loader, index_sampler)
    # In a single process, both classes read in the same way, but some programs check the class. If several ranks share
    # a model, each of them must read the same data itself.
    if is_dispatched and (target.world_size > 1 or current_topology().world_size == 1):
        common.update(split_batches=config.split_batches, slice_fn=target.slice_fn)
        return DataLoaderDispatcher(loader.dataset, **reading, **common)
    return DataLoaderShard(loader.dataset, **reading, **common)


def _is_sharded(loader: DataLoader, target: LoaderTarget, config: DataLoaderConfiguration) -> bool:
    """Return whether each rank's loader already reads only that rank's part.

    Raises:
        ValueError: the dataset is divided, but not among the job's ranks; or it stores its rank, so it may
            already be divided.
    """
    if config.data_is_sharded is not None or target.world_size == 1:
        return bool(config.data_is_sharded) and target.world_size > 1
    streams = list(_streams(loader.dataset))
    divided = [stream for stream in streams if getattr(_division(stream), "world_size", 1) > 1]
    if not divided:
        _check_undivided(streams, target)
        return False
    for stream in divided:
        num_parts, part = _division(stream).world_size, _division(stream).rank
        if (num_parts, part) != (target.world_size, target.rank):
            raise ValueError(
                f"the {type(stream).__name__} is already part {part} of {num_parts}, and this is rank "
                f"{target.rank} of {target.world_size}: prepare would divide it again, and the ranks would read only "
                "part of the data. Split it by accelerator.process_index and accelerator.num_processes, or don't "
                "split it; or set DataLoaderConfiguration(data_is_sharded=True) if each rank has its own part, or "
                "data_is_sharded=False if ranks share a part"
            )
    if config.dispatch_batches:
        raise ValueError(
            f"dispatch_batches=True makes rank 0 read for all ranks, but its {type(divided[0]).__name__} is "
            f"one of {target.world_size} parts. Do not split it by node, or leave dispatch_batches out"
        )
    return True


def _streams(dataset: Any, depth: int = 4) -> Iterator[Any]:
    """Yield a stream and the streams that it holds, such as the parts of torch's ``ChainDataset``."""
    if not (isinstance(dataset, IterableDataset) or _division(dataset) is not None):
        return
    yield dataset
    for value in vars(dataset).values() if depth else ():
        for part in value if isinstance(value, (list, tuple)) else [value]:
            yield from _streams(part, depth - 1)


def _division(stream: Any) -> Any:
    """Return the attribute in which ``datasets`` records how ``split_dataset_by_node`` divided a stream, or None."""
    return vars(stream).get("_distributed") if hasattr(stream, "__dict__") else None


# Names of attributes in which a user's dataset may keep its rank and the number of ranks.
_RANKS = ("rank", "process_index")
_WORLD_SIZES = ("world_size", "num_processes", "num_replicas")

# Functions, attributes and environment variables with which a user's dataset may ask for these numbers while it is
# being read.
_RANK_CALLS = ("get_rank", "process_index", "RANK", "LOCAL_RANK")
_SIZE_CALLS = ("get_world_size", "num_processes", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def _check_undivided(streams: Sequence[Any], target: LoaderTarget) -> None:
    """Raise ValueError if a stream knows its rank, because it may use the rank to read only a part of the data."""
    for stream in streams:
        attributes = {
            name.lstrip("_"): value for name, value in vars(stream).items() if isinstance(value, int)
        }
        rank = next((name for name in _RANKS if attributes.get(name) == target.rank), None)
        world_size = next((name for name in _WORLD_SIZES if attributes.get(name) == target.world_size), None)
        if rank is not None and world_size is not None:
            what = f"has {rank}={target.rank} and {world_size}={target.world_size}"
        elif asked := _topology_asked_by(stream):
            what = f"uses {' and '.join(asked)}"
        else:
            continue
        raise ValueError(
            f"the {type(stream).__name__} {what}, so it may already read only its rank's part. prepare would divide "
            "this part again, and the ranks would read only part of the data. Set "
            "DataLoaderConfiguration(data_is_sharded=True) if each rank has its own part, or data_is_sharded=False if "
            "all ranks read the same data"
        )


def _topology_asked_by(stream: Any) -> tuple[str, ...]:
    """Return the names with which a user's methods get the rank and the number of ranks; empty unless they get both."""
    methods = [
        method for kind in type(stream).__mro__ for method in vars(kind).values() if is_user_function(method)
    ]
    names = {
        name for method in methods for name in (*names_in(method.__code__), *_strings_in(method.__code__))
    }
    calls = [next((name for name in wanted if name in names), "") for wanted in (_RANK_CALLS, _SIZE_CALLS)]
    return tuple(calls) if all(calls) else ()


def _strings_in(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _strings_in(constant)
        elif isinstance(constant, str):
            yield constant


def _check_own_part(loader: DataLoader, config: DataLoaderConfiguration) -> None:
    """Check the settings of a loader whose data is already this rank's part."""
    if config.split_batches:
        raise ValueError(
            "split_batches=True divides global batches among the ranks, but each rank has its own data. Give the "
            "loader the batch_size of one rank, and leave split_batches out"
        )
    if config.even_batches and not isinstance(loader.sampler, DistributedSampler):
        _warn_of_uneven_parts(loader.dataset, can_dispatch=False)


def _shard_of(
    loader: DataLoader, index_sampler: Any, target: LoaderTarget, config: DataLoaderConfiguration
) -> Any:
    """Return the rank's share of the index sampler: all of it, unchanged, if no other rank shares the data."""
    is_completed = target.is_static and config.even_batches and getattr(index_sampler, "batch_size", None)
    if target.world_size == 1 and not is_completed:
        return index_sampler
    if _has_single_samples(loader):
        return SampleShard(index_sampler, target.world_size, target.rank, config.even_batches)
    return BatchSamplerShard(
        index_sampler, target.world_size, target.rank, config.split_batches, config.even_batches
    )


def _has_single_samples(loader: DataLoader) -> bool:
    return loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler)


def _is_dispatched(config: DataLoaderConfiguration, target: LoaderTarget, is_iterable: bool) -> bool:
    if config.dispatch_batches and target.device is None:
        raise ValueError(
            "dispatch_batches=True sends batches to the device of each rank, but device_placement=False leaves "
            "them where they are. Change one of the two settings."
        )
    if config.dispatch_batches is None:
        return is_iterable and target.device is not None
    return config.dispatch_batches


def _check_plain(loader: DataLoader, is_sharded: bool) -> None:
    """Reject data that would be divided twice; warn about settings that a new loader can't take over."""
    for sampler in nested_samplers(index_sampler_of(loader)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 and not is_sharded:
            raise ValueError(
                f"the loader's DistributedSampler already gives each rank 1/{sampler.num_replicas} of the data, "
                "and prepare would divide this share again. Create the loader without a DistributedSampler (with "
                "shuffle=True if it shuffles), or keep the sampler with "
                "DataLoaderConfiguration(data_is_sharded=True)."
            )
    if type(loader).__iter__ is not DataLoader.__iter__ and not is_stateful(loader):
        warn(
            f"{type(loader).__name__} has its own __iter__, which the prepared loader does not use, because it "
            "reads the dataset and the sampler itself. Move the code into the collate_fn."
        )


def _check_dispatched(loader: DataLoader, target: LoaderTarget, config: DataLoaderConfiguration) -> None:
    """Raise ValueError if rank 0 can't divide the batches of ``loader`` among several ranks."""
    if config.split_batches:
        check_divisible(loader.batch_size or 0, target.world_size)
    if _has_single_samples(loader) and not isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "dispatch_batches=True divides batches, but a DataLoader with batch_size=None returns single samples. "
            "Set a batch_size, or use dispatch_batches=False."
        )


def _shard_iterable(
    loader: DataLoader, target: LoaderTarget, config: DataLoaderConfiguration, common: dict[str, Any]
) -> PreparedLoader:
    """Return a loader for this rank's share of a stream that several ranks read."""
    batch_size, drop_last = loader.batch_size, loader.drop_last
    dataset, world_size = loader.dataset, target.world_size
    if not config.split_batches and _num_shards(dataset) >= world_size:
        # The dataset can divide itself, as datasets.IterableDataset can, so each rank reads only its own part.
        if config.even_batches:
            _warn_of_uneven_parts(dataset, can_dispatch=True)
        part = dataset.shard(num_shards=world_size, index=target.rank)  # type: ignore[attr-defined]
        return DataLoaderShard(part, batch_size=batch_size, drop_last=drop_last, **common)
    # Without a batch_size, ranks get whole batches.
    is_split = config.split_batches and batch_size is not None
    shard = IterableDatasetShard(dataset, batch_size, drop_last, world_size, target.rank, is_split)
    own_size = batch_size // world_size if batch_size and is_split else batch_size
    return DataLoaderShard(shard, batch_size=own_size, drop_last=drop_last, **common)


def _num_shards(dataset: Any) -> int:
    """Return the number of parts into which an iterable dataset can divide itself; 0 if it can't."""
    return getattr(dataset, "n_shards", 0) if hasattr(dataset, "shard") else 0


def _warn_of_uneven_parts(dataset: Any, can_dispatch: bool) -> None:
    """Warn on rank 0 that the ranks' parts of a divided dataset may differ in length.

    Args:
        dataset: the divided dataset, whose parts may have any length.
        can_dispatch: whether rank 0 could read the dataset for all ranks.
    """
    if current_topology().rank > 0:
        return
    advice = "Train in `with accelerator.join_uneven_inputs([model]):`"
    if can_dispatch:
        advice += ", or let rank 0 read for all, with DataLoaderConfiguration(dispatch_batches=True)"
    warn(
        f"each rank reads its own part of the {type(dataset).__name__}, and even_batches=True does not pad these "
        "parts: ranks with more batches than others would wait in backward until the collective times out. "
        f"{advice}. If all ranks have the same number of batches, or stop at the same step, pass "
        "DataLoaderConfiguration(even_batches=False)."
    )


def _make_samplers_shareable_in_place(index_sampler: Any, config: DataLoaderConfiguration) -> None:
    """Change the user's samplers in place, so that all ranks can draw the same order.

    With ``use_seedable_sampler``, a seeded sampler replaces the ``RandomSampler``; its seed may come from rank 0, in a
    collective. Any other sampler still draws from torch's global generator, as with Accelerate. At the start of an
    epoch, that generator gets rank 0's state, so the ranks draw the same order even if their seeds differ.
    Without ``use_seedable_sampler``, every nested sampler that would draw from the global generator gets its own.
    """
    batch_sampler = innermost(index_sampler)
    sampler: Any = getattr(batch_sampler, "sampler", None)
    if config.use_seedable_sampler and _is_reseeded(sampler, config.data_seed):
        seeded = SeedableRandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples)
        seeded.initial_seed = _common_seed(config.data_seed)
        batch_sampler.sampler = seeded
        return
    for part in nested_samplers(index_sampler):
        if hasattr(part, "generator") and part.generator is None:
            part.generator = torch.default_generator if config.use_seedable_sampler else _own_generator()


def _is_reseeded(sampler: Any, data_seed: int | None) -> bool:
    """Return whether ``prepare`` sets the seed, because the user has set none or because the configuration has one."""
    if type(sampler) is SeedableRandomSampler:
        return sampler.data_seed is None or data_seed is not None
    return type(sampler) is RandomSampler


def _own_generator() -> torch.Generator:
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return torch.Generator().manual_seed(seed)


def _common_seed(seed: int | None) -> int:
    if seed is not None:
        return seed
    # Don't draw the seed: the order must not depend on earlier draws, for example for a model's initial weights.
    return int(operations.broadcast(torch.tensor(torch.initial_seed() % 2**62)).item())
