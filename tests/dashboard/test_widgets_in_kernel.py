"""Widgets in real kernels, with the newest Jupyter packages and with Colab's: their messages to a front end."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from nblaunch.dashboard.widget_throttle import BURST_BYTES
from tests.dashboard.feed import FEED
from tests.dashboard.front_end import VIEW, FrontEnd
from tests.event_loop import event_loop  # noqa: F401  a fixture
from tests.kernels import Cell, Kernel
from tests.profiles import PROFILES, python_of

TRAIN = """
def run(d, num_ranks, num_ticks, tick_s=0.05, text="line", end_it=True):
    tick = threading.Event()
    emit(d, begin(num_ranks))
    for step in range(num_ticks):
        emit(d, [LogLines(rank, time.time(), (f"{text} {step}",) * 20) for rank in range(num_ranks)])
        look(d, [SlotReading(rank, WorkerState.TRAINING, step * 7 + rank, 9_999, samples=step * 64, loss=1 / (step + 1),
                        losses=LossCurve(step, 1, tuple(1 / (s + 1) for s in range(min(step, MAX_BINS)))),
                        step_time_s=time.monotonic(), steps_done=step * 7 + rank) for rank in range(num_ranks)])
        tick.wait(tick_s)
    if end_it:
        emit(d, end(num_ranks))
        close(d)

class Controls:
    def __init__(self):
        self.asked = []
    def __getattr__(self, name):
        return lambda: self.asked.append(name)
    def show_with(self, show_again):
        self.show_again = show_again
    def ask_stacks(self):
        from concurrent.futures import Future
        self.asked.append("ask_stacks")
        answer = Future()
        answer.set_result("rank 0 is at <line 3>")
        return answer
"""

NUM_KEPT = 5
"""Number of widgets that remain of a job: a box with its layout, and a text with its layout and style."""

ALLOWANCE_BYTES = 2 * BURST_BYTES
"""The initial budget of messages, and the overdraft for the last message and an urgent one."""


@pytest.fixture(scope="module", params=PROFILES)
def shared(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel.start(python=python_of(request.param)) as kernel:
        kernel.run(FEED + TRAIN)
        yield kernel


def run(kernel: Kernel, source: str) -> Cell:
    """Run a cell as a user does, who could answer ``input()``."""
    return kernel.run(source, allow_stdin=True)


class Watched:
    """A front end that shows everything that a kernel sends from now on, including answers to clicks."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._start = len(kernel.messages)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self._kernel.messages[self._start :]

    @property
    def front_end(self) -> FrontEnd:
        return FrontEnd(self.messages)

    def wait_for(self, condition: Callable[[FrontEnd], bool], what: str) -> None:
        self._kernel.wait_until(lambda: condition(self.front_end), 180, what)


def test_widgets_are_replaced_when_the_cell_ends(shared: Kernel) -> None:
    cell = shared.submit(
        "_ = run(dashboard.choose(), 4, 40, text='<script>alert(1)</script>')", allow_stdin=True
    )
    cell.wait_for(lambda cell: len(FrontEnd(cell.messages).bars) == 5, what="five bars")
    cell.wait_for(
        lambda cell: cell.displays and "&lt;script&gt;" in FrontEnd(cell.messages).html, what="a panel"
    )
    live = FrontEnd(cell.messages)
    panel = cell.displays[0]
    assert set(panel.data) == {VIEW, "text/plain"}
    assert panel.data[VIEW]["model_id"] in live.open_ids
    assert set(live.bars) == {"the job", *(f"rank {rank}" for rank in range(4))}
    assert "training" in live.html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in live.html
    assert "<script" not in live.html
    assert cell.stdout == ""  # meanwhile, lines are in the widgets' pane

    cell.wait()
    after = FrontEnd(cell.messages)
    assert max(after.bars.values()) > 0
    assert len(after.open_ids) == NUM_KEPT
    table = cell.displays[0]
    assert (set(table.data), table.num_updates) == ({"text/html", "text/plain"}, 1)
    assert "train: done in" in table.data["text/plain"]
    assert "[0-3] <script>alert(1)</script> 0" in cell.stdout.splitlines()


def test_no_output_widget_and_only_core_controls(shared: Kernel) -> None:
    end = FrontEnd(run(shared, "run(dashboard.choose(), 2, 12)").messages)
    assert {state["_model_module"] for state in end.models.values()} == {
        "@jupyter-widgets/base",
        "@jupyter-widgets/controls",
    }
    assert not end.of("Output")


def test_a_failed_rank_is_marked_at_once(shared: Kernel) -> None:
    failing = """
d = dashboard.choose()
run(d, 2, 12, end_it=False)
emit(d, [Failed(1, time.time(), info=ExceptionInfo("builtins.ValueError", "loss is <nan>"))])
"""
    watched = Watched(shared)
    run(shared, failing)

    def is_marked(front_end: FrontEnd) -> bool:
        run(shared, "look(d, [])")  # drawn as soon as the widgets' interval allows
        return "✗</span> failed" in front_end.html

    watched.wait_for(is_marked, "a marked rank")
    live = watched.front_end
    assert "ValueError: loss is &lt;nan&gt;" in live.html
    assert live.layout(live.button("Stop"))["display"] == "none"
    run(shared, "close(d)")


def test_front_end_without_widgets_shows_the_table(shared: Kernel) -> None:
    cell = shared.submit("run(dashboard.choose(), 2, 40)", allow_stdin=True)
    cell.wait_for(lambda cell: cell.displays, what="an output")
    live = cell.displays[0]
    assert "train" in live.data["text/plain"]
    assert "2 processes" in live.data["text/plain"]
    cell.wait()
    table = cell.displays[0]
    assert "train: done in" in table.data["text/plain"]
    assert "<script" not in table.data["text/html"]
    assert "[1] line 0" in cell.stdout.splitlines()  # only the widgets had a pane for output


@pytest.mark.parametrize("kind", ["auto", "widgets"])
def test_unwatched_kernels_get_no_widgets(shared: Kernel, kind: str) -> None:
    cell = shared.run(f"run(dashboard.choose({kind!r}), 2, 12)", allow_stdin=False)
    assert cell.contents("comm_open") == []
    assert set(cell.displays[0].data) == {"text/html", "text/plain"}


@pytest.mark.parametrize("kind", ["html", "text", "none"])
def test_other_dashboards_create_no_widgets(shared: Kernel, kind: str) -> None:
    assert run(shared, f"run(dashboard.choose({kind!r}), 2, 12)").contents("comm_open") == []


def test_a_short_job_opens_no_widgets(shared: Kernel) -> None:
    cell = run(shared, "d = dashboard.choose(); emit(d, begin(2)); emit(d, end(2)); close(d)")
    assert cell.contents("comm_open") == []
    assert cell.displays[0].num_updates == 0


@pytest.mark.parametrize("fault", ["None", "__import__('types').ModuleType('ipywidgets')"])
def test_missing_or_broken_ipywidgets_break_nothing(shared: Kernel, fault: str) -> None:
    cell = run(
        shared,
        f"""
import sys
names = [name for name in sys.modules if name.startswith(("ipywidgets", "nblaunch.dashboard.widget_"))]
kept = {{name: sys.modules.pop(name) for name in names}}
sys.modules["ipywidgets"] = {fault}
try:
    run(dashboard.choose("widgets"), 2, 30)
finally:
    del sys.modules["ipywidgets"]
    sys.modules.update(kept)
""",
    )
    table = cell.displays[0]
    assert set(table.data) == {"text/html", "text/plain"}
    assert table.num_updates > 1
    assert "train: done in" in table.data["text/plain"]
    assert "[1] line 0" in cell.stdout.splitlines()


BACKGROUND = """
d = dashboard.choose(background=True)
controls = Controls()
dashboard.connect(d, controls)
stop, thread = run_in_background(d)
"""


def test_buttons_of_a_background_job(shared: Kernel) -> None:
    watched = Watched(shared)
    launching = run(shared, BACKGROUND)
    assert launching.displays[0].data[VIEW]["model_id"] in watched.front_end.models

    def click(description: str, *asked: str) -> None:
        watched.wait_for(
            lambda front_end: description in front_end.descriptions, f"the button {description!r}"
        )
        button = watched.front_end.button(description)
        shared.send_comm(button, {"method": "custom", "content": {"event": "click"}})
        # The kernel is idle, so it handles the click before it runs the next cell.
        assert run(shared, "controls.asked").value == list(asked)

    def wait_for(text: str) -> None:
        """Wait until the job's own thread has drawn the effect of a click."""
        watched.wait_for(lambda front_end: text in front_end.html, repr(text))

    click("Stacks", "ask_stacks")
    wait_for("rank 0 is at &lt;line 3&gt;")
    click("Stop", "ask_stacks", "stop")
    wait_for("stop requested")
    click("Interrupt", "ask_stacks", "stop", "interrupt")
    wait_for("interrupted: finally blocks run")
    click("Kill", "ask_stacks", "stop", "interrupt")
    watched.wait_for(lambda front_end: "Confirm kill" in front_end.descriptions, "the question")
    button = watched.front_end.button("Confirm kill")
    while (
        "cancel" not in run(shared, "controls.asked").value
    ):  # a later click may still count as part of a double click
        shared.send_comm(button, {"method": "custom", "content": {"event": "click"}})
    wait_for(">killed<")
    run(shared, "stop.set(); thread.join()")
    assert len(watched.front_end.open_ids) == NUM_KEPT
    table = replace(launching, messages=watched.messages).displays[0]
    assert "train: done in" in table.data["text/plain"]


def test_buttons_can_be_clicked_while_a_cell_runs(shared: Kernel) -> None:
    """Kernels with subshells receive the click at once, others only after the cell has ended."""
    watched = Watched(shared)
    run(shared, BACKGROUND)
    cell = shared.submit("stop.wait(30)", allow_stdin=True)
    watched.wait_for(lambda live: re.search(r"running for [2-9] s", live.html) is not None, "two seconds")
    live = watched.front_end
    buttons = [live.models[key] for key in live.of("Button") if key in live.open_ids]
    assert [state["disabled"] for state in buttons] == [False] * 4
    shared.interrupt()
    cell.wait()
    run(shared, "stop.set(); thread.join()")


def test_job_shown_twice_replaces_both_outputs(shared: Kernel) -> None:
    launching = run(shared, BACKGROUND)
    shown = run(shared, "controls.show_again(), controls.show_again()").result
    assert shown == "(True, False)"  # a cell needs it only once
    other = run(shared, "print(controls.show_again()); stop.set(); thread.join()")
    for cell in (launching, other):
        (table,) = replace(cell, messages=cell.messages + other.messages).displays[:1]
        assert "train: done in" in table.data["text/plain"]
    after = run(shared, "controls.show_again()")
    assert "train: done in" in after.displays[0].data["text/plain"]


def test_a_late_page_gets_the_table_in_the_widgets(shared: Kernel) -> None:
    watched = Watched(shared)
    launching = run(shared, BACKGROUND)
    root, first = launching.displays[0].data[VIEW]["model_id"], watched.front_end
    run(shared, "stop.set(); thread.join()")
    end = watched.front_end
    assert root in end.open_ids
    assert len(end.models[root]["children"]) == 1
    last = end.models[end.models[root]["children"][0].removeprefix("IPY_MODEL_")]
    assert last["_model_name"] == "HTMLModel"
    assert "done in" in last["value"]
    assert len(end.open_ids) == NUM_KEPT
    # A newly opened page can't create widgets, because it does not know their layouts (ipywidgets 7).
    assert end.models[root]["children"][0].removeprefix("IPY_MODEL_") in first.models


def test_only_the_last_jobs_keep_widgets(shared: Kernel) -> None:
    cell = run(
        shared,
        """
import importlib
widget_panel = importlib.import_module("nblaunch.dashboard.widget_panel")
max_kept, widget_panel.MAX_KEPT = widget_panel.MAX_KEPT, 2
try:
    for _ in range(5):
        run(dashboard.choose(), 2, 10)
finally:
    widget_panel.MAX_KEPT = max_kept
""",
    )
    end = FrontEnd(cell.messages)
    shown = [output["data"] for output in cell.contents("display_data")]
    roots = [data[VIEW]["model_id"] for data in shown if VIEW in data]
    assert len(end.open_ids) == 2 * NUM_KEPT
    assert [root in end.open_ids for root in roots] == [False] * 3 + [True] * 2


def test_no_widget_stays_on_colab(shared: Kernel) -> None:
    cell = run(
        shared,
        """
import os
os.environ["COLAB_RELEASE_TAG"] = "v1"
try:
    run(dashboard.choose(), 2, 10)
finally:
    del os.environ["COLAB_RELEASE_TAG"]
""",
    )
    end = FrontEnd(cell.messages)
    assert end.models
    assert end.open_ids == set()


def test_a_silent_job_has_no_pane_for_output(shared: Kernel) -> None:
    cell = run(
        shared,
        """
d = dashboard.choose()
emit(d, begin(2))
tick = threading.Event()
for step in range(10):
    look(d, [SlotReading(rank, WorkerState.TRAINING, step, 10) for rank in range(2)])
    tick.wait(0.05)
emit(d, end(2))
close(d)
""",
    )
    shown = FrontEnd(cell.messages)
    assert len(shown.bars) == 3
    assert not shown.of("Tab")


def test_eight_fast_ranks_stay_within_the_message_budget(shared: Kernel) -> None:
    cell = run(shared, "begun = time.monotonic(); run(dashboard.choose(), 8, 120, tick_s=0.05)\n"
                       "time.monotonic() - begun")  # fmt: skip
    end = FrontEnd(cell.messages)
    assert end.num_updates > 40
    assert end.num_bytes < 20_000 * float(cell.result or "nan") + ALLOWANCE_BYTES


def test_many_ranks_are_one_row_and_a_line(shared: Kernel) -> None:
    cell = shared.submit("run(dashboard.choose(), 64, 80)", allow_stdin=True)
    cell.wait_for(lambda cell: "ranks 0-63 training" in FrontEnd(cell.messages).html, what="the line of all")
    cell.wait()
    end = FrontEnd(cell.messages)
    assert not end.of("Tab")
    assert "job.logs(rank)" in end.html
    assert end.num_bytes < 20_000 * cell.elapsed_s + ALLOWANCE_BYTES


def test_a_job_can_be_awaited_and_shows_itself(shared: Kernel) -> None:
    launched = run(
        shared,
        "import nblaunch\ndef answer():\n    return 42\n"
        "job = nblaunch.notebook_launcher(answer, (), 2, background=True)\njob",
    )
    assert "answer on 2 cpu workers" in (launched.result or "")
    assert run(shared, "await job").result == "42"
    assert run(shared, "await job, job.is_running").result == "(42, False)"
    shown = run(shared, "nblaunch.last_job()")
    assert shown.result is None
    assert "answer: done in" in shown.displays[0].data["text/plain"]


def test_a_failed_job_raises_where_it_is_awaited(shared: Kernel) -> None:
    run(
        shared,
        "def bad():\n    raise KeyError('gone')\njob = nblaunch.notebook_launcher(bad, (), 1, background=True)",
    )
    error = shared.run("await job", raises="KeyError").error
    assert error is not None
    assert "gone" in error.value


@pytest.mark.parametrize(
    ("call", "raises"),
    [
        ("background=True, log_dir='taken'", "LaunchError"),
        ("background=True, detach=True", "PayloadError"),
    ],
)
def test_a_rejected_launch_shows_no_start(shared: Kernel, tmp_path: Path, call: str, raises: str) -> None:
    shared.run(f"import os, threading, nblaunch\nos.chdir({str(tmp_path)!r})\nopen('taken', 'w').close()")
    cell = shared.run(f"nblaunch.notebook_launcher(print, (threading.Lock(),), 1, {call})", raises=raises)
    assert [display.data["text/plain"].splitlines()[0] for display in cell.displays] == ["not started"]


# --- notebooks that are executed without a user ---------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_an_executed_notebook_has_the_summary_and_no_widgets(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"argv": [python_of(profile), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": profile, "language": "python"}  # fmt: skip
    (tmp_path / "kernels" / "of-profile").mkdir(parents=True)
    (tmp_path / "kernels" / "of-profile" / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    for kind in ("auto", "widgets"):
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(f"{FEED}{TRAIN}\nrun(dashboard.choose({kind!r}), 2, 12)")]
        )
        with tempfile.TemporaryDirectory(prefix="nbk-") as sockets:
            connection = {"transport": "ipc", "connection_file": str(Path(sockets, "k.json"))}
            NotebookClient(
                notebook, timeout=60, kernel_name="of-profile", store_widget_state=kind == "auto",
                config=Config({"AsyncKernelManager": connection}),
            ).execute()  # fmt: skip
        assert "widgets" not in notebook.metadata
        table = next(output for output in notebook.cells[0].outputs if output.output_type == "display_data")
        assert set(table.data) == {"text/html", "text/plain"}
        assert "train: done in" in table.data["text/plain"]
