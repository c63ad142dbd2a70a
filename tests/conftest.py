"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import alarms, left_behind, watchman
from tests.alarms import no_false_alarms  # noqa: F401  a fixture
from tests.golden_files import Golden
from tests.kernels import Kernel, close_forkservers, remember_environment

# Ordered by their time on two idle cores, so that no long group runs last while the other core is idle.
LONGEST_FIRST = (
    "tests/nodes",
    "tests/engines",
    "tests/browser",
    "tests/training/strategies/test_fsdp2.py",
    "tests/training/strategies/test_deepspeed.py",
    "tests/training/strategies/test_fsdp2_checkpoint.py",
    "tests/cli/test_estimate.py",
    "tests/training/test_ddp_options.py",
    "tests/failures/test_resources.py",
    "tests/failures/test_interrupts.py",
    "tests/failures/test_orphans.py",
    "tests/integration/test_results.py",
    "tests/integration/test_output.py",
    "tests/training/test_checkpoint.py",
    "tests/training/test_distributed.py",
    "tests/contracts/test_start_method.py",
    "tests/cli/test_every_answer.py",
    "tests/failures/test_failures.py",
    "tests/failures/test_hangs.py",
    "tests/training/test_gradients.py",
    "tests/training/test_state.py",
    "tests/dashboard/test_widgets_in_kernel.py",
    "tests/xla/test_false_notes.py",
    "tests/xla/test_training.py",
    "tests/xla/test_notebook.py",
    "tests/xla/test_other_code.py",
    "tests/xla/test_memory.py",
    "tests/xla/test_estimate.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the files in tests/golden anew")
    parser.addoption("--thorough", action="store_true", help="also run the tests marked as thorough")


def pytest_configure() -> None:
    left_behind.adopt_orphans()
    # Keep the tests' detached jobs apart from the user's.
    os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir()) / f"nblaunch-tests-{os.getuid()}")
    watchman.begin()
    alarms.begin()
    # The time of an example depends on the machine's load more than on the code; pytest's timeout applies instead.
    hypothesis.settings.register_profile("nblaunch", deadline=None)
    hypothesis.settings.load_profile("nblaunch")
    # A shell that starts the tests in the background makes them ignore SIGINT, and their programs would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collections, and exclude all imported objects from later ones.

    Collecting the heap of all tests takes half a second, and many tests end with a collection: see ``left_behind``.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    remember_environment()  # torch and other libraries have set variables at import


def pytest_unconfigure() -> None:
    close_forkservers()
    alarms.end()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out thorough tests, except those that the command line names, and run the longest groups first."""
    if not config.getoption("--thorough"):
        named = [argument for argument in config.args if "::" in argument]
        left_out = [
            item
            for item in items
            if item.get_closest_marker("thorough") and not any(item.nodeid.startswith(name) for name in named)
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    places = {group: place for place, group in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(_group(item.nodeid), len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Run tests that must not run in parallel in one test process: see :func:`_group`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByGroup(config, log)


def _group(nodeid: str) -> str:
    """Return a test's group: its module, whose tests share kernels, with four exceptions."""
    module = nodeid.partition("::")[0]
    if module.startswith("tests/nodes/"):
        return "tests/nodes"  # without network namespaces, two machines meet at fixed loopback ports
    if module.startswith("tests/engines/"):
        return "tests/engines"  # which share a kernel with nodes
    if module.startswith("tests/browser/"):
        return "tests/browser"  # one Chromium and one server at a time
    if module == "tests/notebooks/test_notebooks.py":
        # these share nothing and take long; each notebook runs only once at a time
        return nodeid.rpartition("-")[2]
    return module


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a test leaves no process, file descriptor or thread behind.

    ``@pytest.mark.leaves_behind("why")`` exempts a test.
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


@pytest.fixture(scope="session")
def first_store() -> None:
    """Start a store once, because torch's store library creates a permanent pipe at its first use."""
    from torch.distributed import TCPStore

    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def kernel(nothing_left_behind: None) -> Iterator[Kernel]:
    """Start a fresh IPython kernel; after the test, all its processes must be gone."""
    with Kernel.start() as kernel:
        yield kernel


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Return a function that compares a text with its golden file."""
    return Golden(request.config.getoption("--update-golden"))
