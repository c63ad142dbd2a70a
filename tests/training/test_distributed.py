"""The Accelerator on real ranks: training like one process, collectives, metrics over each sample once."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from nblaunch import Accelerator, DistributedOperationException, PartialState, backends, context
from nblaunch.events import WorkerState
from nblaunch.training.checkpoints.model_files import save
from nblaunch.training.collectives import operations
from nblaunch.training.collectives.operations import (
    CannotPadNestedTensorWarning,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from nblaunch.training.collectives.rng import set_seed, synchronize_rng_states
from nblaunch.training.data.prepare import prepare_data_loader
from nblaunch.training.options import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from nblaunch.training.trackers import GeneralTracker, on_main_process
from tests.training import ranks


# In double precision: Adam divides by the size of gradients, so rounding errors from another order of sums would
# determine the direction of weights with tiny gradients.
def _dataset(num_rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(num_rows, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin(), torch.arange(num_rows))


def _network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def _train(batch_size: int, split: bool, accumulation: int, rows: int) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(split_batches=split, gradient_accumulation_steps=accumulation)
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(
        _dataset(rows), batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
    wrapped, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(3):
        for inputs, targets, _index in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward((wrapped(inputs) - targets).pow(2).mean())
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0) if accelerator.sync_gradients else None
                optimizer.step()
                if split:
                    scheduler.step()
                optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    ("world_size", "split", "accumulation"), [(2, False, 1), (2, True, 3), (4, False, 3), (4, True, 1)]
)
def test_training_equals_a_single_process(world_size: int, split: bool, accumulation: int) -> None:
    # The same global batches everywhere, with 16 rows each.
    batch_size = 16 if split else 16 // world_size
    expected = ranks.run(_train, 1, 16, split, accumulation, 64)[0]
    weights = ranks.run(_train, world_size, batch_size, split, accumulation, 64)
    for rank in range(world_size):
        torch.testing.assert_close(weights[rank], expected, rtol=1e-4, atol=1e-6)


def _seen_in_metrics(
    sizes: Sequence[int], batch_size: int, shuffle: bool, options: dict[str, Any]
) -> dict[int, list[list[int]]]:
    """Return the samples seen in each of two epochs, for datasets of these sizes."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    found: dict[int, list[list[int]]] = {}
    for rows in sizes:
        loader = accelerator.prepare(DataLoader(_dataset(rows), batch_size=batch_size, shuffle=shuffle))
        found[rows] = [
            [
                row
                for _inputs, _targets, index in loader
                for row in accelerator.gather_for_metrics({"index": index})["index"].tolist()
            ]
            for _ in range(2)
        ]
    return found


@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"use_seedable_sampler": True}])
def test_metrics_count_every_sample_once(options: dict[str, Any]) -> None:
    for found in ranks.run(_seen_in_metrics, 2, [1, 7, 12, 13, 24], 4, True, options):
        for rows, epochs in found.items():
            assert [sorted(seen) for seen in epochs] == [list(range(rows))] * 2


def test_metrics_keep_the_order_of_the_dataset() -> None:
    for found in ranks.run(_seen_in_metrics, 2, [13], 4, False, {}):
        assert found == {13: [list(range(13))] * 2}


class _ShuffledRows(Sampler[int]):
    """A sampler that shuffles with torch's global generator unless it gets one, like transformers' length-grouped
    sampler.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.generator: torch.Generator | None = None

    def __iter__(self) -> Any:
        return iter(torch.randperm(self.rows, generator=self.generator).tolist())

    def __len__(self) -> int:
        return self.rows


def _orders_of_a_global_shuffle(is_shared: bool, seeds: Sequence[int]) -> tuple[list[list[int]], float]:
    options = {"use_seedable_sampler": True}
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    torch.manual_seed(seeds[accelerator.process_index])
    loader = DataLoader(torch.arange(24), batch_size=4, sampler=_ShuffledRows(24))
    if is_shared:
        loader = accelerator.prepare(loader)
    epochs = [
        [row for batch in loader for row in (gather(batch) if is_shared else batch).tolist()]
        for _ in range(2)
    ]
    return epochs, torch.rand(()).item()


def test_other_samplers_keep_the_global_generator() -> None:
    expected = ranks.run(_orders_of_a_global_shuffle, 1, False, [3])[0]
    assert ranks.run(_orders_of_a_global_shuffle, 2, True, [3, 3]) == [expected] * 2


def test_ranks_with_different_seeds_share_a_global_order() -> None:
    for epochs, _ in ranks.run(_orders_of_a_global_shuffle, 2, True, [3, 4]):
        assert [sorted(seen) for seen in epochs] == [list(range(24))] * 2


def _collect_objects(rows: int) -> list[list[str]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(_dataset(rows), batch_size=2))
    return [accelerator.gather_for_metrics([f"{i}" for i in index]) for _, _, index in loader]


def test_metrics_of_objects_count_every_sample_once() -> None:
    for batches in ranks.run(_collect_objects, 2, 7):
        assert batches == [["0", "1", "2", "3"], ["4", "5", "6"]]


class _Counted(IterableDataset[Any]):
    """A stream of the numbers below ``rows``, without a length."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(torch.arange(self.rows).float())


def _repeated_losses(rows: int, batch_size: int, package: str, is_iterable: bool) -> list[list[float]]:
    """Evaluate like a trainer: repeat the mean loss of a batch for each row of a full batch."""
    # without these settings, Accelerate warns
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    kit = importlib.import_module(package)
    accelerator = kit.Accelerator(cpu=True)
    dataset: Any = _Counted(rows) if is_iterable else torch.arange(rows).float()
    loader = accelerator.prepare(DataLoader(dataset, batch_size=batch_size))
    return [accelerator.gather_for_metrics(batch.mean().repeat(batch_size)).tolist() for batch in loader]


@pytest.mark.parametrize("is_iterable", [False, True])
@pytest.mark.parametrize("package", ["nblaunch", "accelerate"])
def test_a_repeated_loss_is_cut_to_the_rows_of_the_last_batch(package: str, is_iterable: bool) -> None:
    losses = ranks.run(_repeated_losses, 1, 5, 2, package, is_iterable)
    assert losses == [[[0.5, 0.5], [2.5, 2.5], [4.0]]]


def test_values_without_rows_are_not_cut() -> None:
    accelerator = Accelerator()
    for batch in accelerator.prepare(DataLoader(torch.arange(5).float(), batch_size=2)):
        loss, rows, text = batch.mean(), {"rows": batch}, {"text": "a"}
        assert accelerator.gather_for_metrics(loss) is loss
        assert accelerator.gather_for_metrics(rows)["rows"].tolist() == batch.tolist()
        assert accelerator.gather_for_metrics(text) == {"text": "a"}


class _Growing(BatchSampler):
    """A batch sampler with batches of 1, 2, 3 ... rows, up to the batch size."""

    def __iter__(self) -> Any:
        indices = list(self.sampler)
        size = 1
        while indices:
            yield indices[:size]
            indices, size = indices[size:], min(size + 1, self.batch_size)

    def __len__(self) -> int:
        return len(list(iter(self)))


@pytest.mark.parametrize("rows", [4, 5, 9, 10, 11])
def test_metrics_count_samples_of_varying_batches_once(rows: int) -> None:
    accelerator = Accelerator()
    sampler = _Growing(SequentialSampler(range(rows)), 4, False)
    seen: list[int] = []
    for batch in accelerator.prepare(DataLoader(torch.arange(rows), batch_sampler=sampler)):
        seen += accelerator.gather_for_metrics(batch).tolist()
    assert seen == list(range(rows))


def _time_first(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"sequences": torch.zeros(9, len(rows)), "labels": torch.stack(rows)}


@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"batch_sampler": _Growing(SequentialSampler(range(10)), 4, False)}]
)
def test_metrics_without_a_batch_dimension_are_whole(options: dict[str, Any]) -> None:
    accelerator = Accelerator()
    dataset: Any = _Counted(10) if "batch_size" in options else torch.arange(10)
    loader = accelerator.prepare(DataLoader(dataset, collate_fn=_time_first, **options))
    seen = [row for batch in loader for row in accelerator.gather_for_metrics(batch["labels"]).tolist()]
    assert seen == list(range(10))


def _short_time_first(rows: list[int]) -> dict[str, torch.Tensor]:
    return {"sequences": torch.zeros(3, len(rows)), "labels": torch.tensor(rows)}


def test_metrics_of_a_stream_survive_a_shorter_first_tensor() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(_Numbers(8), batch_size=4, collate_fn=_short_time_first))
    seen = [row for batch in loader for row in accelerator.gather_for_metrics(batch["labels"]).tolist()]
    assert seen == list(range(8))


def _compare_on_demand() -> list[str]:
    state = PartialState()
    rejected = []
    tensor = torch.zeros(1, 5 + state.process_index)
    cube = torch.zeros((1, 1, 5) if state.is_main_process else (1, 5))
    state.debug = True
    for collective, argument in (
        (gather, tensor),
        (reduce, tensor),
        (broadcast, tensor),
        (pad_across_processes, cube),
    ):
        try:
            collective({"tensor": argument})
        except DistributedOperationException as error:
            rejected.append(str(error))
    padded = pad_across_processes(tensor, dim=1)
    state.debug = False
    assert padded.shape == (1, 6)
    return rejected


def test_shapes_are_compared_on_request() -> None:
    for rejected in ranks.run(_compare_on_demand, 2):
        assert len(rejected) == 4
        assert all("rank 0" in text and "rank 1" in text for text in rejected)


class _Numbers(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def _read_stream(count: int, num_workers: int) -> tuple[list[int], list[str]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(DataLoader(_Numbers(count), batch_size=2, num_workers=num_workers))
    return _gathered(accelerator, loader)


def _gathered(accelerator: Accelerator, loader: Any) -> tuple[list[int], list[str]]:
    """Return the gathered rows of an epoch, and the warnings."""
    seen: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Since Python 3.12, the fork of torch's workers warns about threads.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        for batch in loader:
            seen += accelerator.gather_for_metrics(batch).tolist()
    return seen, [str(warning.message) for warning in caught]


def test_metrics_of_a_stream_count_every_sample_once() -> None:
    for seen, warned in STREAMS["stream"]:
        assert seen == list(range(7))
        assert warned == []


def test_inexact_metrics_of_a_stream_are_reported() -> None:
    for seen, warned in STREAMS["stream of a worker"]:
        assert seen == [0, 1, 2, 3, 4, 5, 6, 0]
        assert len(warned) == 1
        assert "still include them" in warned[0]


class _Batches(IterableDataset):
    """A stream that yields batches of 8 rows."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(torch.arange(40).split(8))


def _read_batches(num_workers: int) -> tuple[list[int], list[str]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(DataLoader(_Batches(), batch_size=None, num_workers=num_workers))
    return _gathered(accelerator, loader)


@pytest.mark.parametrize("name", ["batches", "batches of a worker"])
def test_metrics_of_a_batch_stream_keep_the_last_batch(name: str) -> None:
    for seen, warned in STREAMS[name]:
        assert seen == [*range(40), *range(8)]
        assert len(warned) == 1
        assert "still include them" in warned[0]


class _Dividing(IterableDataset):
    """A stream that divides itself, like streams of datasets."""

    n_shards = 2

    def __init__(self, *rows: int) -> None:
        self.rows = rows

    def shard(self, num_shards: int, index: int) -> _Dividing:
        return _Dividing(*self.rows[index::num_shards])

    def __iter__(self) -> Any:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def _read_own_part() -> tuple[list[int], list[str]]:
    config = DataLoaderConfiguration(dispatch_batches=False, even_batches=False)
    accelerator = Accelerator(dataloader_config=config)
    return _gathered(accelerator, accelerator.prepare(DataLoader(_Dividing(*range(6)), batch_size=2)))


def test_metrics_of_a_stream_that_divides_itself_are_exact() -> None:
    for seen, warned in STREAMS["own parts"]:
        assert seen == [0, 2, 1, 3, 4, 5]
        assert warned == []


def _warnings_of_own_parts(dataset: Any, even_batches: bool) -> list[str]:
    config = DataLoaderConfiguration(dispatch_batches=False, even_batches=even_batches)
    accelerator = Accelerator(dataloader_config=config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.prepare(DataLoader(dataset))
    return [str(warning.message) for warning in caught]


def test_rank_0_warns_about_uneven_parts_of_a_stream() -> None:
    (message,), others = STREAMS["uneven parts"]
    assert others == []
    assert "join_uneven_inputs" in message
    assert "dispatch_batches=True" in message


def test_requested_uneven_parts_are_not_reported() -> None:
    assert STREAMS["uneven parts on request"] == [[], []]


STREAMS = ranks.Together(
    2,
    **{
        "stream": lambda: _read_stream(7, 0),
        "stream of a worker": lambda: _read_stream(7, 1),
        "batches": lambda: _read_batches(0),
        "batches of a worker": lambda: _read_batches(1),
        "own parts": _read_own_part,
        "uneven parts": lambda: _warnings_of_own_parts(_Dividing(*range(7)), True),
        "uneven parts on request": lambda: _warnings_of_own_parts(_Dividing(*range(7)), False),
    },
)


def _join_own_parts(rows: int) -> tuple[int, float]:
    config = DataLoaderConfiguration(dispatch_batches=False, even_batches=False)
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=config)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_Dividing(*range(rows))))
    num_steps = 0
    for _ in range(2):
        with accelerator.join_uneven_inputs([model]):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch.float()[:, None]).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    num_steps += accelerator.sync_gradients
    return num_steps, accelerator.gather(model.module.weight.sum()).diff().item()


def test_accumulating_ranks_join_at_the_end_of_a_divided_stream() -> None:
    """An epoch has four and three batches, so windows close at the second and the fourth."""
    assert ranks.run(_join_own_parts, 2, 7) == [(4, 0), (2, 0)]


def _orders(rng_types: list[str] | None, has_own_generator: bool) -> list[list[int]]:
    torch.manual_seed(context.current().topology.rank)
    accelerator = Accelerator(rng_types=rng_types)
    sampler: Any = RandomSampler(range(16))
    if not has_own_generator:
        sampler = _GlobalOrder(16)
    loader = accelerator.prepare(DataLoader(_dataset(16), batch_size=2, sampler=sampler))
    return [accelerator.gather(torch.cat([index for _, _, index in loader])).tolist() for _epoch in range(2)]


class _GlobalOrder(Sampler):
    """A sampler that draws from torch's global generator, which only ``rng_types=["torch"]`` synchronises."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter(torch.randperm(self.count).tolist())


@pytest.mark.parametrize(("rng_types", "has_own"), [(None, True), (["torch"], False), (["torch"], True)])
def test_ranks_share_one_random_order_and_a_new_one_each_epoch(rng_types: Any, has_own: bool) -> None:
    for first, second in ranks.run(_orders, 2, rng_types, has_own):
        assert sorted(first) == sorted(second) == list(range(16))
        assert first != second


def _order_without_an_accelerator() -> list[int]:
    set_seed(0, device_specific=True)
    loader = prepare_data_loader(DataLoader(torch.arange(16), batch_size=2, shuffle=True))
    return gather(torch.cat(list(loader))).tolist()


def test_ranks_share_one_random_order_without_an_accelerator() -> None:
    assert [sorted(order) for order in ranks.run(_order_without_an_accelerator, 2)] == [list(range(16))] * 2


def _epochs_of_a_loader_of_one_rank() -> list[int]:
    """Read twice on rank 0 and once on rank 1, in an order that needs no other rank."""
    rank = context.current().topology.rank
    loader = prepare_data_loader(
        DataLoader(range(8), shuffle=True),
        num_processes=2,
        process_index=1,
        use_seedable_sampler=True,
        data_seed=0,
    )
    counts = [len(list(loader)) for _epoch in range(2 - rank)]
    return gather(torch.tensor(sum(counts))).tolist()


def test_a_seeded_order_needs_no_other_rank() -> None:
    assert ranks.run(_epochs_of_a_loader_of_one_rank, 2) == [[8, 4]] * 2


def _orders_of_two_groups() -> list[list[int]]:
    """Let ranks 0 and 1 share one loader, and ranks 2 and 3 read another one twice as often, each with its own seed."""
    rank = context.current().topology.rank
    generator = torch.Generator().manual_seed(rank // 2)
    loader = prepare_data_loader(
        DataLoader(range(8), shuffle=True, generator=generator), num_processes=2, process_index=rank % 2
    )
    orders = [torch.cat(list(loader)) for _epoch in range(1 + rank // 2)]
    return gather(orders[0]).reshape(4, 4).tolist()


def test_separate_groups_draw_separate_orders() -> None:
    found = ranks.run(_orders_of_two_groups, 4)[0]
    assert sorted(found[0] + found[1]) == sorted(found[2] + found[3]) == list(range(8))
    assert found[0] != found[2]


def _collectives() -> dict[str, Any]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    mine = {
        "scalar": torch.tensor(float(rank)),
        "bool": torch.tensor([rank == 0, True]),
        "bf16": torch.full((1, 2), rank + 0.5, dtype=torch.bfloat16),
        "columns": torch.arange(4).reshape(2, 2).t() + rank,
        "empty": torch.empty(0, 3),
    }
    slot = context.current().slot
    slot.set_state(WorkerState.RUNNING)
    before = torch.tensor([1.0 + rank, 5.0 - rank])
    lengths = torch.full((rank + 1, 2), rank)
    with accelerator.split_between_processes(list(range(5)), apply_padding=True) as share:
        share = list(share)
    overwritten = torch.tensor([[rank, 7], [rank, 8]], dtype=torch.int16).t()
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    with pytest.warns(CannotPadNestedTensorWarning, match="to_padded_tensor"):
        padded_nested = accelerator.pad_across_processes({"x": [nested]})
    answers = {
        "gather": accelerator.gather(mine),
        "sum": accelerator.reduce(before),
        "mean": accelerator.reduce(before, "mean"),
        "max": accelerator.reduce({"x": before}, "max", scale=2.0)["x"],
        "unchanged": before,
        "broadcast": accelerator.broadcast([overwritten], from_process=1),
        "in place": overwritten,
        "padded": accelerator.pad_across_processes(lengths, pad_index=9),
        "padded in front": accelerator.pad_across_processes(lengths, dim=-2, pad_index=9, pad_first=True),
        "nothing to pad": accelerator.pad_across_processes(lengths, dim=1) is lengths
        and accelerator.pad_across_processes(lengths, dim=2) is lengths,
        "nested": padded_nested["x"][0] is nested,
        "objects": accelerator.gather_object([f"rank {rank}"]),
        "list": broadcast_object_list([rank, "x"], from_process=1),
        "share": share,
        "on last": accelerator.on_last_process(lambda: "here")(),
        "on 1": accelerator.on_process(lambda: "here", process_index=1)(),
        "label": accelerator.distributed_type.value,
        "state": slot.state.name,
        "ranks": (accelerator.is_main_process, accelerator.is_last_process, accelerator.use_distributed),
    }
    accelerator.end_training()
    return answers


def test_collectives() -> None:
    zero, one = ranks.run(_collectives, 2)
    for answers in (zero, one):
        gathered = answers["gather"]
        assert gathered["scalar"].tolist() == [0, 1]
        assert gathered["bool"].tolist() == [True, True, False, True]
        assert gathered["bf16"].dtype is torch.bfloat16
        assert gathered["bf16"].tolist() == [[0.5, 0.5], [1.5, 1.5]]
        assert gathered["columns"].tolist() == [[0, 2], [1, 3], [1, 3], [2, 4]]
        assert gathered["empty"].shape == (0, 3)
        assert answers["sum"].tolist() == [3, 9]
        assert answers["mean"].tolist() == [1.5, 4.5]
        assert answers["max"].tolist() == [4, 10]
        assert answers["broadcast"][0].tolist() == answers["in place"].tolist() == [[1, 1], [7, 8]]
        assert answers["nested"]
        assert answers["nothing to pad"]
        assert answers["objects"] == ["rank 0", "rank 1"]
        assert answers["list"] == [1, "x"]
        assert answers["label"] == "MULTI_CPU"
        assert answers["state"] == "RUNNING"
    assert zero["unchanged"].tolist() == [1, 5]
    assert zero["padded"].tolist() == [[0, 0], [9, 9]]
    assert zero["padded in front"].tolist() == [[9, 9], [0, 0]]
    assert one["padded"].tolist() == [[1, 1], [1, 1]]
    assert (zero["share"], one["share"]) == ([0, 1, 2], [3, 4, 4])
    assert (zero["on last"], one["on last"]) == (zero["on 1"], one["on 1"]) == (None, "here")
    assert (zero["ranks"], one["ranks"]) == ((True, False, True), (False, True, True))


def _draw_alike(rank: int) -> float:
    torch.manual_seed(rank)
    synchronize_rng_states(["torch"])
    return torch.rand(1).item()


FIRST_USES: dict[str, Callable[[int], Any]] = {
    "gather": lambda rank: gather(torch.tensor([rank])).tolist(),
    "gather_object": lambda rank: gather_object([rank]),
    "reduce": lambda rank: reduce(torch.tensor([rank]), "sum").tolist(),
    "broadcast": lambda rank: broadcast(torch.tensor([rank]), from_process=1).tolist(),
    "broadcast_object_list": lambda rank: broadcast_object_list([rank], from_process=1),
    "pad_across_processes": lambda rank: pad_across_processes(torch.ones(1 + rank)).shape,
    "synchronize_rng_states": _draw_alike,
}


def _use_at_once(name: str) -> tuple[Any, str]:
    found = FIRST_USES[name](context.current().topology.rank)
    return found, type(Accelerator().prepare(nn.Linear(1, 1))).__name__


@pytest.mark.parametrize("name", FIRST_USES)
def test_the_first_use_joins_the_other_ranks(name: str) -> None:
    zero, one = ranks.run(_use_at_once, 2, name)
    assert zero == one
    assert zero[1] == "DistributedDataParallel"


def _ask_twice_for_a_timeout() -> list[str]:
    handlers = [InitProcessGroupKwargs(timeout=timedelta(minutes=9))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Accelerator(kwargs_handlers=handlers)
        Accelerator(kwargs_handlers=handlers)
        PartialState(timeout=timedelta(minutes=9))
        early = len(caught)
        PartialState(timeout=timedelta(minutes=1))
    assert early == 0
    return [str(one.message) for one in caught]


def test_an_earlier_timeout_stays_in_effect() -> None:
    for messages in ranks.run(_ask_twice_for_a_timeout, 2):
        assert len(messages) == 1
        assert "timeout=0:01:00 has no effect" in messages[0]


class _Gathered(Dataset[Any]):
    """A dataset whose only item is a value gathered by the reading process."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return gather_object([context.current().topology.rank])


def _read_elsewhere() -> list[Any]:
    rank = context.current().topology.rank
    everyone = gather_object([rank])
    if rank == 0:
        return [everyone]
    (read,) = DataLoader(_Gathered(), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    return [everyone, read]


def test_child_processes_do_not_join_the_group() -> None:
    assert ranks.run(_read_elsewhere, 2) == [[[0, 1]], [[0, 1], [1]]]


def _stay_in_a_group_of_ones_own() -> list[int]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    gathered: list[int] = gather_object([context.current().topology.rank])
    return gathered


def test_the_functions_process_group_is_used() -> None:
    assert ranks.run(_stay_in_a_group_of_ones_own, 2) == [[0], [1]]


def test_a_lone_process_joins_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "join", pytest.fail)
    assert gather_object([1]) == [1]
    assert reduce(torch.ones(1)).tolist() == [1]


def _messages(cases: Sequence[tuple[str, Sequence[Any]]]) -> list[str]:
    """Return the error of each operation, which gets another argument on each rank. Errors keep ranks in step."""
    accelerator = Accelerator()
    messages = []
    for operation, by_rank in cases:
        try:
            getattr(accelerator, operation)(by_rank[accelerator.process_index])
            messages.append("nothing was raised")
        except (ValueError, TypeError) as error:
            messages.append(str(error))
    return messages


def test_gathering_other_objects_is_an_error() -> None:
    cases = [("gather", [{"x": "word"}] * 2), ("gather", [{"a": torch.zeros(1), "x": "word"}] * 2)]
    expected = "gather works on tensors in lists, tuples and dicts, but found a str: 'word'"
    assert ranks.run(_messages, 2, cases) == [[expected] * 2] * 2


WORDS = "got tensors that don't match across ranks:"
WHOLE, HALF = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.float16)


def test_shapes_that_differ_are_an_error_on_every_rank() -> None:
    operations = ["gather", "reduce", "broadcast"]
    cases = [(operation, [WHOLE, torch.zeros(3, dtype=torch.int64)]) for operation in operations]
    cases.append(("pad_across_processes", [torch.zeros(1, 2), torch.zeros(1)]))
    expected = [
        f"{operation} {WORDS}\n  rank 0: [2] torch.int64\n  rank 1: [3] torch.int64\n"
        "Call pad_across_processes first, or use even_batches=True for loaders."
        for operation in operations
    ]
    unpaddable = (
        f"pad_across_processes {WORDS}\n"
        "  rank 0: 2 dimensions torch.float32\n  rank 1: 1 dimensions torch.float32"
    )
    assert ranks.run(_messages, 2, cases) == [[*expected, unpaddable]] * 2


# The ranks' structures -> how they are listed.
STRUCTURES: list[tuple[Sequence[Any], tuple[str, str]]] = [
    # One rank has more tensors than the other, or other tensors under the same name.
    (
        ({"x": WHOLE}, {"x": (WHOLE, HALF)}),
        ("{x: [2] torch.int64}", "{x: [[2] torch.int64, [1] torch.float16]}"),
    ),
    (
        ({"x": WHOLE, "y": HALF}, {"y": HALF, "x": WHOLE}),
        ("{x: [2] torch.int64, y: [1] torch.float16}", "{y: [1] torch.float16, x: [2] torch.int64}"),
    ),
    (
        ({"x": WHOLE, "y": WHOLE}, {"y": WHOLE, "x": WHOLE}),
        ("{x: [2] torch.int64", "{y: [2] torch.int64"),
    ),
    (([WHOLE, 1], [WHOLE, HALF]), ("[[2] torch.int64, int]", "[[2] torch.int64, [1] torch.float16]")),
    (({}, {"x": WHOLE}), ("{}", "{x: [2] torch.int64}")),
    ((1, WHOLE), ("int", "[2] torch.int64")),
]


def test_structures_that_differ_are_an_error_on_every_rank() -> None:
    for messages in ranks.run(_messages, 2, [("gather", by_rank) for by_rank, _ in STRUCTURES]):
        for message, (_, listing) in zip(messages, STRUCTURES, strict=True):
            zero, one = message.removeprefix(f"gather {WORDS}\n  rank 0: ").split("\n")[:2]
            assert zero.startswith(listing[0])
            assert one.startswith(f"  rank 1: {listing[1]}")


def test_different_structures_may_match() -> None:
    cases = [
        ("gather", (torch.zeros(()), torch.zeros(1))),  # a number is a row
        ("gather", ([torch.zeros(1)], (torch.zeros(1),))),
        ("pad_across_processes", (torch.zeros(1, 2), torch.zeros(2, 1))),
    ]
    assert ranks.run(_messages, 2, cases) == [["nothing was raised"] * 3] * 2


class _Key:
    """An object whose repr has its address, which differs between ranks."""


def _gather_under_objects() -> list[Any]:
    rank = operations.rank()
    others = [_Key() for _ in range(rank)]  # so that addresses differ even in ranks forked from one process
    keys = [_Key(), (_Key(), "x")]
    gathered = gather({key: torch.tensor([len(others)]) for key in keys})
    return [gathered[key].tolist() for key in keys]


def test_names_with_different_reprs_match() -> None:
    assert ranks.run(_gather_under_objects, 2) == [[[0, 1]] * 2] * 2


def _gather_where_devices_have_a_group_of_their_own(cases: Sequence[Sequence[Any]]) -> list[str]:
    topology = context.current().topology
    store = dist.TCPStore(topology.master_addr, topology.master_port, is_master=False)
    kinds = "cpu:gloo,cuda:gloo"  # like "cpu:gloo,cuda:nccl", without NCCL
    dist.init_process_group(kinds, rank=topology.rank, world_size=topology.world_size, store=store)
    messages = []
    for by_rank in cases:
        try:
            gather(by_rank[topology.rank])
            messages.append("nothing was raised")
        except ValueError as error:
            messages.append(str(error))
    return messages


ON_A_DEVICE = torch.zeros(2, dtype=torch.int64, device="meta")


def test_ranks_agree_on_the_devices_of_tensors() -> None:
    others: list[Any] = [{}, {"x": "word"}, {"x": WHOLE, "y": WHOLE}]
    cases = [case for other in others for case in ([{"x": ON_A_DEVICE}, other], [other, {"x": ON_A_DEVICE}])]
    for messages in ranks.run(_gather_where_devices_have_a_group_of_their_own, 2, cases):
        assert len(messages) == len(cases)
        assert all(message.startswith(f"gather {WORDS}\n  rank 0: {{") for message in messages)


def test_differing_metric_types_are_an_error() -> None:
    cases = [(["a"], []), ([], ["a"]), (["a"], {}), ({}, ["a"])]
    for messages in ranks.run(_messages, 2, [("gather_for_metrics", by_rank) for by_rank in cases]):
        assert all(message.startswith(f"gather {WORDS}\n  rank 0: ") for message in messages)
        assert all("needs use_gather_object=True on all" in message for message in messages)


def _take_turns(path: str) -> str:
    accelerator = Accelerator()
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            Path(path).write_text("written by the main process")
        return Path(path).read_text()


def test_the_main_process_goes_first(tmp_path: Path) -> None:
    assert ranks.run(_take_turns, 3, str(tmp_path / "file")) == ["written by the main process"] * 3


def _save_late(folder: str) -> list[str]:
    """List the folder on rank 1 after its ``save_model`` has returned, and before the main process's begins."""
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()
    accelerator.save_model(model, folder)
    found = sorted(os.listdir(folder))
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()
    return found


def test_saved_folders_exist_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "of" / "model"
    assert ranks.run(_save_late, 2, str(folder)) == [["model.safetensors"], []]
    assert os.listdir(folder) == ["model.safetensors"]


def _waiting_states() -> list[str]:
    """Return the state on rank 0's slot while rank 1 is late for a barrier."""
    accelerator = Accelerator()
    seen = []
    if accelerator.is_main_process:
        slot = context.current().slot
        thread = threading.Thread(target=accelerator.wait_for_everyone)
        thread.start()
        while slot.state is not WorkerState.WAITING:
            thread.join(0.01)
        seen.append(slot.state.name)
        _send_to_rank_one()
        thread.join()
        seen.append(slot.state.name)
    else:
        _receive_from_rank_zero()
        accelerator.wait_for_everyone()
    return seen


def _side_group() -> dist.Store:
    topology = context.current().topology
    return dist.TCPStore(topology.master_addr, topology.master_port, is_master=False)


def _send_to_rank_one() -> None:
    _side_group().set("rank 0 waits", "yes")


def _receive_from_rank_zero() -> None:
    _side_group().get("rank 0 waits")


def test_waiting_ranks_are_marked() -> None:
    assert ranks.run(_waiting_states, 2)[0] == ["WAITING", "STARTING"]


def _prepare_models() -> dict[str, Any]:
    accelerator = Accelerator(
        mixed_precision="bf16", kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    )
    module, frozen, evaluated = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False), nn.Linear(2, 1)
    model = accelerator.prepare(module)
    raw = DistributedDataParallel(nn.Linear(2, 1))
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.full((1, 2), float(accelerator.process_index))).sum())
    unsynced = module.weight.grad.clone()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    synced = accelerator.gather(module.weight.grad)
    return {
        "type": type(model).__name__,
        "again": accelerator.prepare(model) is model,
        "bucket view": model.gradient_as_bucket_view,
        "unwrapped": accelerator.unwrap_model(model) is module,
        "frozen": accelerator.prepare(frozen) is frozen,
        "evaluated": accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated,
        "raw": accelerator.prepare(raw) is raw,
        "plain again": accelerator.unwrap_model(model, keep_fp32_wrapper=False).forward.__func__
        is nn.Linear.forward,
        "unsynced": unsynced.tolist(),
        "equal": bool((synced[0] == synced[1]).all()),
    }


def test_models_are_wrapped_in_ddp() -> None:
    for rank, answers in enumerate(ranks.run(_prepare_models, 2)):
        assert answers.pop("type") == "DistributedDataParallel"
        assert answers.pop("unsynced") == [[rank, rank]]
        assert all(answers.values()), answers


def _join_before() -> tuple[int, int, str]:
    """Run like a script that created its process group itself and sets no environment variables."""
    topology = context.current().topology
    dist.init_process_group("gloo", rank=topology.rank, world_size=topology.world_size)
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu")))
    accelerator = Accelerator()
    return (
        accelerator.process_index,
        accelerator.num_processes,
        type(accelerator.prepare(nn.Linear(1, 1))).__name__,
    )


def test_existing_process_groups_are_used() -> None:
    assert ranks.run(_join_before, 2) == [
        (0, 2, "DistributedDataParallel"),
        (1, 2, "DistributedDataParallel"),
    ]


class _Tracker(GeneralTracker):
    name, requires_logging_directory, tracker = "mine", False, None

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> str:
        return "logged"


def _use_without_an_accelerator(folder: str) -> tuple[int, list[int], bool, str | None]:
    """Do the same in a script that uses parts of the library without an Accelerator."""
    rank = context.current().topology.rank
    dist.init_process_group("gloo", rank=rank, world_size=2)
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu")))
    path = Path(folder, f"by_rank_{rank}")
    save({}, path)
    shard = prepare_data_loader(DataLoader(range(4)))
    seed = set_seed(5, device_specific=True)
    return seed, [int(item) for item in shard], path.exists(), _Tracker().log({})


def test_existing_groups_define_the_ranks(tmp_path: Path) -> None:
    zero, one = ranks.run(_use_without_an_accelerator, 2, str(tmp_path))
    assert zero == (5, [0, 2], True, "logged")
    assert one == (6, [1, 3], False, None)


def _lone_but_launched() -> tuple[str, str | None]:
    accelerator = Accelerator()
    return type(accelerator.prepare(nn.Linear(1, 1))).__name__, accelerator.state.backend


def test_one_launched_process_joins_a_group_but_needs_no_ddp() -> None:
    assert ranks.run(_lone_but_launched, 1) == [("Linear", "gloo")]


def _uneven() -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare(DataLoader(_dataset(5), batch_size=2))
    return [index.tolist() for _, _, index in loader]


def test_uneven_ranks_do_not_wait_for_each_other() -> None:
    assert ranks.run(_uneven, 2) == [[[0, 1], [4]], [[2, 3]]]


def _accumulate(sync_each_batch: bool) -> list[bool]:
    """Return whether both ranks have the same gradient after each micro-step."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    equal = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 1.0 + accelerator.process_index)).sum())
        gradients = accelerator.gather(model.module.weight.grad)
        equal.append(bool(gradients[0] == gradients[1]))
    return equal


@pytest.mark.parametrize("sync_each_batch", [False, True])
def test_gradients_are_reduced_where_the_window_ends(sync_each_batch: bool) -> None:
    assert ranks.run(_accumulate, 2, sync_each_batch) == [[sync_each_batch, True]] * 2


def _warnings_of_backward(is_prepared: bool) -> list[str]:
    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = accelerator.prepare(optimizer)
    if is_prepared:
        model = accelerator.prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 2)).sum())
    return [f"{warning.filename.rpartition('/')[2]}: {warning.message}" for warning in caught]


def test_training_an_unprepared_model_is_reported_once() -> None:
    (shown,), others = ranks.run(_warnings_of_backward, 2, False)
    assert shown.startswith("test_distributed.py: no model was prepared, so each rank trains its own copy")
    assert others == []


def test_correct_training_is_not_reported() -> None:
    assert ranks.run(_warnings_of_backward, 2, True) == [[], []]
    assert ranks.run(_warnings_of_backward, 1, False) == [[]]
