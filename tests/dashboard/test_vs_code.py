"""A job in VS Code, whose Jupyter extension has stricter rules than JupyterLab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nblaunch.dashboard import notebook
from tests.dashboard.feed import FEED
from tests.dashboard.front_end import FrontEnd, VSCode
from tests.kernels import Cell, Kernel
from tests.profiles import PROFILES, python_of

# A background job, which a later cell ends.
BACKGROUND = """
d = dashboard.choose({kind!r}, background=True)
stop, thread = run_in_background(d)
"""


@pytest.fixture(scope="module", params=PROFILES)
def shared(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    env = {"VSCODE_PID": "94309", "VSCODE_CWD": "/"}
    with Kernel.start(python=python_of(request.param), env=env) as kernel:
        kernel.run(FEED)
        yield kernel


def run(kernel: Kernel, source: str) -> Cell:
    return kernel.run(source, allow_stdin=True)


def shown(kernel: Kernel, *cells: Cell) -> VSCode:
    return VSCode(kernel.messages, [cell.msg_id for cell in cells])


@pytest.mark.parametrize("kind", ["auto", "html", "text"])
def test_a_background_job_is_shown_in_several_cells(shared: Kernel, kind: str) -> None:
    first = run(shared, BACKGROUND.format(kind=kind))
    second = run(shared, "_ = dashboard.show_again(d)")
    ended = run(shared, "stop.set(); thread.join()")
    front_end = shown(shared, first, second, ended)
    for cell in (first, second):
        table, *others = front_end.tables(cell.msg_id)
        assert all("logs: /logs/train-1" in other for other in others)
        assert "train: done in" in table
    assert front_end.outputs[ended.msg_id] == []


def test_a_background_job_updates_an_idle_cell(shared: Kernel) -> None:
    cell = run(shared, BACKGROUND.format(kind="html"))

    def drawn() -> list[str]:
        return shown(shared, cell).tables(cell.msg_id)

    shared.wait_until(lambda: "training" in drawn()[0], 180, "a table of ranks that train")
    before = drawn()
    shared.wait_until(lambda: drawn() != before, 180, "another table")
    run(shared, "stop.set(); thread.join()")


def test_widgets_update_while_no_cell_runs(shared: Kernel) -> None:
    cell = run(shared, BACKGROUND.format(kind="widgets"))
    seen = len(shared.messages)
    shared.wait_until(
        lambda: FrontEnd(shared.messages[:]).num_updates > FrontEnd(shared.messages[:seen]).num_updates,
        30,
        "updates of widgets",
    )
    ended = run(shared, "stop.set(); thread.join()")
    assert "train: done in" in shown(shared, cell, ended).tables(cell.msg_id)[0]


def test_the_error_of_a_cell_is_shown(shared: Kernel) -> None:
    # A figure per step on each of eight ranks.
    cell = shared.run(
        """
d = dashboard.choose()
emit(d, begin(8))
for step in range(120):
    emit(d, [Displayed(rank, 0.0, {"text/plain": f"figure {step}"}, {}, {}, False) for rank in range(8)])
    emit(d, [LogLines(rank, time.time(), (f"step {step}",)) for rank in range(8)])
emit(d, end(8))
close(d)
raise LookupError
""",
        raises="LookupError",
        allow_stdin=True,
    )
    outputs = shown(shared, cell).outputs[cell.msg_id]
    assert len(outputs) <= VSCode.MAX_OUTPUTS
    assert outputs[-1]["kind"] == "error"
    assert "[0-7] step 119\n" in cell.stdout


def test_an_output_updates_in_all_its_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: list[tuple[str, str]] = []
    output = notebook.Output(
        lambda bundle, display_id, is_update: published.append((display_id, bundle["x"]))
    )
    for cell in range(5):
        monkeypatch.setattr(notebook, "id_of_running_request", lambda cell=cell: str(cell))
        assert output.show_again() if cell else output.show({"x": "begins"}) == 1
    display_ids = [display_id for display_id, _ in published]
    assert len(set(display_ids)) == 5
    published.clear()
    assert output.show({"x": "goes on"}) == 5
    assert published == [(display_id, "goes on") for display_id in display_ids]
    published.clear()
    assert output.show({"x": "goes on"}) == 0
    assert output.show({"x": "goes on"}, is_final=True) == 5
    assert [display_id for display_id, _ in published] == display_ids
