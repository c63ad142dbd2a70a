"""Facts about the whole job that workers report, in the head of its table."""

from __future__ import annotations

from nblaunch.dashboard.fold import fold
from nblaunch.dashboard.table import tabulate
from nblaunch.dashboard.view import JobView
from nblaunch.events import AttemptStarted, Fact

STARTED = AttemptStarted(-1, 1.0, num_processes=2, backend="xla", start_method="fork", mixed_precision="bf16")


def test_the_head_shows_the_last_fact_of_each_name() -> None:
    view = fold(JobView(), STARTED)
    assert tabulate(view).setting == "2 processes (xla, fork, bf16)"
    view = fold(view, Fact(-1, 2.0, "compilations", "1 graph compiled in 0.5 s"))
    view = fold(view, Fact(-1, 2.0, "precision", "bf16: float is bfloat16,\x1b[1m double is float32"))
    view = fold(view, Fact(-1, 3.0, "compilations", "2 graphs compiled in 1.0 s"))
    assert tabulate(view).setting == (
        "2 processes (xla, fork, bf16: float is bfloat16, double is float32, 2 graphs compiled in 1.0 s)"
    )


def test_each_attempt_has_its_own_facts() -> None:
    view = fold(fold(JobView(), STARTED), Fact(-1, 2.0, "compilations", "1 graph compiled in 0.5 s"))
    assert tabulate(fold(view, STARTED)).setting == "2 processes (xla, fork, bf16)"
