"""``gather_for_metrics`` of structures returns each sample once, or raises an error that says what can't be cut."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from nblaunch import Accelerator
from nblaunch.training.options import DataLoaderConfiguration
from tests.training import ranks

ROWS, BATCH = 7, 2
Out = namedtuple("Out", "scores texts")


def _texts(rows: torch.Tensor) -> list[str]:
    return [f"{row}" for row in rows.tolist()]


# Name -> a rank's results for a batch, and the expected results of an epoch with two batches per rank.
FULL, TAIL = [0, 1, 2, 3], [4, 5, 6]


def _as_texts(rows: list[int]) -> list[str]:
    return [f"{row}" for row in rows]


RIGHT: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[list[int]], Any], bool]] = {
    "tensor and texts": (lambda x: (x, _texts(x)), lambda rows: (rows, _as_texts(rows)), False),
    "list of both": (lambda x: [x, _texts(x)], lambda rows: [rows, _as_texts(rows)], False),
    "dict with texts": (
        lambda x: {"scores": x, "texts": _texts(x)},
        lambda rows: {"scores": rows, "texts": _as_texts(rows)},
        False,
    ),
    "tuple of texts": (
        lambda x: (_texts(x), _texts(-x)),
        lambda rows: (_as_texts(rows), [f"{-row}" for row in rows]),
        False,
    ),
    "nested": (
        lambda x: {"a": [{"b": x, "c": tuple(_texts(x))}, (x, None)]},
        lambda rows: {"a": [{"b": rows, "c": _as_texts(rows)}, (rows, None)]},
        False,
    ),
    "named tuple": (lambda x: Out(x, _texts(x)), lambda rows: Out(rows, _as_texts(rows)), False),
    "dicts of samples": (
        lambda x: [{"text": text, "row": row} for text, row in zip(_texts(x), x, strict=True)],
        lambda rows: [{"text": f"{row}", "row": row} for row in rows],
        False,
    ),
    "tuple of dicts of samples": (
        lambda x: tuple({"text": text} for text in _texts(x)),
        lambda rows: [{"text": f"{row}"} for row in rows],
        False,
    ),
    "tensors of samples": (
        lambda x: [row.reshape(1, 1) for row in x],
        lambda rows: [[[row]] for row in rows],
        True,
    ),
    "dict of tensors of samples": (
        lambda x: {"boxes": list(x)},
        lambda rows: {"boxes": rows},
        True,
    ),
    "arrays": (lambda x: np.asarray(x), lambda rows: rows, False),
    "tensor and array": (lambda x: (x, np.asarray(x)), lambda rows: (rows, rows), False),
    "arrays in a tuple": (lambda x: (np.asarray(x), np.asarray(x)), lambda rows: (rows, rows), False),
    "one array in a tuple": (lambda x: {"x": (np.asarray(x),)}, lambda rows: {"x": (rows,)}, False),
    "arrays of samples": (
        lambda x: [np.asarray(row).reshape(1) for row in x],
        lambda rows: [[row] for row in rows],
        False,
    ),
    "array of objects": (
        lambda x: {"x": [x, np.array(_texts(x), dtype=object)]},
        lambda rows: {"x": [rows, _as_texts(rows)]},
        False,
    ),
    "dicts of tensors of samples": (
        lambda x: [{"boxes": row.repeat(2)} for row in x],
        lambda rows: [{"boxes": [row, row]} for row in rows],
        True,
    ),
}


def _plain(data: Any) -> Any:
    if isinstance(data, (torch.Tensor, np.generic, np.ndarray)):
        return data.tolist()
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, tuple):
        plain = [_plain(item) for item in data]
        return type(data)(*plain) if hasattr(data, "_fields") else tuple(plain)
    return [_plain(item) for item in data] if isinstance(data, list) else data


def _gathered(options: dict[str, Any]) -> dict[str, list[Any]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(torch.arange(ROWS), batch_size=BATCH))
    made: dict[str, list[Any]] = {name: [] for name in RIGHT}
    for batch in loader:
        for name in RIGHT:
            compute, _, uses_objects = RIGHT[name]
            made[name].append(_plain(accelerator.gather_for_metrics(compute(batch), uses_objects)))
    return made


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}], ids=str)
def test_each_sample_is_gathered_once_in_any_structure(options: dict[str, Any]) -> None:
    for made in ranks.run(_gathered, 2, options):
        for name, (_, right, _) in RIGHT.items():
            for rows, gathered in zip((FULL, TAIL), made[name], strict=True):
                assert gathered == right(rows), name


def _values_of_ranks() -> list[Any]:
    """Return gathered values with one per rank, which are kept even if fewer samples than ranks are left."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(5).float(), batch_size=2))
    gathered: Any = None
    for batch in loader:
        loss = batch.sum()
        gathered = accelerator.gather_for_metrics(
            {"a": loss, "b": loss.reshape(1), "c": f"{loss:.0f}", "n": None}
        )
        alone = accelerator.gather_for_metrics(f"{loss:.1f}")
    return [gathered["a"].tolist(), gathered["b"].tolist(), gathered["c"], gathered["n"], alone]


def test_values_of_ranks_are_kept() -> None:
    for gathered in TOGETHER["values"]:
        assert gathered == [[4.0, 3.0], [4.0, 3.0], ["4", "3"], None, ["4.0", "3.0"]]


def _single_samples() -> list[Any]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(3).float(), batch_size=1))
    return [accelerator.gather_for_metrics((batch.sum(), _texts(batch)))[0].tolist() for batch in loader]


def test_single_sample_batches_keep_one_value_per_rank() -> None:
    assert TOGETHER["single samples"] == [[[0.0, 1.0], [2.0]]] * 2


# Words of the error -> values that can't be cut.
UNCLEAR: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    r"a tensor of shape \[8\]": (lambda x: x.repeat_interleave(2), False),
    r"a tensor of shape \[6, 1\]": (lambda x: {"y": torch.zeros(3, 1)}, False),
    "a list of 6 objects": (lambda x: (x, ["a", "b", "c"]), False),
    "a list of 2 tensors with one row": (lambda x: list(x), False),
    r"a tensor of shape \[10\]": (lambda x: tuple(row.repeat(5) for row in x), False),
    "a list of 8 objects": (lambda x: [*x, *x], True),
    "a list of 2 dicts": (lambda x: [{"boxes": row.repeat(2)} for row in x], False),
    "a list of 2 tuples": (lambda x: [(row, row) for row in x], False),
    "a set of length 2": (lambda x: (x, set(_texts(x))), False),
    "a ndarray of length 2": (lambda x: [np.asarray(x)], False),
    "a Tensor of length 2": (lambda x: (x,), True),
    "a DataFrame of length 2": (lambda x: pandas.DataFrame({"text": _texts(x)}), False),
}


def _errors() -> dict[str, str]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(ROWS), batch_size=BATCH))
    messages: dict[str, str] = {}
    for batch in loader:
        for name, (compute, uses_objects) in UNCLEAR.items():
            try:
                accelerator.gather_for_metrics(compute(batch), uses_objects)
            except ValueError as error:
                assert loader.end_of_dataloader
                messages[name] = str(error)
    return messages


def test_uncuttable_values_raise_on_every_rank() -> None:
    for messages in TOGETHER["errors"]:
        for name in UNCLEAR:
            with pytest.raises(ValueError, match=f"rows of {name} belong to which sample"):
                raise ValueError(messages[name])
        assert all("3 samples and was padded to 4" in text for text in messages.values())
        assert all(
            "use_gather_object=True" in text and "accelerator.gather" in text for text in messages.values()
        )


def _lists_of_columns() -> list[list[list[int]]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(ROWS), batch_size=BATCH))
    rounds = [accelerator.gather_for_metrics([batch, batch * 2]) for batch in loader]
    return [torch.cat(column).tolist() for column in zip(*rounds, strict=True)]


def test_lists_of_as_many_columns_as_samples_are_cut() -> None:
    rows = list(range(ROWS))
    assert TOGETHER["columns"] == [[rows, [2 * row for row in rows]]] * 2


def _different_structures() -> str:
    accelerator = Accelerator()
    data: Any = {"a": ["x"]} if accelerator.process_index else {"b": ["x"]}
    try:
        accelerator.gather_for_metrics(data)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


TOGETHER = ranks.Together(
    2,
    **{
        "values": _values_of_ranks,
        "single samples": _single_samples,
        "errors": _errors,
        "columns": _lists_of_columns,
        "structures": _different_structures,
    },
)


def test_structures_that_differ_are_an_error_on_every_rank() -> None:
    for message in TOGETHER["structures"]:
        assert message == (
            "the structures that ranks passed to gather_for_metrics don't match:\n"
            "  rank 0: dict(b: objects)\n  rank 1: dict(a: objects)"
        )


@pytest.mark.parametrize(("batch_size", "rows"), [(4, 7), (6, 9)])
def test_a_lone_process_keeps_all_rows(batch_size: int, rows: int) -> None:
    """The data has two rows per sample, and a loss that is repeated for a full batch."""
    accelerator = Accelerator()
    seen: list[int] = []
    for batch in accelerator.prepare(DataLoader(torch.arange(rows), batch_size=batch_size)):
        loss = accelerator.gather_for_metrics(batch.float().mean().repeat(batch_size))
        assert len(loss) == len(batch)
        if batch_size == 6 and len(batch) == 3:
            with pytest.raises(
                ValueError, match=r"a tensor of shape \[6\] belong.*3 samples and is not full"
            ):
                accelerator.gather_for_metrics(batch.repeat(2))
        else:
            seen += accelerator.gather_for_metrics((batch.repeat(2), _texts(batch)))[0].tolist()
    assert sorted(seen) == sorted([*range(rows)] * 2) or batch_size == 6


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        return iter(range(info.id, 7, info.num_workers))

    def __len__(self) -> int:
        return 7


def _read_by_two() -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(DataLoader(_Stream(), batch_size=2, num_workers=2))
    seen: list[int] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for batch in loader:
            seen += accelerator.gather_for_metrics(batch).tolist()
    assert "how many samples were added to fill the loader's last batch" in str(shown[-1].message)
    return sorted(seen)


def test_a_stream_read_by_several_processes_is_not_cut() -> None:
    """Each process has its own last batch, so the length says nothing about the stream's last batch."""
    for seen in ranks.run(_read_by_two, 2):
        assert set(seen) == set(range(7))


def test_arrays_of_a_short_last_batch_stay_complete() -> None:
    accelerator = Accelerator()
    for batch in accelerator.prepare(DataLoader(torch.arange(3), batch_size=2)):
        gathered = accelerator.gather_for_metrics((np.asarray(batch), np.asarray(batch) + 1))
        assert [column.tolist() for column in gathered] == [batch.tolist(), (batch + 1).tolist()]
