"""Cases of a parametrized test that vary what its other cases check, for ``make test-thorough``.

    @pytest.mark.parametrize("stage", [1, thorough(2), thorough(3)])

A whole test is marked with ``@pytest.mark.thorough``.
"""

from __future__ import annotations

from typing import Any

import pytest


def thorough(*values: Any, id: str | None = None) -> Any:
    """Return a case with these values that runs only with ``--thorough``."""
    return pytest.param(*values, id=id, marks=pytest.mark.thorough)
