"""The last collectives of a rank are read completely, whatever is overwritten in the meantime."""

from __future__ import annotations

from nblaunch.wire.collective_calls import (
    NUM_CALLS,
    REGION_BYTES,
    UNCOUNTED,
    CallReader,
    CallWriter,
    Group,
    Splits,
    WrittenSite,
)


def site_of(handle: int, kind: str = "all_reduce", line: int = 9) -> WrittenSite:
    return WrittenSite(kind, handle, "float32", 1, 2, "SUM", -1, "", "train.py", line, "")


def both() -> tuple[CallWriter, CallReader, int]:
    memory = memoryview(bytearray(REGION_BYTES))
    writer = CallWriter(memory)
    return writer, CallReader(memory), writer.add_group(Group((0, 1, 2, 3), 0, True))


def test_calls_are_read_unchanged() -> None:
    writer, reader, group = both()
    assert reader.read().calls == ()
    writer.put(site_of(group), 1, chain=-5, size=12, shape=(3, 4, 0, 0), value=0.5)
    (call,) = reader.read().calls
    assert call.site.group == Group((0, 1, 2, 3), 0, True)
    assert (call.site.kind, call.site.dtype, call.site.reduction, call.site.line) == (
        "all_reduce", "float32", "SUM", 9,
    )  # fmt: skip
    assert (call.serial, call.number, call.chain, call.size, call.shape, call.value) == (
        1,
        1,
        -5,
        12,
        (3, 4),
        0.5,
    )
    assert call.is_collective


def test_the_last_calls_are_kept() -> None:
    writer, reader, group = both()
    for number in range(1, 3 * NUM_CALLS):
        writer.put(site_of(group), number)
    read = reader.read()
    assert read.num_calls == 3 * NUM_CALLS - 1
    numbers = [call.number for call in read.calls]
    assert numbers == list(range(numbers[0], 3 * NUM_CALLS))
    assert len(numbers) >= NUM_CALLS - 1


def test_full_text_areas_start_again() -> None:
    writer, reader, group = both()
    for line in range(1, 5000):
        writer.put(site_of(group, line=line), line)
    calls = reader.read().calls
    assert calls
    assert all(call.site.line == call.number for call in calls)
    assert calls[-1].number == 4999
    assert calls[-1].site.group == Group((0, 1, 2, 3), 0, True)


def test_a_site_outlives_the_texts() -> None:
    writer, reader, group = both()
    kept = site_of(group, line=3)
    note = writer.notes()
    note(kept, 0.5)
    for line in range(1000, 3000):
        writer.put(site_of(group, line=line), line)
    note(kept, 0.25)
    call = reader.read().calls[-1]
    assert (call.site.line, call.number, call.value, call.size, call.chain) == (3, 2, 0.25, UNCOUNTED, 0)


def test_groups_of_any_ranks() -> None:
    writer, reader, _ = both()
    groups = [
        Group(tuple(range(512)), 0, True),
        Group((7, 3, 5), 2),
        Group(tuple(range(0, 512, 8)), 1),
        Group((9,)),
    ]
    handles = [writer.add_group(group) for group in groups]
    for number, handle in enumerate(handles, start=1):
        writer.put(site_of(handle), number)
    assert [call.site.group for call in reader.read().calls] == groups


def test_readers_share_groups() -> None:
    """The digests of ranks then have the same keys."""
    writer, reader, group = both()
    other_writer, other_reader, other_group = both()
    writer.put(site_of(group), 1, chain=5)
    other_writer.put(site_of(other_group, line=12), 1, chain=6)
    assert reader.digests(16).keys() == other_reader.digests(16).keys()
    assert reader.digests(16) != other_reader.digests(16)


def test_a_call_that_was_rejected_is_not_read() -> None:
    writer, reader, group = both()
    writer.put(site_of(group), 1)
    serial = writer.put(site_of(group, "barrier"), 2, size=UNCOUNTED)
    writer.withdraw(serial)
    writer.put(site_of(group), 2)
    assert [(call.site.kind, call.number) for call in reader.read().calls] == [
        ("all_reduce", 1),
        ("all_reduce", 2),
    ]


def test_splits_of_the_last_all_to_all() -> None:
    writer, reader, group = both()
    writer.put_splits(1, (1, 2, 3, 4), (4, 3, 2, 1))
    writer.put(site_of(group, "all_to_all"), 1)
    assert reader.read().splits == Splits(1, (1, 2, 3, 4), (4, 3, 2, 1))


def test_child_of_a_rank_writes_to_own_memory() -> None:
    writer, reader, group = both()
    writer.put(site_of(group), 1)
    writer.detach()
    writer.put(site_of(group), 2)
    assert [call.number for call in reader.read().calls] == [1]
