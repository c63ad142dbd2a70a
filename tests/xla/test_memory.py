"""Host memory of eight workers with one model of 420 MB (PJRT CPU; without device bytes, see ``memory.py``).

``python -m tests.xla.memory`` measures the other variants.
"""

from __future__ import annotations

import pytest

from tests.xla import memory

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_quickly")]


def test_passed_models_are_in_memory_once() -> None:
    passed = memory.measure("passed")
    print(passed)
    assert passed.num_samples >= 5
    assert passed.peak <= 1.4e9
    # At rest: the kernel with its model, and the eight workers' own memory.
    assert passed.end <= passed.start + 8 * 40e6
