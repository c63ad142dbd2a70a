"""Charts: axes with round numbers, a legend, means drawn before ranks' curves."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise

import pytest

from nblaunch.dashboard.charts import chart, charts, mean_of, thinned, ticks
from nblaunch.dashboard.fold import fold_readings
from nblaunch.events import Metric
from nblaunch.wire.board import LossCurve
from tests.dashboard.scenes import START_S, sample, started, trained, view_of
from tests.dashboard.test_render import Reader


def lines(html: str) -> list[list[tuple[float, float]]]:
    """Return the points of each line in pixels."""
    found = []
    for first, rest in re.findall(r'<path d="M([^l"]+)l([^"]+)">', html):
        steps = [float(number) for number in f"{first} {rest}".split()]
        found.append(list(zip(accumulate(steps[::2]), accumulate(steps[1::2]), strict=True)))
    return found


def numbers(html: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", html)


def test_a_chart_has_round_ticks_and_fits_its_frame() -> None:
    html = chart("x", [(0, 3.0), (1, -1.0), (2, 2.0), (3, 2.5)])
    width, height = map(int, re.search(r'<svg width="(\d+)" height="(\d+)"', html).groups())  # type: ignore[union-attr]
    ((first, *_, last),) = lines(html)
    assert first[0] < last[0] <= width
    assert all(0 <= y <= height for line in lines(html) for _, y in line)
    assert numbers(html) == ["-1", "0", "1", "2", "3", "step", "0", "1", "2", "3"]
    assert "x3 to 2.5 in 3 steps, min -1" in Reader(html).text
    gap = re.search(r"margin:6px (\d+)px", html)[1]  # type: ignore[index]
    assert 3 * (width + int(gap)) <= 812  # three charts fit into a cell on a laptop
    assert "vertical-align:bottom" in html  # frames are aligned below captions of one line and of two


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.03, 0.98, [0.2, 0.4, 0.6, 0.8]),
        (0, 132, [0, 50, 100]),
        (1e-5, 4e-5, [1e-5, 2e-5, 3e-5, 4e-5]),
        (-3.0, 4.0, [-2, 0, 2, 4]),
        (7, 7, [7]),
    ],
)
def test_ticks_are_round_numbers_within_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 5) == expected


def test_values_over_several_powers_of_ten_are_on_a_logarithmic_scale() -> None:
    html = chart("loss", [(step, 10.0**-step) for step in range(5)])
    assert numbers(html)[:5] == ["0.0001", "0.001", "0.01", "0.1", "1"]
    assert "log scale" in Reader(html).text
    heights = [y for _, y in lines(html)[0]]
    assert len({round(b - a) for a, b in pairwise(heights)}) == 1


def test_mean_covers_the_same_steps_for_any_readings() -> None:
    fine = [(float(step), 1.0) for step in range(1, 9)]
    coarse = [(2.0, 3.0), (4.0, 3.0), (6.0, 3.0)]
    assert mean_of([fine, fine[:5]]) == fine
    assert mean_of([fine, coarse]) == [
        (2, pytest.approx(5 / 3)),
        (4, pytest.approx(5 / 3)),
        (6, pytest.approx(5 / 3)),
        (8, 1),
    ]


def test_loss_chart_shows_mean_and_first_eight_ranks() -> None:
    (html,) = charts(trained(12))
    assert len(lines(html)) == 9
    assert "━ mean ─ ranks 0-7" in Reader(html).text
    (alone,) = charts(trained(1))
    assert len(lines(alone)) == 1
    assert "━" not in alone


def test_a_rank_without_losses_is_left_out_of_the_mean() -> None:
    view = view_of(started(2))
    for step in range(5):
        losses = [LossCurve(step, 1, (0.5,) * step), LossCurve()]
        samples = [sample(rank, step, losses=losses[rank]) for rank in range(2)]
        view = fold_readings(view, samples, START_S + step)
    (html,) = charts(view)
    assert "━ mean ─ each rank" in Reader(html).text


def test_thinned_lines_keep_their_ends() -> None:
    line = [(float(x), 0.0) for x in range(1000)]
    assert len(thinned(line)) == 64
    assert (thinned(line)[0], thinned(line)[-1]) == (line[0], line[-1])
    assert thinned(line[:3]) == line[:3]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.9, 0.95, 1.0], ["0.90", "0.95", "1.00"]),
        ([0, 500, 1000], ["0", "500", "1,000"]),
        ([0, 20_000, 40_000], ["0k", "20k", "40k"]),
        ([0.0, 2e-5, 4e-5], ["0", "2e-5", "4e-5"]),
        ([1e8, 2e8], ["1e8", "2e8"]),
    ],
)
def test_tick_labels_have_the_same_number_of_digits(values: list[float], expected: list[str]) -> None:
    html = chart("x", [(0, values[0]), (1, values[-1])])
    texts = numbers(html)
    assert [text for text in texts[: texts.index("step")] if text in expected] == expected


def test_values_whose_sums_are_infinite_are_left_out() -> None:
    curve = LossCurve(4, 1, (1.7e308, 0.0, -1e308, 2.0))
    view = fold_readings(view_of(started(2)), [sample(rank, 4, losses=curve) for rank in range(2)], START_S)
    logged = [
        Metric(0, START_S, step, {"huge": value}) for step, value in enumerate((1.0, 10**400, -1.7e308, 2.0))
    ]
    losses, huge = charts(view_of(logged, view))
    assert re.search(r"loss: 0\S* to 2", losses)
    assert "huge: 1 to 2" in huge


def test_the_chart_of_the_losses_is_the_widest() -> None:
    metrics = [Metric(0, START_S, step, {"accuracy": step / 10}) for step in range(4)]
    html = charts(view_of(metrics, trained(2)))
    losses, accuracy = (int(re.search(r'<svg width="(\d+)"', one)[1]) for one in html)  # type: ignore[index]
    assert losses > 2 * accuracy
