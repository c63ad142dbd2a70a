"""Prepared loaders in one process; test_distributed.py tests sharing among real ranks."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections import UserDict, namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from nblaunch import Accelerator, context, set_seed
from nblaunch.events import EpochEnded, WorkerState
from nblaunch.training.collectives import nested
from nblaunch.training.data.dispatcher import DataLoaderDispatcher
from nblaunch.training.data.loader import DataLoaderShard, PreparedLoader
from nblaunch.training.data.prepare import LoaderTarget, prepare_data_loader, shard_loader
from nblaunch.training.data.resuming import capture
from nblaunch.training.data.samplers import SeedableRandomSampler
from nblaunch.training.data.sharding import BatchSamplerShard
from nblaunch.training.options import DataLoaderConfiguration
from nblaunch.training.shared_state import get_shared_state
from nblaunch.wire.board import SlotReading


def _rows(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def _board() -> SlotReading:
    return context.current().slot.read(0)


def _second_of_two(loader: DataLoader, **options: Any) -> PreparedLoader:
    """Prepare a loader as on rank 1 of 2; it can't be iterated here if it would communicate."""
    target = LoaderTarget(rank=1, world_size=2, device=torch.device("cpu"))
    return shard_loader(loader, target, DataLoaderConfiguration(dispatch_batches=False, **options))


class _Stream(IterableDataset):
    def __init__(self, count: int, has_length: bool = False) -> None:
        self.count = count
        self.epochs: list[int] = []
        if has_length:
            self.__class__ = _SizedStream

    def __iter__(self) -> Any:
        return iter(range(self.count))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class _SizedStream(_Stream):
    def __len__(self) -> int:
        return self.count


def test_the_end_is_known_while_the_last_batch_is_in_hand() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(_rows(10), batch_size=4))
    seen = []
    for (batch,) in loader:
        state = accelerator.gradient_state
        assert state.active_dataloader is loader
        seen.append((batch.tolist(), loader.end_of_dataloader, state.end_of_dataloader, state.remainder))
    assert seen == [([0, 1, 2, 3], False, False, 2), ([4, 5, 6, 7], False, False, 2), ([8, 9], True, True, 2)]
    assert accelerator.gradient_state.active_dataloader is None
    assert not accelerator.gradient_state.end_of_dataloader


def test_prepared_loaders_show_the_base_loaders_attributes() -> None:
    def collate(rows: list[Any]) -> Any:
        return rows

    dataset = _rows(20)
    sampler = SequentialSampler(dataset)
    given = DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=collate, drop_last=True)
    loader = Accelerator().prepare(given)
    assert isinstance(loader, DataLoader)
    assert type(loader.base_dataloader) is DataLoader
    assert loader.gradient_state.num_steps == 1
    assert (loader.dataset, loader.sampler, loader.collate_fn) == (dataset, sampler, collate)
    assert (loader.batch_size, loader.total_batch_size, loader.total_dataset_length) == (4, 4, 20)
    assert loader.batch_sampler is given.batch_sampler
    assert len(loader) == 5
    shard = _second_of_two(given)
    assert (shard.batch_size, shard.total_batch_size, len(shard)) == (4, 8, 2)
    assert shard.sampler is sampler
    assert _second_of_two(given, split_batches=True).total_batch_size == 4


def test_nested_loops_restore_the_outer_loader() -> None:
    accelerator = Accelerator()
    outer, inner = accelerator.prepare(DataLoader(_rows(2)), DataLoader(_rows(3)))
    for _ in outer:
        for _ in inner:
            assert accelerator.gradient_state.active_dataloader is inner
            assert accelerator.gradient_state.dataloader_references == [None, outer, inner]
        assert accelerator.gradient_state.active_dataloader is outer
        assert accelerator.gradient_state.end_of_dataloader == outer.end_of_dataloader


def test_iteration_counts_completed_epochs_and_reaches_samplers() -> None:
    epochs: list[int] = []

    class Sampler(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    dataset = _rows(4)
    loader = Accelerator().prepare(DataLoader(dataset, sampler=Sampler(dataset)))
    list(loader)
    assert loader.iteration == 1
    for _ in loader:
        break
    assert loader.iteration == 1
    list(loader)
    loader.set_epoch(7)
    list(loader)
    assert epochs == [0, 1, 1, 7, 7]
    assert loader.iteration == 8
    _second_of_two(DataLoader(dataset, sampler=Sampler(dataset))).set_epoch(3)
    assert epochs[-1] == 3, "below the shard, too"


def test_an_empty_loader_yields_nothing() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(_rows(0), batch_size=2))
    assert list(loader) == []
    assert not accelerator.gradient_state.in_dataloader


def test_reading_workers_and_other_options_are_kept() -> None:
    given = DataLoader(_rows(8), batch_size=2, num_workers=2, prefetch_factor=3, timeout=30)
    loader = Accelerator().prepare(given)
    assert (loader.num_workers, loader.prefetch_factor, loader.timeout) == (2, 3, 30)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("make", [RandomSampler, lambda rows: SubsetRandomSampler(range(3))])
def test_a_random_sampler_gets_a_generator_that_ranks_can_share(make: Any) -> None:
    dataset = _rows(6)
    loader = Accelerator().prepare(DataLoader(dataset, sampler=make(dataset)))
    assert isinstance(loader.sampler.generator, torch.Generator)
    assert loader._generators() == [loader.sampler.generator]


def test_a_subset_counts_its_own_samples() -> None:
    loader = Accelerator().prepare(
        DataLoader(_rows(100), batch_size=4, sampler=SubsetRandomSampler(range(6)))
    )
    for _ in loader:
        assert loader.remainder == 2


def test_a_seedable_sampler_replaces_a_random_one() -> None:
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    )
    orders = []
    for _ in range(2):
        loader = accelerator.prepare(DataLoader(_rows(12), shuffle=True))
        assert isinstance(loader.sampler, SeedableRandomSampler)
        orders.append([[row.item() for (row,) in loader] for _epoch in range(2)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_a_seedable_order_follows_set_seed_whatever_was_drawn_since() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    orders = []
    for num_drawn in (0, 3):
        set_seed(11)
        torch.rand(num_drawn)
        loader = accelerator.prepare(DataLoader(_rows(12), shuffle=True))
        orders.append([row.item() for (row,) in loader])
    assert orders[0] == orders[1]
    expected = torch.randperm(12, generator=torch.Generator().manual_seed(11)).tolist()
    assert orders[0] == expected


def test_a_batch_sampler_given_as_sampler_is_shared_in_batches() -> None:
    dataset = _rows(8)
    sampler = BatchSampler(SequentialSampler(dataset), 2, False)
    given = DataLoader(dataset, sampler=sampler, batch_size=None)
    assert [batch.tolist() for (batch,) in Accelerator().prepare(given)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    shard = _second_of_two(given)
    assert isinstance(shard.sampler, BatchSamplerShard)
    assert len(shard) == 2
    assert list(shard.sampler) == [[2, 3], [6, 7]]


def test_a_stream_of_unknown_length() -> None:
    accelerator = Accelerator()
    stream = _Stream(5)
    loader = accelerator.prepare(DataLoader(stream, batch_size=2))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    list(loader)
    assert stream.epochs == [0, 1]
    assert _board().total == -1


def test_a_stream_with_a_length_is_shared_in_blocks() -> None:
    shard = _second_of_two(DataLoader(_Stream(10, has_length=True), batch_size=2))
    assert (len(shard), shard.total_batch_size, shard.total_dataset_length) == (3, 4, 10)
    assert list(shard.dataset) == [2, 3, 6, 7, 0, 1]
    halves = _second_of_two(DataLoader(_Stream(10), batch_size=4), split_batches=True)
    assert (halves.batch_size, halves.total_batch_size) == (2, 4)


def test_a_stream_of_ready_batches_is_shared_by_batch() -> None:
    shard = _second_of_two(DataLoader(_Stream(6), batch_size=None))
    assert list(shard.dataset) == [1, 3, 5]


def test_set_sampler_reaches_below_the_shards() -> None:
    dataset = _rows(8)
    shard = _second_of_two(DataLoader(dataset, batch_size=2))
    sampler = SequentialSampler(range(4))
    shard.set_sampler(sampler)
    assert shard.sampler is sampler
    assert list(shard.batch_sampler) == [[2, 3]]
    listed = Accelerator().prepare(DataLoader(dataset, batch_sampler=[[0], [1]]))
    with pytest.raises(TypeError, match="list has no sampler"):
        listed.set_sampler(sampler)


def test_loaders_can_be_pickled_and_freed() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(_rows(4), batch_size=2, shuffle=True))
    list(loader)
    copy = pickle.loads(pickle.dumps(loader))
    assert copy.iteration == 1
    assert sorted(row.item() for (batch,) in copy for row in batch) == [0, 1, 2, 3]
    accelerator.free_memory()
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert gone() is None
    finally:
        gc.enable()


def test_the_board_returns_to_the_outer_loop() -> None:
    accelerator = Accelerator()
    context.current().slot.set_state(WorkerState.RUNNING)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    train, test = accelerator.prepare(DataLoader(_rows(5), batch_size=2), DataLoader(_rows(4)))
    for step, _ in enumerate(train, 1):
        board = _board()
        assert (board.state, board.step, board.total) == (WorkerState.TRAINING, step, 3)
        if step == 2:
            model.eval()
            for number, _ in enumerate(test, 1):
                board = _board()
                assert (board.state, board.step, board.total) == (WorkerState.EVALUATING, number, 4)
            model.train()
            assert _board().state is WorkerState.TRAINING
    assert _board().state is WorkerState.RUNNING
    assert _board().samples == 9
    assert _board().trained == (3, 3, 1)
    for _ in train:
        assert (_board().epoch, _board().num_epochs) == (2, 0)
    with torch.no_grad():
        for _ in test:
            assert (_board().state, _board().epoch) == (WorkerState.EVALUATING, 2)


def test_eval_on_the_unwrapped_model_counts() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.DataParallel(torch.nn.Linear(1, 1)))
    loader = accelerator.prepare(DataLoader(_rows(2)))
    seen = []
    for module in (accelerator.unwrap_model(model), model):
        for mode in (False, True):
            module.train(mode)
            seen += [_board().state for _ in loader][:1]
    assert seen == [WorkerState.EVALUATING, WorkerState.TRAINING] * 2


def test_steps_of_nested_loops_are_all_counted() -> None:
    outer, inner = Accelerator().prepare(DataLoader(_rows(4)), DataLoader(_rows(2)))
    before = _board().steps_done
    for _ in outer:
        for _ in inner:
            pass
    assert _board().steps_done - before == 4 + 4 * 2


def test_epochs_are_counted_from_the_first_and_by_the_loop_over_them() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    train, test = accelerator.prepare(DataLoader(_rows(4)), DataLoader(_rows(4)))
    seen = []
    for _ in accelerator.progress(range(3), desc="epochs"):
        for loader, mode in ((train, True), (test, False)):
            model.train(mode)
            for _ in loader:
                pass
            seen.append((_board().epoch, _board().num_epochs))
    assert seen == [(1, 3), (1, 3), (2, 3), (2, 3), (3, 3), (3, 3)]
    model.train()
    for _ in accelerator.progress(range(2), desc="more epochs"):
        for _ in train:
            pass
    assert (_board().epoch, _board().num_epochs) == (5, 5)
    for _ in accelerator.progress(range(3)):  # any items, such as folds
        for _ in train:
            pass
        assert _board().num_epochs == 0


def _prepared_for_epochs(**settings: Any) -> tuple[Accelerator, Any, PreparedLoader, list[EpochEnded]]:
    """Return an Accelerator, a function for a training step with a given loss, a loader of four batches, and the
    ended epochs.
    """
    ended: list[EpochEnded] = []
    context.current().emit = lambda event: ended.append(event) if isinstance(event, EpochEnded) else None
    accelerator = Accelerator(**settings)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(_rows(4))
    )

    def train(loss: float) -> None:
        accelerator.backward(model(torch.ones(1)).sum() * 0 + loss)
        optimizer.step()

    return accelerator, train, loader, ended


def test_epochs_left_early_count_only_on_the_dashboard() -> None:
    _, train, loader, ended = _prepared_for_epochs()
    for loss in (4.0, 3.0, 2.0, 1.0):
        for step, _ in enumerate(loader):
            train(loss)
            assert _board().epoch == 5 - loss
            if step == 1 and loss != 2.0:
                break
    assert [(one.epoch, one.loss) for one in ended] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    assert _board().trained == (2, 4, 4)
    assert loader.iteration == 1, "one was read to its end"
    loader.set_epoch(7)
    for _ in loader:
        assert _board().epoch == 8
    assert (ended[-1].epoch, loader.iteration) == (8, 8)


def test_epochs_ended_by_an_error_count() -> None:
    _, train, loader, ended = _prepared_for_epochs()
    with pytest.raises(ZeroDivisionError):
        _raise_in(loader, train)
    for _ in loader:
        context.current().slot.num_updates += 1  # like the hook of a worker
        break
    assert [(one.epoch, one.loss) for one in ended] == [(1, 1.0), (2, None)]


def _raise_in(loader: PreparedLoader, train: Any) -> None:
    for _ in loader:
        train(1.0)
        raise ZeroDivisionError


def test_looking_at_batches_is_not_an_epoch() -> None:
    _, train, loader, ended = _prepared_for_epochs()
    next(iter(loader))
    assert (_board().epoch, _board().step, _board().total) == (0, 0, -1)
    for _ in loader:
        train(1.0)
    shown = (_board().epoch, _board().step, _board().total, _board().loop, _board().state)
    next(iter(loader))
    for _ in loader:
        assert _board().epoch == 2
        break
    assert (_board().epoch, _board().step, _board().total, _board().loop, _board().state) == shown
    assert _board().trained == (4, 4, 1)
    with torch.no_grad():
        for _ in loader:
            assert _board().epoch == 1
            break
    for _ in loader:
        train(2.0)
    assert [(one.epoch, one.loss) for one in ended] == [(1, 1.0), (2, 2.0)]


def test_a_kept_look_does_not_affect_later_epochs() -> None:
    _accelerator, train, loader, ended = _prepared_for_epochs()
    held = iter(loader)
    next(held)
    for epoch in (1, 2):
        for _ in loader:
            train(float(epoch))
        state = capture(loader, get_shared_state())
        assert (state["iteration"], state["position"]) == (epoch, None)
    del held
    assert _board().trained == (4, 4, 2)
    assert [(one.epoch, one.loss) for one in ended] == [(1, 1.0), (2, 2.0)]
    assert loader.epochs.left == 0


def test_a_kept_iterator_may_be_dropped_within_an_epoch() -> None:
    _accelerator, train, loader, _ = _prepared_for_epochs()
    held = iter(loader)
    next(held)
    for step, _ in enumerate(loader, 1):
        train(1.0)
        if step == 2:
            del held
            assert capture(loader, get_shared_state())["position"]["samples"] == 2
    assert (_board().trained, loader.epochs.left) == ((4, 4, 1), 0)


def test_looks_and_evaluations_do_not_move_an_epoch() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(_rows(4), shuffle=True))
    for step, _ in enumerate(loader, 1):
        before = capture(loader, get_shared_state())
        next(iter(loader))
        with torch.no_grad():
            for _ in loader:
                pass
        after = capture(loader, get_shared_state())
        assert accelerator.gradient_state.end_of_dataloader is (step == 4)
        if step < 4:
            assert after["position"] == before["position"]
            assert after["position"]["samples"] == step
            assert before["generators"]
            assert all(map(torch.equal, after["generators"], before["generators"]))


def test_loops_left_by_earlier_commands_leave_the_board() -> None:
    _, train, loader, ended = _prepared_for_epochs()
    held = iter(loader)
    next(held)
    next(held)
    context.current().num_commands += 1  # a session counts commands this way
    context.current().forget_losses()
    context.current().slot.set_state(WorkerState.RUNNING)
    for _ in loader:
        train(1.0)
    assert _board().state is WorkerState.RUNNING
    trained = _board().trained
    assert trained[:2] == (4, 4)
    assert len(ended) == 1
    del held
    assert _board().trained == trained
    assert len(ended) == 1


def test_loops_resumed_by_a_command_return_to_the_board() -> None:
    accelerator, train, loader, _ = _prepared_for_epochs()
    held = iter(loader)
    next(held)
    train(1.0)
    context.current().num_commands += 1  # a session counts commands this way
    context.current().forget_losses()
    for _ in held:
        train(1.0)
        with torch.no_grad():
            for _ in accelerator.prepare(DataLoader(_rows(2))):
                pass
    assert _board().trained == (4, 4, 1)


def test_loops_left_early_stay_on_the_board() -> None:
    _, _, loader, ended = _prepared_for_epochs()
    for step, _ in enumerate(loader):
        if step == 2:
            break
    assert (_board().epoch, _board().step, _board().total, _board().trained) == (1, 3, 4, (3, 4, 1))
    assert [one.epoch for one in ended] == [1]


def test_checkpoints_keep_epochs_left_early(tmp_path: Path) -> None:
    accelerator, train, loader, _ = _prepared_for_epochs()
    for epoch in (1, 2, 3):
        for step, _ in enumerate(loader):
            train(1.0)
            if (epoch, step) == (3, 1):
                accelerator.save_state(str(tmp_path))
            if step == 1:
                break
    accelerator, train, loader, ended = _prepared_for_epochs()
    accelerator.load_state(str(tmp_path))
    for _ in accelerator.skip_first_batches(loader, 2):
        train(3.0)
        assert (_board().epoch, _board().step) == (3, 3)
        break
    for _ in loader:
        train(4.0)
    assert [(one.epoch, one.loss) for one in ended] == [(3, 3.0), (4, 4.0)]
    assert loader.iteration == 1


def test_loader_states_keep_epochs_left_early() -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    _, train, loader, _ = _prepared_for_epochs(dataloader_config=config)
    state = None
    for _ in range(3):
        for step, _ in enumerate(loader):
            train(1.0)
            if step == 1:
                state = loader.state_dict()
                break
    _, train, loader, ended = _prepared_for_epochs(dataloader_config=config)
    loader.load_state_dict(state)
    for loss in (3.0, 4.0):
        for _ in loader:
            train(loss)
    assert [(one.epoch, one.loss) for one in ended] == [(3, 3.0), (4, 4.0)]


def test_loops_without_a_prepared_model_count_as_training() -> None:
    loader = Accelerator().prepare(DataLoader(_rows(4)))
    for _ in loader:
        assert (_board().state, _board().epoch) == (WorkerState.TRAINING, 1)
    with torch.no_grad():
        for _ in loader:
            assert (_board().state, _board().epoch) == (WorkerState.EVALUATING, 1)


@pytest.mark.parametrize(
    ("batches", "rows"),
    [
        (BatchSampler(range(7), 3, drop_last=False), [3, 6, 7]),
        ([[0, 1], [2], [3, 4, 5]], [2, 3, 6]),
    ],
)
def test_the_board_counts_samples_of_uneven_batches(batches: Any, rows: list[int]) -> None:
    loader = Accelerator().prepare(DataLoader(_rows(7), batch_sampler=batches))
    before = _board().samples
    assert [_board().samples - before for _ in loader] == rows


def test_the_board_counts_samples_with_a_custom_collate_fn() -> None:
    sizes = iter([1, 4, 4, 2])
    given = DataLoader(_rows(8), batch_size=2, collate_fn=lambda _: torch.zeros(next(sizes)))
    loader = Accelerator().prepare(given)
    before = _board().samples
    assert [_board().samples - before for _ in loader] == [1, 5, 9, 11]


def test_progress_shows_any_iterable() -> None:
    accelerator = Accelerator()
    for step, _ in enumerate(accelerator.progress([10, 20, 30])):
        assert (_board().step, _board().total) == (step, 3)
    assert _board().step == 3
    assert list(accelerator.progress(iter("ab"), total=2)) == ["a", "b"]
    assert _board().total == 2
    list(accelerator.progress(iter("ab")))
    assert _board().total == -1


def test_the_description_of_a_loop_is_the_status_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    accelerator = Accelerator()
    list(accelerator.progress("ab", desc="in a script"))
    assert capsys.readouterr().out == ""
    in_script = context.take()
    assert in_script is not None
    context.install(replace(in_script, is_launched=True))
    for desc in (None, "", "epochs"):  # epochs have their own column
        list(accelerator.progress("ab", desc=desc))
    assert capsys.readouterr().out == ""
    list(accelerator.progress("ab", desc="folds"))
    assert capsys.readouterr().out == "folds\r     \r"


def test_progress_around_a_prepared_loader_does_not_count_twice() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(_rows(4)))
    for step, _ in enumerate(accelerator.progress(enumerate(loader)), 1):
        assert (_board().step, _board().total) == (step, 4)
    for step, _ in enumerate(accelerator.progress(loader), 1):
        assert (_board().step, _board().total) == (step, 4)


def test_already_sharded_loaders_are_rejected() -> None:
    dataset = _rows(8)
    twice = DataLoader(dataset, sampler=DistributedSampler(dataset, num_replicas=2, rank=0))
    with pytest.raises(ValueError, match=r"DistributedSampler .*1/2"):
        Accelerator().prepare(twice)
    Accelerator().prepare(DataLoader(dataset, sampler=DistributedSampler(dataset, num_replicas=1, rank=0)))


class _Doubling(DataLoader):
    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


def test_custom_iteration_is_reported_as_lost() -> None:
    with pytest.warns(UserWarning, match="_Doubling has its own __iter__") as caught:
        Accelerator().prepare(_Doubling(range(4)))
    assert caught[0].filename == __file__


Point = namedtuple("Point", "x y")


class _Movable:
    def __init__(self) -> None:
        self.device = "cpu"

    def to(self, device: torch.device) -> _Movable:
        moved = _Movable()
        moved.device = str(device)
        return moved


def test_nested_batches_move_and_keep_their_types() -> None:
    tensor = torch.ones(2)
    batch = {"a": [tensor, (tensor, "text")], "b": Point(tensor, 3), "c": UserDict(k=tensor), "d": _Movable()}
    moved = nested.send_to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Point)
    assert moved["b"].x.is_meta
    assert isinstance(moved["c"], UserDict)
    assert moved["c"]["k"].is_meta
    assert moved["d"].device == "meta"
    edge = nested.send_to_device(namedtuple("Edge", "to")(tensor), torch.device("meta"))
    assert edge.to.is_meta
    assert nested.count_rows(batch) == nested.count_rows({"words": ["a", "b", "c"], **batch}) == 2
    assert nested.count_rows([]) == nested.count_rows("text") == 0
    assert nested.count_rows(torch.tensor(1)) == 1
    halves = {"x": torch.ones(1, dtype=torch.bfloat16), "y": (torch.ones(1, dtype=torch.int64), None)}
    full = nested.convert_to_fp32(halves)
    assert (full["x"].dtype, full["y"][0].dtype, full["y"][1]) == (torch.float32, torch.int64, None)


@pytest.mark.parametrize("skip_keys", [None, ["text"]])
def test_a_packed_sequence_moves_by_its_own_rules(skip_keys: Any) -> None:
    packed = pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
    moved = nested.send_to_device({"x": packed}, torch.device("meta"), skip_keys=skip_keys)["x"]
    assert isinstance(moved, PackedSequence)
    assert moved.data.is_meta
    assert moved.batch_sizes.tolist() == packed.batch_sizes.tolist()


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_a_device_may_be_given_as_text(kind: Any) -> None:
    assert [batch.device.type for batch in kind(range(4), batch_size=2, device="meta")] == ["meta", "meta"]
    prepared = prepare_data_loader(DataLoader(range(4), batch_size=2), device="meta", put_on_device=True)
    assert [batch.device.type for batch in prepared] == ["meta", "meta"]


def test_device_placement_decides_where_batches_go() -> None:
    accelerator = Accelerator()
    given = DataLoader(_rows(2))
    assert accelerator.prepare_data_loader(given, device_placement=False).device is None
    assert accelerator.prepare_data_loader(given).device == torch.device("cpu")
    shard = accelerator.prepare_data_loader(given)
    shard.device = torch.device("meta")
    assert all(batch.is_meta for (batch,) in shard)
