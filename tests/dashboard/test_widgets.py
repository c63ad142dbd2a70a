"""The parts of the widgets without a kernel: messages and their timing, kept lines, and failures."""

from __future__ import annotations

import io
import logging
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from nblaunch import dashboard, env
from nblaunch.dashboard.base import Bundle
from nblaunch.dashboard.fold import fold, fold_readings
from nblaunch.dashboard.lines import NUM_LINES, LastLines, LinesPrinter
from nblaunch.dashboard.notebook import NotebookDashboard, is_on_colab
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.widget_panel import Buttons
from nblaunch.dashboard.widget_throttle import BURST_BYTES, MESSAGE_BYTES, RATE_BYTES_S, Throttle
from nblaunch.events import (
    AttemptStarted,
    Controls,
    Displayed,
    InputAwaited,
    LogLines,
    Metric,
    Note,
    StatusLine,
)
from nblaunch.wire.board import LossCurve
from tests.dashboard.scenes import START_S, Clock, ended, sample, started, trained, view_of


class Publications:
    """Replaces a front end."""

    def __init__(self) -> None:
        self.bundles: list[Mapping[str, Any]] = []
        self.updates: list[bool] = []

    def __call__(self, bundle: Mapping[str, Any], display_id: str, is_update: bool) -> None:
        self.bundles.append(bundle)
        self.updates.append(is_update)


# --- the throttle -----------------------------------------------------------------------------------------------------


class FakeWidget:
    """Counts messages: one for each change, or one for all changes in ``hold_sync``."""

    def __init__(self, value: Any = "", **traits: Any) -> None:
        self.__dict__.update(value=value, num_messages=0, is_held=False, **traits)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        self.__dict__["num_messages"] += not self.is_held

    @contextmanager
    def hold_sync(self) -> Iterator[None]:
        self.__dict__["is_held"] = True
        yield
        self.__dict__.update(is_held=False, num_messages=self.num_messages + 1)


def test_only_what_changed_is_sent() -> None:
    clock, widget = Clock(), FakeWidget("a", layout=1)
    throttle = Throttle(clock=clock)
    throttle.update(widget, value="a", layout=1)
    assert (throttle.flush(), widget.num_messages) == (0, 0)  # it was created with these values
    throttle.update(widget, value="b", layout=1)
    assert (throttle.flush(), widget.value, widget.num_messages) == (1, "b", 1)
    throttle.update(widget, value="c", layout=2)
    assert (throttle.flush(), widget.num_messages) == (1, 2)  # two traits, one message
    assert throttle.flush() == 0


def test_widgets_update_at_intervals_unless_urgent() -> None:
    clock, widget = Clock(), FakeWidget()
    throttle = Throttle(clock=clock)
    for tick in range(20):
        clock.now_s += 0.2
        throttle.update(widget, value=str(tick), every_s=1.0)
        throttle.flush()
    assert 4 <= widget.num_messages <= 5
    throttle.update(widget, value="failed", every_s=1.0, is_urgent=True)
    throttle.flush()
    assert widget.value == "failed"


def test_everything_is_sent_before_a_prompt() -> None:
    widgets = [FakeWidget() for _ in range(30)]
    throttle = Throttle(clock=Clock())
    for text in ("a", "b"):
        for widget in widgets:
            throttle.update(widget, value=text * 2000, every_s=5.0)
        throttle.flush(sends_all=text == "b")
    assert {widget.value for widget in widgets} == {"b" * 2000}


def test_the_budget_holds_without_starving_widgets() -> None:
    clock, widgets = Clock(), [FakeWidget() for _ in range(60)]
    throttle = Throttle(clock=clock)
    for tick in range(150):
        clock.now_s += 0.2
        for index, widget in enumerate(widgets):
            throttle.update(widget, value=f"{tick:04}" * 100, every_s=0.5 if index < 10 else 5.0)
        throttle.flush()
    num_bytes = sum(widget.num_messages for widget in widgets) * (MESSAGE_BYTES + 400)
    assert num_bytes <= RATE_BYTES_S * 30 + BURST_BYTES + MESSAGE_BYTES + 400
    assert num_bytes >= RATE_BYTES_S * 30 * 0.9
    often = [widget.num_messages for widget in widgets[:10]]
    seldom = [widget.num_messages for widget in widgets[10:]]
    assert min(often) > max(seldom) >= min(seldom) >= 2


def test_urgent_updates_do_not_starve_others() -> None:
    clock, urgent, other = Clock(), [FakeWidget() for _ in range(300)], FakeWidget()
    throttle = Throttle(clock=clock)
    for widget in urgent:
        throttle.update(widget, value="x" * 2000, is_urgent=True)
    assert throttle.flush() == 300
    for _ in range(10):
        clock.now_s += 0.2
        throttle.update(other, value="late")
        throttle.flush()
    assert other.value == "late"


# --- the last lines -------------------------------------------------------------------------------------------------


def test_last_lines_are_kept_per_rank_and_for_all() -> None:
    last_lines = LastLines()
    for number in range(200):
        last_lines.add(LogLines(number % 2, START_S + number, lines=(f"line {number}",)))
    assert last_lines.of_rank(0) == [f"line {number}" for number in range(200 - 2 * NUM_LINES, 200, 2)]
    assert last_lines.of_all() == [(number % 2, f"line {number}") for number in range(200 - NUM_LINES, 200)]
    assert last_lines.of_rank(7) == []


def test_late_lines_are_inserted_in_order() -> None:
    last_lines = LastLines()
    for rank, time_s in ((0, 2.0), (1, 1.0), (0, 3.0)):
        last_lines.add(LogLines(rank, time_s, lines=(f"at {time_s:.0f}",)))
    assert [line for _, line in last_lines.of_all()] == ["at 1", "at 2", "at 3"]


def test_log_lines_are_plain_text() -> None:
    last_lines = LastLines()
    last_lines.add(LogLines(0, 1.0, lines=("\x1b[31mred\x1b[0m",)))
    last_lines.add(Displayed(0, 2.0, data={"text/plain": "<Figure>", "image/png": "…"}))
    last_lines.add(Note(0, 3.0, text="bf16 is emulated"))
    last_lines.add(Note(-1, 4.0, text="of the launcher"))
    assert last_lines.of_rank(0) == ["red", "displayed: <Figure>", "bf16 is emulated"]


# --- the rows --------------------------------------------------------------------------------------------------------


@dataclass
class Sent:
    """The messages of a panel after its first seconds."""

    num_messages: int
    num_bytes: int
    rows_s: list[float]
    charts_s: list[float]
    panel: Any


def send_for(num_ranks: int, seconds: float = 40.0, num_printing: int = 8) -> Sent:
    """Show a job whose ranks step and print, with a tick every 0.2 s, and count messages from the ninth second on."""
    from nblaunch.dashboard.widget_panel import Panel

    clock, last_lines = Clock(), LastLines()
    panel = Panel(last_lines, clock)
    sent = Sent(0, 0, [], [], panel)
    view = view_of(started(num_ranks))
    is_measured = False

    def count(widget: Any) -> Callable[[dict[str, Any]], None]:
        def changed(change: dict[str, Any]) -> None:
            if is_measured:
                sent.num_messages += 1
                sent.num_bytes += MESSAGE_BYTES + len(str(change["new"]))
                if widget is panel._rows:
                    sent.rows_s.append(clock.now_s)
                if widget in panel._charts.widget.children:
                    sent.charts_s.append(clock.now_s)

        return changed

    for tick in range(round(seconds * 5)):
        clock.now_s += 0.2
        curve = LossCurve(7 * tick + 1, 32, tuple(1 / end for end in range(1, 7 * tick + 2, 32)))
        readings = [
            sample(rank, 7 * tick, 1400, loss=1 / (tick + 1), losses=curve) for rank in range(num_ranks)
        ]
        view = fold_readings(view, readings, START_S + tick / 5)
        view = fold(
            view, StatusLine(0, START_S, text=f"epoch 1: {tick / 2:.0f}%|#| {tick}/200 [00:01<00:02]")
        )
        for rank in range(min(num_ranks, num_printing)):
            last_lines.add(LogLines(rank, START_S + tick / 5, lines=(f"loss {1 / (tick + 1)}",)))
        panel.show(view)
        is_measured = tick >= 40  # the initial budget is spent
        if tick == 39:  # all parts have been sent
            for widget in dict.fromkeys(panel._all()):
                if widget.has_trait("value"):
                    widget.observe(count(widget), "value")
    panel.close("")
    return sent


@pytest.mark.parametrize(
    ("num_ranks", "rows_s", "charts_s"), [(2, 0.6, 0.7), (4, 0.7, 0.8), (8, 0.75, 1.1), (16, 0.9, 1.6)]
)
def test_rows_are_sent_often_and_within_the_budget(num_ranks: int, rows_s: float, charts_s: float) -> None:
    sent = send_for(num_ranks)
    assert sent.num_bytes / 32 < RATE_BYTES_S * 1.05
    assert sent.num_messages / 32 < 20
    assert statistics.fmean(later - earlier for earlier, later in pairwise(sent.rows_s)) < rows_s
    assert statistics.fmean(later - earlier for earlier, later in pairwise(sent.charts_s)) < charts_s


def test_unchanged_charts_are_not_sent() -> None:
    from nblaunch.dashboard.widget_panel import Panel

    clock = Clock()
    panel = Panel(LastLines(), clock)
    times_s: dict[str, list[float]] = {"rows": [], "loss": [], "still": [], "moving 3": []}
    view = trained(8)
    for step in range(10):
        view = fold(
            view,
            Metric(0, START_S, step, {"still": float(step)} | {f"moving {i}": float(step) for i in range(4)}),
        )
    for tick in range(150):
        clock.now_s += 0.2
        curve = LossCurve(100 + tick, 2, tuple(1 / end for end in range(1, 101 + tick, 2)))
        readings = [sample(rank, 100 + tick, losses=curve) for rank in range(8)]
        view = fold_readings(view, readings, START_S + 10 + tick / 5)
        view = fold(view, Metric(0, START_S, 10 + tick, {f"moving {i}": 1 / (tick + 1) for i in range(4)}))
        panel.show(view)
        if tick == 20:  # the initial budget is spent
            shown = {"rows": panel._rows}
            for chart in panel._charts.widget.children:
                shown[re.search(r"<b>(.*?)</b>", chart.value)[1]] = chart  # type: ignore[index]
            for name, noted in times_s.items():
                shown[name].observe(lambda change, noted=noted: noted.append(clock.now_s), "value")
    panel.close("")
    assert times_s["still"] == []
    assert len(times_s["rows"]) > 2 * len(times_s["moving 3"]) > 10
    assert abs(len(times_s["loss"]) - len(times_s["moving 3"])) <= 2


def test_new_attempt_replaces_charts() -> None:
    from nblaunch.dashboard.widget_panel import Panel

    clock = Clock()
    panel = Panel(LastLines(), clock)
    curve = LossCurve(100, 2, tuple(1 / end for end in range(1, 101, 2)))
    view = trained(2)
    for step in range(10):
        view = fold(view, Metric(0, START_S, step, {"accuracy": step / 10}))
    view = fold_readings(view, [sample(rank, 100, losses=curve) for rank in range(2)], START_S + 10)
    panel.show(view)
    clock.now_s += 60
    assert len(panel._charts.widget.children) == 2
    view = fold(view, AttemptStarted(-1, START_S + 20, "train", 2, "cpu", "fork", attempt=1))
    panel.show(fold_readings(view, [sample(rank, 0) for rank in range(2)], START_S + 30))
    shown = ["<b>loss" in chart.value for chart in panel._charts.widget.children]
    panel.close("")
    assert True not in shown


def test_charts_epochs_and_lines_appear_when_available() -> None:
    from nblaunch.dashboard.widget_panel import Panel

    clock, last_lines = Clock(), LastLines()
    panel = Panel(last_lines, clock)
    children: list[list[Any]] = [list(panel.root.children)]
    view = view_of(started(2))
    for tick in range(50):
        clock.now_s += 0.2
        step = max(tick - 10, 0)  # the ranks take 2 s to start
        if step:
            curve = LossCurve(step, 1, tuple(1 / end for end in range(1, step + 1)))
            readings = [sample(rank, step, loss=0.5, epoch=1, losses=curve) for rank in range(2)]
            view = fold_readings(view, readings, START_S + tick / 5)
        if tick == 15:
            last_lines.add(LogLines(0, START_S + tick / 5, lines=("epoch 0: loss 0.5",)))
        if tick in (30, 40):
            view = fold(view, Metric(0, START_S, step, {"accuracy": tick / 100}))
        panel.show(view)
        if list(panel.root.children) != children[-1]:
            children.append(list(panel.root.children))
    charts = panel._charts.widget
    num_charts, layout = len(charts.children), (charts.layout.flex_flow, charts.layout.min_height)
    panel.close("")
    assert [len(shown) for shown in children] == [6, 7]  # charts and lines are side by side
    assert (num_charts, layout) == (2, ("row nowrap", "196px"))


def test_message_count_is_independent_of_ranks() -> None:
    few, many = send_for(20, 20.0, num_printing=4), send_for(200, 20.0, num_printing=4)
    assert many.num_messages <= 1.2 * few.num_messages
    assert many.num_bytes / 12 < RATE_BYTES_S * 1.05


# --- the dashboard ---------------------------------------------------------------------------------------------------


class FakePanel:
    """Records what it shows; fails on request."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.views: list[JobView] = []
        self.lasting = ""
        self.controls: Controls | None = None
        self._breaks_at = breaks_at

    def __call__(self, last_lines: LastLines) -> FakePanel:
        return self

    def bundle(self, view: JobView) -> Bundle:
        return {"widget": len(self.views)}

    def stand_in(self, view: JobView) -> Bundle:
        return {"stand-in": f"at view {len(self.views)}"}

    def connect(self, controls: Controls) -> None:
        self.controls = controls

    def show(self, view: JobView, *, is_urgent: bool = False) -> None:
        if len(self.views) == self._breaks_at:
            raise TypeError("a trait is gone")
        self.views.append(view)

    def close(self, lasting: str) -> None:
        self.lasting = lasting


def with_widgets(**options: Any) -> NotebookDashboard:
    return NotebookDashboard(has_widgets=True, is_watched=True, **options)


def drive(widgets: NotebookDashboard, clock: Clock, *, seconds: float = 10.0, step_s: float = 0.02) -> None:
    """Feed a job of two ranks with far more readings than messages are allowed."""
    for event in started(2):
        widgets.on_event(event)
    for tick in range(round(seconds / step_s)):
        clock.now_s += step_s
        widgets.on_readings([sample(rank, tick) for rank in range(2)])
    for event in ended(2, seconds):
        widgets.on_event(event)
    widgets.close()


def test_at_most_ten_updates_a_second_and_one_replacement() -> None:
    shown, clock, panel = Publications(), Clock(), FakePanel()
    drive(with_widgets(publish=shown, open_panel=panel, clock=clock), clock)
    assert 20 <= len(panel.views) <= 100
    assert shown.bundles[0] == {"widget": 1}  # its contents are set before it is shown
    stand_ins = [bundle for bundle in shown.bundles if "stand-in" in bundle]
    assert len(stand_ins) >= 2
    assert shown.updates == [False, False, *[True] * len(stand_ins[1:]), True, True]
    result, logs = shown.bundles[-2:]
    assert set(result) == {"text/html", "text/plain"}
    assert logs["text/plain"] == "logs: /logs/train-1"
    assert "logs" not in result["text/plain"]
    assert panel.lasting.startswith(result["text/html"][:100])


def test_a_short_job_opens_nothing() -> None:
    shown, clock, panel = Publications(), Clock(), FakePanel()
    drive(with_widgets(publish=shown, open_panel=panel, clock=clock), clock, seconds=0.2)
    assert panel.views == []
    assert shown.updates == [False]


def test_a_background_job_is_shown_at_once_and_has_controls() -> None:
    shown, clock, panel = Publications(), Clock(), FakePanel()
    widgets = with_widgets(background=True, publish=shown, open_panel=panel, clock=clock)
    assert shown.updates == [False, False]
    job = Asked()
    dashboard.connect([widgets], job)
    assert panel.controls is job
    assert job.show_again is not None
    drive(widgets, clock)
    assert shown.updates.count(False) == 2


def test_a_blocking_job_has_no_controls() -> None:
    clock, panel, job = Clock(), FakePanel(), Asked()
    widgets = with_widgets(publish=Publications(), open_panel=panel, clock=clock)
    dashboard.connect([widgets], job)
    drive(widgets, clock)
    assert panel.views
    assert panel.controls is None
    assert job.show_again is not None


@pytest.mark.parametrize("breaks_at", [0, 1, 7])
def test_widgets_that_break_become_html_in_the_same_output(
    breaks_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    shown, clock, panel = Publications(), Clock(), FakePanel(breaks_at)
    with caplog.at_level(logging.WARNING):
        drive(with_widgets(publish=shown, open_panel=panel, clock=clock), clock)
    assert [record.message for record in caplog.records] == [
        "ipywidgets failed; the job is shown as HTML instead"
    ]
    assert "a trait is gone" in caplog.text
    assert shown.updates[0] is False
    assert shown.updates.count(False) <= 2
    assert len(shown.bundles) > 10
    tables = [bundle["text/plain"] for bundle in shown.bundles if "text/plain" in bundle]
    assert any("done in" in table for table in tables[-2:])
    assert panel.lasting != ""  # opened widgets are closed


@pytest.mark.parametrize("breaks_at", [0, 7])
def test_output_is_shown_live_even_if_widgets_fail(breaks_at: int) -> None:
    """A separate printer holds the lines back until the end, so that only the dashboard shows them."""
    shown, clock = Publications(), Clock()
    widgets = with_widgets(publish=shown, open_panel=FakePanel(breaks_at), clock=clock)
    for event in [*started(2), LogLines(1, START_S, lines=("epoch 0: loss 0.5",))]:
        widgets.on_event(event)
    for tick in range(100):
        clock.now_s += 0.1
        widgets.on_readings([sample(rank, tick) for rank in range(2)])
    assert all("[1] epoch 0: loss 0.5" in text for text in shown.bundles[-1].values())
    for event in ended(2, 10.0):
        widgets.on_event(event)
    widgets.close()
    assert not any("epoch 0: loss 0.5" in text for text in shown.bundles[-1].values())


def test_missing_ipywidgets_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    def missing(last_lines: LastLines) -> FakePanel:
        raise ModuleNotFoundError("No module named 'ipywidgets'")

    clock = Clock()
    with caplog.at_level(logging.WARNING):
        drive(with_widgets(publish=Publications(), open_panel=missing, clock=clock), clock)
    (record,) = caplog.records
    assert "pip install ipywidgets" in record.message


def test_an_aborted_job_closes_its_widgets() -> None:
    shown, panel = Publications(), FakePanel()
    with_widgets(background=True, publish=shown, open_panel=panel).close()
    assert "not started" in [bundle.get("text/plain") for bundle in shown.bundles[-2:]]
    assert "not started" in panel.lasting


def test_deferred_lines_come_last() -> None:
    stream, shown = io.StringIO(), []
    printer = LinesPrinter(stream=stream, publish=shown.append, defers_lines=True)
    for event in [*started(2), LogLines(1, START_S, lines=("one",)), Displayed(0, START_S, data={"a": "b"})]:
        printer.on_event(event)
    printer.on_readings([])
    assert (stream.getvalue(), len(shown)) == ("", 1)
    printer.on_event(LogLines(0, START_S, lines=("two",)))
    printer.on_readings([])
    printer.close()
    assert (stream.getvalue(), len(shown)) == ("[1] one\n[0] two\n", 1)


def test_deferred_and_folded_lines_come_before_a_prompt() -> None:
    stream, shown = io.StringIO(), []
    printer = LinesPrinter(stream=stream, publish=shown.append, defers_lines=True, folds=True)
    for event in [*started(1), LogLines(0, START_S, lines=tuple(map(str, range(700)))), InputAwaited()]:
        printer.on_event(event)
    assert stream.getvalue().splitlines()[-2:] == ["698", "699"]
    assert len(shown) == 1
    printer.on_event(LogLines(0, START_S, lines=("more",)))
    printer.close()
    assert stream.getvalue().endswith("699\nmore\n")
    assert len(shown) == 1


# --- the buttons ------------------------------------------------------------------------------------------------------


class Asked(Controls):
    """Records the requests to a job."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.show_again: Callable[[], bool] | None = None

    def show_with(self, show_again: Callable[[], bool]) -> None:
        self.show_again = show_again

    def stop(self) -> None:
        self.asked.append("stop")

    def interrupt(self) -> None:
        self.asked.append("interrupt")

    def cancel(self) -> None:
        self.asked.append("cancel")

    def ask_stacks(self) -> Future[str]:
        raise AssertionError("stacks were not asked for")


def test_a_double_click_counts_once() -> None:
    clock, job = Clock(), Asked()
    buttons = Buttons(Throttle(clock=clock), clock)
    buttons.connect(job)
    by_name = {button.description: button for button in buttons.widget.children}
    for name in ("Stop", "Kill"):
        by_name[name].click()
        buttons.show(is_running=True)
        clock.now_s += 0.2
        by_name[name].click()
    assert set(job.asked) == {"stop"}
    clock.now_s += 1.0
    by_name["Kill"].click()
    assert job.asked[-1] == "cancel"
    by_name["Interrupt"].click()
    assert job.asked[-1] == "interrupt"
    buttons.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"COLAB_RELEASE_TAG": "release-colab_20250904", "JPY_PARENT_PID": "87"}, True),
        ({"COLAB_JUPYTER_TRANSPORT": "ipc"}, True),
        ({"COLAB_RELEASE_TAG": ""}, False),
        (
            {"COLAB_RELEASE_TAG": "release-colab-external-images", "KAGGLE_KERNEL_RUN_TYPE": "Interactive"},
            False,
        ),
        ({"COLAB_BACKEND_VERSION": "next", "KAGGLE_URL_BASE": "https://www.kaggle.com"}, False),
        ({"VSCODE_PID": "94309"}, False),
    ],
)
def test_colab_is_recognised_but_not_kaggle(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr(env, "snapshot", lambda: environ)
    assert is_on_colab() is expected
