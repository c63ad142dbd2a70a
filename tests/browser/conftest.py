"""A browser and a JupyterLab for the tests of this folder, which both take seconds to start.

A browser for each module: as long as it runs, playwright runs an event loop in this very thread, where nbclient and
others would want theirs. The server is a process of its own, and serves all modules.
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
        # `make test` installs it where it may. Where changes are accepted, a browser is not optional.
        if os.environ.get("CI"):
            pytest.fail(chromium.HELP, pytrace=False)
        pytest.skip(chromium.HELP)
    with Browser.start() as browser:
        yield browser


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(Path(tmp_path_factory.mktemp("lab"))) as lab:
        yield lab
