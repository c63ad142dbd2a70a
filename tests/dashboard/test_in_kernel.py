"""Dashboards in a real kernel: their messages to the front end, by number and output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dashboard.feed import FEED
from tests.kernels import Kernel


# Sharing a kernel saves the start of four; nothing here outlives its cell.
@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with Kernel.start() as kernel:
        kernel.run(FEED)
        yield kernel


def outputs(cell: object) -> list[str]:
    kinds = {"stream", "display_data", "update_display_data", "execute_result", "error"}
    return [message["msg_type"] for message in cell.messages if message["msg_type"] in kinds]  # type: ignore[attr-defined]


def test_an_empty_job_is_one_message(shared: Kernel) -> None:
    cell = shared.run(
        "d = dashboard.choose(); emit(d, begin(2)); look(d, [SlotReading(0), SlotReading(1)])\n"
        "emit(d, end(2)); close(d)"
    )
    assert outputs(cell) == ["display_data"]
    (table,) = cell.displays
    assert set(table.data) == {"text/html", "text/plain"}
    first, alike, *_ = table.data["text/plain"].splitlines()
    assert first.startswith("train: done in ")
    assert alike == "ranks 0 and 1 alike: done"
    assert "<script" not in table.data["text/html"]


def test_the_table_stands_above_the_output_even_of_a_short_job(shared: Kernel) -> None:
    cell = shared.run(
        "d = dashboard.choose(); emit(d, begin(2)); emit(d, [LogLines(1, 0.0, ('hello',))]); look(d, [])\n"
        "emit(d, end(2)); close(d)"
    )
    assert outputs(cell) == ["display_data", "stream"]
    assert cell.stdout == "[1] hello\n"


def test_lines_and_steps_need_few_messages(shared: Kernel) -> None:
    # This test uses real time, because the kernel's own buffering affects the count.
    cell = shared.run(
        """
d = dashboard.choose()
emit(d, begin(4))
tick = threading.Event()
for step in range(50):
    emit(d, [LogLines(rank, time.time(), (f"rank {rank} step {step}",)) for rank in range(4) if step < 12])
    look(d, [SlotReading(rank, WorkerState.TRAINING, step, 50, loss=1 / (step + 1),
                        step_time_s=time.monotonic(), steps_done=step)
             for rank in range(4)])
    tick.wait(0.06)
emit(d, end(4))
close(d)
"""
    )
    kinds = outputs(cell)
    assert len(cell.messages) < 60
    assert kinds[0] == "display_data"
    assert set(kinds[1:]) == {"update_display_data", "stream"}
    assert [line for line in cell.stdout.splitlines() if line.startswith("[2]")] == [
        f"[2] rank 2 step {step}" for step in range(12)
    ]
    assert len(cell.stdout.splitlines()) == 48
    (table,) = cell.displays
    assert "49/50" in table.data["text/html"]
    assert "train: done in" in table.data["text/plain"]


def test_a_background_job_updates_its_own_cell_from_a_thread(shared: Kernel) -> None:
    cell = shared.run(
        """
d = dashboard.choose(background=True)
go = threading.Event()
def supervise():
    go.wait()
    emit(d, [*begin(2), LogLines(1, time.time(), ("from a thread",)), *end(2)])
    close(d)
thread = threading.Thread(target=supervise)
thread.start()
"""
    )
    assert outputs(cell) == ["display_data"]
    assert cell.displays[0].data["text/plain"] == "starting"
    other = shared.run("go.set(); thread.join(); print('other cell')")
    updates = [content for c in (cell, other) for content in c.contents("update_display_data")]
    assert [update["transient"]["display_id"] for update in updates] == [cell.displays[0].display_id]
    assert "[1] from a thread" in updates[0]["data"]["text/html"]
    assert (cell.stdout, other.stdout) == ("", "other cell\n")
    assert other.contents("display_data") == []


def test_figures_of_workers_appear_in_the_cell(shared: Kernel) -> None:
    cell = shared.run(
        """
d = dashboard.choose()
emit(d, begin(2))
show = lambda rank, update, text: Displayed(rank, 0.0, {"text/html": text}, {}, {"display_id": "plot"}, update)
emit(d, [show(rank, False, "first") for rank in (0, 1)])
emit(d, [show(rank, True, f"last of {rank}") for rank in (0, 1)])
emit(d, end(2))
close(d)
"""
    )
    table, zero, one = cell.displays
    assert "done" in table.data["text/plain"]
    assert (zero.display_id, zero.data) == ("plot", {"text/html": "last of 0"})
    assert (one.display_id, one.data) == ("plot-rank1", {"text/html": "last of 1"})
    assert cell.stdout == "[1] displayed:\n"


def test_dashboards_can_be_text_or_off(shared: Kernel) -> None:
    run = "d = dashboard.choose({!r}); emit(d, begin(1)); emit(d, end(1)); close(d)"
    assert set(shared.run(run.format("text")).displays[0].data) == {"text/plain"}
    assert outputs(shared.run(run.format("none"))) == []
