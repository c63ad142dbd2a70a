"""Host memory of eight workers with one model of 420 MB (PJRT CPU; device bytes taken off, see ``memory.py``)."""

from __future__ import annotations

import pytest

from tests.xla import memory

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def passed() -> memory.Report:
    return memory.measure("passed")


def test_a_model_that_is_passed_is_held_once(passed: memory.Report) -> None:
    print(passed)
    assert passed.num_samples >= 5
    assert passed.peak <= 1.4e9
    # At rest: the kernel with its model, and what eight workers have of their own.
    assert passed.end <= passed.start + 8 * 40e6
    assert "8 workers, host memory " in passed.line
    assert "(model 420 MB held once)" in passed.line


def test_without_the_recipe_it_takes_a_multiple(passed: memory.Report) -> None:
    plain = memory.measure("passed, plain")
    print(plain)
    assert passed.peak < plain.peak / 2


@pytest.fixture(scope="module")
def built() -> memory.Report:
    return memory.measure("built")


def test_models_built_one_after_the_other_take_a_fraction(built: memory.Report) -> None:
    in_turn = memory.measure("built, one at a time")
    print(in_turn, built)
    assert in_turn.peak < 0.6 * built.peak


def test_a_model_built_in_every_worker_is_named(built: memory.Report) -> None:
    print(built)
    assert "built in every worker" in built.line
    assert "notebook_launcher(function, (model,))" in built.line
