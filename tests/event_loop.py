"""The event loop that nbclient keeps for all its calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jupyter_core.utils import ensure_event_loop


@pytest.fixture(scope="module", autouse=True)
def event_loop() -> Iterator[None]:
    """Create the loop before the first test that executes a notebook, so that no test seems to leave it behind.

    A test module uses the fixture by importing it.
    """
    loop = ensure_event_loop()
    yield
    loop.close()
