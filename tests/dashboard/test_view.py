"""The view of a job that a dashboard computes from events and readings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.dashboard.fold import fold, fold_readings
from nblaunch.dashboard.view import LINE_STAYS_S, JobView, read_bar
from nblaunch.events import (
    AttemptStarted,
    Displayed,
    EpochEnded,
    Event,
    ExceptionInfo,
    Exited,
    ExitStatus,
    Failed,
    HostMemory,
    JobEnded,
    LogLines,
    Metric,
    Note,
    Returned,
    Started,
    StatusLine,
    WorkerState,
)
from nblaunch.formatting import single_line
from nblaunch.wire.board import MAX_BINS, LossCurve, SlotReading
from tests.dashboard.scenes import START_S, ended, killed, raised, sample, started, trained, view_of


def states(view: JobView) -> list[str]:
    return [rank.state.name.lower() for rank in view.ranks]


def test_a_job_goes_from_starting_to_done() -> None:
    view = view_of(started(2)[:1])
    assert states(view) == ["starting", "starting"]
    view = view_of(started(2)[1:2], view)
    assert states(view) == ["running", "starting"]
    view = view_of(
        [Started(1, START_S), Returned(0, START_S), Returned(1, START_S), Exited(0, START_S)], view
    )
    assert states(view) == ["done", "finishing"]
    assert not view.is_over
    view = view_of([Exited(1, START_S), JobEnded(-1, START_S + 2)], view)
    assert states(view) == ["done", "done"]
    assert (view.is_over, view.outcome, view.elapsed_s) == (True, "done", 2.0)


def test_only_the_root_cause_has_failed() -> None:
    events: list[Event] = [
        raised(1),
        raised(0, "connection closed", is_consequence=True),
        killed(2, -15),
        killed(1, 1),
        JobEnded(-1, START_S + 5, outcome="failed", failed_rank=1),
    ]
    view = view_of([*started(4), *events])
    assert states(view) == ["failed", "failed", "stopped", "stopped"]
    assert view.ranks[1].failure == "ValueError: bad shape"
    assert view.ranks[1].failed_at == "line 9: loss = model(batch)"
    assert view.ranks[0].is_consequence
    assert view.ranks[2].failure == ""


def test_cause_of_the_job_is_not_secondary() -> None:
    events = [raised(0, "Connection refused", is_consequence=True), killed(0, 1)]
    view = view_of([*started(2), *events, JobEnded(-1, START_S + 5, outcome="failed", failed_rank=0)])
    assert not view.ranks[0].is_consequence


def test_an_unwatched_job_shows_its_steps() -> None:
    evaluated = replace(sample(0, 10, 10, loop=9, state=WorkerState.EVALUATING), trained=(450, 450, 3))
    view = fold_readings(view_of(started(1)), [evaluated], START_S)
    rank = view_of([Returned(0, START_S), Exited(0, START_S), JobEnded(-1, START_S, "done")], view).ranks[0]
    assert (rank.step, rank.total, rank.epoch) == (450, 450, 3)
    assert rank.steps_per_s is None, "the rate of the evaluation is not that of the training"


def test_a_worker_stopped_before_the_failure_was_reported_did_not_fail() -> None:
    view = view_of([*started(2), killed(0, -15), raised(1), JobEnded(-1, START_S, "failed", 1)])
    assert states(view) == ["stopped", "failed"]
    assert view.ranks[0].failure == ""


def test_the_first_rank_that_the_launcher_stops_has_not_failed() -> None:
    """After a mismatch or a hang, the launcher stops the ranks one by one, and none counts as failed."""
    stopped = Exited(0, START_S + 4, status=ExitStatus(-15), was_stopped=True)
    view = view_of([*started(2), stopped])
    assert (states(view), view.ranks[0].failure) == (["stopped", "running"], "")


def test_a_silent_death_fails_with_its_signal() -> None:
    view = view_of([*started(2), killed(0, -11)])
    assert (states(view)[0], view.ranks[0].failure) == ("failed", "killed by SIGSEGV")
    view = view_of([JobEnded(-1, START_S + 9, outcome="failed", failed_rank=0)], view)
    assert states(view) == ["failed", "stopped"]


def test_leaving_early_fails_even_with_exit_code_0() -> None:
    view = view_of([*started(1), killed(0, 0)])
    assert (states(view), view.ranks[0].failure) == (["failed"], "exit code 0 before the function returned")


def test_a_worker_killed_after_returning_is_done() -> None:
    view = view_of([*started(1), Returned(0, START_S), killed(0, -15), JobEnded(-1, START_S)])
    assert (states(view), view.ranks[0].failure) == (["done"], "")


def test_the_launcher_decides_who_failed() -> None:
    end = JobEnded(
        -1, START_S, outcome="failed", failed_rank=0, message="rank 0 left while others waited\nmore"
    )
    view = view_of([*started(2), Returned(0, START_S, left_by_exit=True), Exited(0, START_S), end])
    assert (states(view)[0], view.ranks[0].failure) == ("failed", "rank 0 left while others waited")


@pytest.mark.parametrize("outcome", ["interrupted", "cancelled"])
def test_an_interrupted_job_has_stopped_ranks_and_no_failures(outcome: str) -> None:
    interrupt = Failed(0, START_S, info=ExceptionInfo("builtins.KeyboardInterrupt", ""))
    view = view_of([*started(4), interrupt, killed(0, 1), killed(1, -9), Returned(2, START_S)])
    view = fold(view, JobEnded(-1, START_S + 1, outcome=outcome))
    assert states(view) == ["stopped", "stopped", "done", "stopped"]
    assert not any(rank.failure for rank in view.ranks)


def test_inline_ranks_are_done_when_the_job_is() -> None:
    assert states(view_of([*started(1), JobEnded(-1, START_S)])) == ["done"]


def test_a_restart_resets_all_but_time() -> None:
    view = view_of([*started(2), raised(1), Note(-1, START_S, text="restarting")])
    view = fold(view, AttemptStarted(-1, START_S + 10, "train", 2, attempt=1))
    assert states(view) == ["starting", "starting"]
    assert (view.start.attempt, view.elapsed_s, view.notes) == (1, 10.0, ((-1, "restarting"),))


def test_the_last_line_of_the_output_is_kept() -> None:
    lines = tuple(f"line {number}" for number in range(100))
    view = view_of([*started(2), StatusLine(0, START_S, text="  10%|# "), LogLines(1, START_S, lines=lines)])
    assert (view.ranks[0].status_line, view.ranks[1].last_line) == ("10%|#", "line 99")
    assert view.ranks[1].num_lines == 100
    view = fold(view, LogLines(0, START_S, lines=("100%|##",)))
    assert view.ranks[0].status_line == "10%|#"  # the launcher reports each change of the line


BAR = "fold 2:  45%|████▌     | 450/1000 [00:45<00:55, 10.0it/s]"


@pytest.mark.parametrize("lines", [[BAR], ["10/100 [=>....]", "20/100 [==>...]"], ["loading"]])
def test_unfinished_line_stays_briefly(lines: list[str]) -> None:
    view = view_of([*started(2), *(StatusLine(0, START_S, text=line) for line in lines)])
    view = fold_readings(view_of([StatusLine(0, START_S + 3)], view), [], START_S + 4)
    assert (view.ranks[0].status_line, view.ranks[0].bar) == (lines[-1], read_bar(lines[-1]))
    drawn = view_of([StatusLine(0, START_S + 4, text=f"{lines[-1]} ")], view)
    assert fold_readings(drawn, [], START_S + 9).ranks[0].status_line == lines[-1]
    view = fold_readings(view, [], START_S + 3 + LINE_STAYS_S)
    assert (view.ranks[0].status_line, view.ranks[0].bar) == ("", None)


def test_metrics_are_merged() -> None:
    view = view_of([*started(1), Metric(0, START_S, 1, {"a": 1, "b": 2}), Metric(0, START_S, 2, {"b": 3})])
    assert (view.ranks[0].metrics, view.ranks[0].metrics_step) == ({"a": 1, "b": 3}, 2)


def test_logged_numbers_are_kept_as_curves() -> None:
    values: list[dict[str, object]] = [{"a": 1, "text": "x"}, {"a": 0.5, "on": True}, {"a": math.nan}]
    view = view_of([*started(1), *(Metric(0, START_S, 10 * step, one) for step, one in enumerate(values))])
    assert {name: curve.points() for name, curve in view.curves.items()} == {"a": [(0, 1), (10, 0.5)]}
    view = view_of([Metric(0, START_S, None, {f"m{i}": i for i in range(100)})], view)
    assert len(view.curves) == 12


def test_memory_is_added_up_and_its_peak_is_kept() -> None:
    def memory(rank: int, num_bytes: int) -> HostMemory:
        return HostMemory(rank, START_S, num_bytes)

    view = view_of([*started(3), memory(0, 5), memory(1, 7), memory(0, 2), memory(9, 1)])
    assert view.host_peak_bytes == 12
    assert (view.ranks[0].host_bytes, view.ranks[0].host_peak_bytes) == (2, 5)
    view = view_of([Returned(1, START_S), Exited(1, START_S), memory(1, 50), memory(2, 11)], view)
    assert view.host_peak_bytes == 13


def test_late_memory_sample_counts_for_ranks_running_then() -> None:
    late = [HostMemory(0, START_S + 1, 104), Exited(0, START_S + 3), HostMemory(1, START_S + 2, 96)]
    assert view_of([*started(2), *late]).host_peak_bytes == 200


def test_peaks_between_two_samples_count() -> None:
    sampled = HostMemory(0, START_S, 5, peak_bytes=50, job_peak_bytes=90)
    view = view_of([*started(2), sampled, HostMemory(1, START_S, 7, peak_bytes=45, job_peak_bytes=90)])
    assert [rank.host_peak_bytes for rank in view.ranks] == [50, 45]
    assert view.host_peak_bytes == 90


def test_device_memory_comes_from_the_board() -> None:
    reading = SlotReading(0, device_bytes=3, device_peak_bytes=8, device_limit_bytes=10)
    rank = fold_readings(view_of(started(1)), [reading], START_S).ranks[0]
    assert (rank.device_peak_bytes, rank.device_limit_bytes) == (8, 10)
    assert view_of(started(1)).ranks[0].device_peak_bytes is None


def test_time_left_is_the_slowest_ranks() -> None:
    view = trained(3, steps=100, total=1000)
    view = fold_readings(view, [sample(1, 101, 2000, step_time_s=16.0)], START_S + 11)
    assert view.left_s == view.ranks[1].left_s
    assert view_of(started(2)).left_s is None


def test_rates_and_time_left() -> None:
    rank = trained(2, steps=100, total=1000).ranks[1]
    assert rank.steps_per_s == pytest.approx(10)
    assert rank.samples_per_s == pytest.approx(320)
    assert rank.fraction == pytest.approx(0.1)
    assert rank.left_s == pytest.approx(90)


def test_rates_cover_only_the_window() -> None:
    view = trained(1, steps=100)
    for number in range(1, 200):  # now one step per second instead of ten
        view = fold_readings(
            view, [sample(0, 100 + number, step_time_s=15.0 + number)], START_S + 10 + number
        )
    assert view.ranks[0].steps_per_s == pytest.approx(1, rel=0.01)
    assert len(view.ranks[0].rate_points) < 30


def test_new_loop_shows_old_rate_until_measured() -> None:
    view = trained(1, steps=100, total=100)
    evaluating = sample(0, 0, 20, loop=2, state=WorkerState.EVALUATING, step_time_s=100.0, steps_done=100)
    view = fold_readings(view, [evaluating], START_S + 95)
    assert (view.ranks[0].step, view.ranks[0].total) == (0, 20)
    assert view.ranks[0].steps_per_s == pytest.approx(10)
    view = fold_readings(view, [replace(evaluating, step=2, step_time_s=101.0, steps_done=102)], START_S + 96)
    assert view.ranks[0].steps_per_s == pytest.approx(2)
    # A checkpoint is saved after it, so the finished evaluation is still on the board.
    saving = replace(evaluating, step=20, state=WorkerState.TRAINING, step_time_s=109.0, steps_done=120)
    view = fold_readings(view, [saving], START_S + 104)
    assert view.ranks[0].steps_per_s == pytest.approx(18 / 8)  # without its first two steps
    # Back in the outer loop, which continues with its own rate.
    resumed = sample(0, 100, 100, step_time_s=110.0, steps_done=121)
    view = fold_readings(view, [resumed], START_S + 105)
    assert view.ranks[0].steps_per_s == pytest.approx(10)
    assert view_of(ended(1), view).ranks[0].steps_per_s == pytest.approx(10)


def test_unmeasured_training_has_no_evaluation_rate() -> None:
    view = view_of(started(1))
    for step in (0, 10):
        seen = sample(0, step, 20, loop=1, state=WorkerState.EVALUATING, step_time_s=5.0 + step)
        view = fold_readings(view, [seen], START_S + step)
    assert view.ranks[0].steps_per_s == pytest.approx(1)
    view = fold_readings(view, [sample(0, 0, loop=2, step_time_s=16.0, steps_done=10)], START_S + 11)
    assert (view.ranks[0].steps_per_s, view.left_s) == (None, None)


def test_an_unchanged_board_keeps_the_ranks() -> None:
    view = trained(4, steps=100)
    again = fold_readings(view, [sample(rank, 100) for rank in range(4)], START_S + 30)
    assert all(new is old for new, old in zip(again.ranks, view.ranks, strict=True))
    assert again.elapsed_s == 30


def test_events_overrule_the_board() -> None:
    readings = [SlotReading(0, WorkerState.STARTING)]
    view = fold_readings(view_of(started(1)), readings, START_S)
    assert states(view) == ["running"]
    view = fold_readings(view, [SlotReading(0, WorkerState.FAILED)], START_S)
    assert states(view) == ["running"]  # the reason for the failure will be reported next
    view = fold_readings(
        view_of([Returned(0, START_S)], view), [SlotReading(0, WorkerState.TRAINING)], START_S
    )
    assert states(view) == ["finishing"]
    view = fold_readings(view_of([Exited(0, START_S)], view), [SlotReading(0, WorkerState.RUNNING)], START_S)
    assert states(view) == ["done"]


def test_time_stops_when_the_job_is_over() -> None:
    view = view_of([*started(1), *ended(1, 12.0)])
    assert fold_readings(view, [SlotReading(0)], START_S + 500).elapsed_s == 12.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_shown_but_not_drawn(value: float) -> None:
    losses = LossCurve(3, 1, (2.0, value, 1.0))
    view = fold_readings(trained(1), [sample(0, 101, loss=value, losses=losses)], START_S)
    assert view.ranks[0].losses == ((1, 2.0), (3, 1.0))
    assert view.ranks[0].loss is not None
    assert not math.isfinite(view.ranks[0].loss)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07plain", "red plain"),
        ("a\ttab, \x00\x07controls,\r\nbreaks", "a   tab, controls, breaks"),
        ("ünï 漢字 🙂", "ünï 漢字 🙂"),
        ("half \ud83d pair", "half ? pair"),
        ("x" * 1000, "x" * 399 + "…"),
    ],
)
def test_text_is_cleaned(text: str, expected: str) -> None:
    assert single_line(text) == expected


ranks = st.integers(-1, 4)
texts = st.text(max_size=50)
any_event = st.one_of(
    st.builds(
        AttemptStarted, st.just(-1), st.floats(0, 1e9), texts, st.integers(0, 4), attempt=st.integers(0, 2)
    ),
    st.builds(Started, ranks, st.just(1.0), pid=st.integers()),
    st.builds(LogLines, ranks, st.just(1.0), st.lists(texts, max_size=40).map(tuple)),
    st.builds(StatusLine, ranks, st.just(1.0), texts),
    st.builds(Note, ranks, st.just(1.0), texts, st.sampled_from(["note", "warning", "hang"])),
    st.builds(HostMemory, ranks, st.floats(0, 1e9), st.integers(0, 10**13), st.booleans()),
    st.builds(
        Metric,
        ranks,
        st.just(1.0),
        st.none(),
        st.dictionaries(texts, st.floats() | texts),
        st.integers(0, 200),
    ),
    st.builds(
        EpochEnded, ranks, st.just(1.0), st.integers(0, 200), st.none() | st.floats(), st.floats(0, 1e9)
    ),
    st.builds(Returned, ranks, st.just(1.0)),
    st.builds(Displayed, ranks, st.just(1.0), st.dictionaries(texts, texts), update=st.booleans()),
    st.builds(raised, ranks, texts, is_consequence=st.booleans()),
    st.builds(killed, ranks, st.integers(-70, 255)),
    st.builds(
        JobEnded,
        st.just(-1),
        st.floats(0, 1e9),
        st.sampled_from(["done", "failed", "interrupted", "cancelled"]),
        st.none() | ranks,
        texts,
    ),
    st.builds(Event, ranks, st.just(1.0)),
)
any_sample = st.builds(
    SlotReading,
    ranks,
    st.sampled_from(WorkerState),
    st.integers(0, 10**12),
    st.integers(-1, 10**12),
    st.integers(0, 100),
    st.integers(0, 10**15),
    st.none() | st.floats(),
    st.builds(
        LossCurve,
        st.integers(0, 10**12),
        st.integers(1, 10**9),
        st.lists(st.floats(), max_size=MAX_BINS).map(tuple),
    ),
    st.floats(0, 1e9),
)
any_story = st.lists(any_event | st.lists(any_sample, max_size=4), max_size=20)


def view_after(story: list[Event | list[SlotReading]]) -> JobView:
    view = view_of(started(3))
    for number, item in enumerate(story):
        view = fold_readings(view, item, START_S + number) if isinstance(item, list) else fold(view, item)
    return view


@settings(deadline=None)  # other tests may occupy the processors
@given(any_story)
def test_any_events_leave_a_consistent_view(story: list[Event | list[SlotReading]]) -> None:
    view = view_after(story)
    assert [rank.rank for rank in view.ranks] == list(range(len(view.ranks)))
    assert view.elapsed_s >= 0
    for rank in view.ranks:
        assert rank.left_s is None or rank.left_s >= 0
        assert rank.fraction is None or 0 <= rank.fraction <= 1


def test_a_rank_that_is_done_shows_its_training() -> None:
    view = fold_readings(view_of(started(1)), [sample(0, 20, 22, epoch=3, num_epochs=3)], START_S)
    rate = view.ranks[0].steps_per_s
    # The last reading of the training came before its last step.
    evaluating = sample(
        0, 6, 6, epoch=3, num_epochs=3, loop=2, state=WorkerState.EVALUATING, trained=(22, 22, 3)
    )
    view = fold_readings(view, [evaluating], START_S + 1)
    # while it runs, the row shows the current loop
    assert (view.ranks[0].step, view.ranks[0].total) == (6, 6)
    view = view_of(ended(1), view)
    for again in (view, fold_readings(view, [evaluating], START_S + 2)):
        (rank,) = again.ranks
        assert (rank.step, rank.total, rank.epoch, rank.num_epochs, rank.steps_per_s) == (22, 22, 3, 3, rate)


def test_evaluation_steps_are_shown() -> None:
    seen = sample(0, 6, 6, epoch=0, state=WorkerState.EVALUATING)
    (rank,) = view_of(ended(1), fold_readings(view_of(started(1)), [seen], START_S)).ranks
    assert (rank.step, rank.total, rank.epoch) == (6, 6, 0)


def test_evaluation_has_own_rates_after_a_wait() -> None:
    view = trained(1, steps=5, total=1000)
    waiting = sample(0, 5, 1000, state=WorkerState.WAITING)
    evaluating = [
        sample(0, step, 1000, loop=2, state=WorkerState.EVALUATING, step_time_s=100.0 + step)
        for step in (5, 7)
    ]
    for number, seen in enumerate([waiting, *evaluating]):
        view = fold_readings(view, [seen], START_S + 95 + number)
    assert view.ranks[0].steps_per_s == pytest.approx(1)


def test_a_rank_that_failed_shows_where_it_was() -> None:
    view = fold_readings(view_of(started(1)), [sample(0, 20, 22, state=WorkerState.TRAINING)], START_S)
    view = fold_readings(view, [sample(0, 3, 6, loop=2, state=WorkerState.EVALUATING)], START_S + 1)
    view = view_of([raised(0), JobEnded(-1, START_S + 4, outcome="failed", failed_rank=0)], view)
    assert (view.ranks[0].step, view.ranks[0].total) == (3, 6)


def test_lockstep_ranks_show_equal_rates_between_epochs() -> None:
    view = view_of(started(2))
    for step in range(0, 41, 5):
        view = fold_readings(view, [sample(rank, step, 40, loop=2) for rank in range(2)], START_S + step / 10)
    between = sample(1, 1, 12, loop=1, step_time_s=9.05, state=WorkerState.RUNNING, steps_done=40)
    view = fold_readings(view, [sample(0, 40, 40, loop=2, step_time_s=9.0), between], START_S + 4.1)
    for step, step_s in ((1, 9.1), (5, 9.9), (10, 10.9)):  # half as fast
        later = {"epoch": 2, "step_time_s": step_s, "steps_done": 40 + step}
        readings = [sample(rank, step, 40, loop=3, **later) for rank in range(2)]
        view = fold_readings(view, readings, START_S + step_s - 5)
    one, other = view.ranks
    assert one.steps_per_s == pytest.approx(45 / 5.4)  # without its first steps
    assert one.steps_per_s == pytest.approx(other.steps_per_s)
    # A long pause does not count as training.
    later = [
        sample(1, 12, loop=1, step_time_s=40.0, state=WorkerState.RUNNING),
        sample(1, 1, 40, loop=4, epoch=3, step_time_s=40.1),
    ]
    for number, reading in enumerate(later):
        view = fold_readings(view, [reading], START_S + 35 + number)
    assert [point.time_s for point in view.ranks[1].rate_points] == [40.0, 40.1]


def test_unsampled_epochs_count_in_the_rate() -> None:
    view = view_of(started(1))
    for look in range(5):  # five epochs of four steps every half second
        reading = sample(0, 2, 4, loop=1 + 5 * look, step_time_s=5 + look / 2, steps_done=2 + 20 * look)
        view = fold_readings(view, [reading], START_S + look / 2)
    assert view.ranks[0].steps_per_s == pytest.approx(40)


def test_rates_continue_over_epochs_but_not_evaluations() -> None:
    view = trained(1, steps=40, total=40)
    view = fold_readings(
        view, [sample(0, 5, 40, loop=2, epoch=2, step_time_s=9.5, steps_done=45)], START_S + 4.5
    )
    (rank,) = view.ranks
    assert rank.rate_points[0].time_s < 9
    assert rank.steps_per_s == pytest.approx(10)
    evaluating = sample(0, 5, 10, loop=3, epoch=2, step_time_s=10, state=WorkerState.EVALUATING)
    view = fold_readings(view, [evaluating], START_S + 5)
    assert [point.time_s for point in view.ranks[0].rate_points] == [10]
