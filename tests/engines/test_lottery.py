"""A few draws of the lottery; ``python -m tests.engines.lottery`` draws many."""

from __future__ import annotations

import secrets

import pytest

from tests.engines.lottery import BUSY_LEFT_S, TOKEN, Lottery

pytestmark = [pytest.mark.slow]

SPAN_S = 8.0


@pytest.fixture
def lottery(monkeypatch: pytest.MonkeyPatch, nothing_left_behind: None) -> Lottery:
    monkeypatch.setenv(TOKEN, secrets.token_hex(8))
    return Lottery("processes", seed=secrets.randbits(32), left_s=BUSY_LEFT_S)


@pytest.mark.thorough
def test_kills_at_random_moments_are_named_and_leave_nothing(lottery: Lottery) -> None:
    with lottery.kernel() as kernel:
        draws = [lottery.kill(kernel, victim, SPAN_S) for victim in ("rank", "node", "job process")]
    draws.append(lottery.kill_kernel(SPAN_S))
    assert not [draw for draw in draws if draw.wrong]
