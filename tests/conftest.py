"""Fixtures for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests import left_behind, watchman
from tests.kernels import Kernel


def pytest_configure() -> None:
    left_behind.adopt_orphans()
    watchman.begin()
    # How long one example takes says more about the machine's load than about the code; pytest's timeout holds.
    hypothesis.settings.register_profile("nblaunch", deadline=None)
    hypothesis.settings.load_profile("nblaunch")
    # A shell that starts the tests in the background has them ignore SIGINT, and so would every program they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Keep together, in one of several test processes, what must not run side by side: see :func:`_group`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByGroup(config, log)


def _group(nodeid: str) -> str:
    """The tests of a module share kernels, with three exceptions."""
    module = nodeid.partition("::")[0]
    if module.startswith("tests/nodes/"):
        return "tests/nodes"  # without network namespaces, two machines meet at fixed ports of the loopback
    if module.startswith("tests/browser/"):
        return "tests/browser"  # a Chromium and a server at a time
    if module == "tests/notebooks/test_notebooks.py":
        return nodeid.rpartition("-")[2]  # share nothing, and take long; one notebook runs once at a time
    return module


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test ends with the processes, file descriptors and threads that it began with.

    ``@pytest.mark.leaves_behind("why")`` excuses one.
    """
    marker = request.node.get_closest_marker("leaves_behind")
    if marker is not None and not (marker.args and isinstance(marker.args[0], str)):
        pytest.fail(
            "the marker leaves_behind needs a reason: @pytest.mark.leaves_behind('why')", pytrace=False
        )
    before = left_behind.Snapshot.take()
    yield
    if marker is None and (found := left_behind.find(before)):
        left_behind.kill_processes(before)
        pytest.fail("the test left behind:\n" + "\n".join(f"  {line}" for line in found), pytrace=False)
    left_behind.kill_processes(before)


@pytest.fixture
def kernel(nothing_left_behind: None) -> Iterator[Kernel]:
    """A fresh IPython kernel; after the test, all that came from it must be gone."""
    with Kernel.start() as kernel:
        yield kernel
