"""Ties a contract test to a row of the tables in docs/what-a-worker-inherits.md, and runs it under every start method.

@contract("environment variables")
def test_the_environment_is_the_kernels(kernel: Kernel, start_method: str) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.thorough import thorough

START_METHODS = ("fork", "forkserver", thorough("spawn"))
"""Forkserver and spawn rebuild the kernel's state by the same code: spawn is for the thorough tests."""

covered: set[str] = set()
"""Names of rows that have a contract test, filled as test modules are imported."""


def contract(kind: str, *, is_slow: bool = False) -> Callable[[Any], Any]:
    """Return a decorator for the test of the row ``kind``; the test takes ``start_method``.

    Args:
        kind: name of the row.
        is_slow: only forks are tested without ``--thorough``.
    """
    covered.add(kind)
    return pytest.mark.parametrize(
        "start_method", ("fork", *map(thorough, ("forkserver", "spawn"))) if is_slow else START_METHODS
    )
