"""Fixtures with a browser and a JupyterLab, both of which take seconds to start.

Each module has its own browser: while it runs, playwright runs an event loop in this thread, where nbclient and others
need theirs. The server is a separate process for all modules.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.lab import Browser, Lab
from tests.tools import browser as chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if chromium.find() is None:
        # `make test` installs it if it may. In CI, a browser is required.
        if os.environ.get("CI"):
            pytest.fail(chromium.HELP, pytrace=False)
        pytest.skip(chromium.HELP)
    with Browser.start() as browser:
        yield browser


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(Path(tmp_path_factory.mktemp("lab"))) as lab:
        yield lab
