"""A worker does at its end what Python does at the end of a script."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    """Start a kernel for tests whose function leaves the kernel unchanged."""
    with Kernel.start() as kernel:
        yield kernel


CELL = """
import atexit, threading
from nblaunch import notebook_launcher

def function():
    released = threading.Event()
    def finish():
        released.wait()
        print("thread done")
    threading.Thread(target=finish).start()
    atexit.register(lambda: print("exit handler"))
    threading.main_thread().name  # the function runs in it
    threading.Timer(0.05, released.set).start()

job = notebook_launcher(function, num_processes=2, background={background}, start_method={start_method!r})
"""


@pytest.mark.parametrize(
    ("background", "start_method"),
    [
        (True, "fork"),
        (False, "fork"),
        (True, "forkserver"),
        (False, "spawn"),
        thorough(False, "forkserver"),
        thorough(True, "spawn"),
    ],
)
def test_threads_are_joined_and_exit_handlers_run(
    shared: Kernel, background: bool, start_method: str
) -> None:
    shared.run(CELL.format(background=background, start_method=start_method))
    cell = shared.run(
        "import nblaunch; nblaunch.last_job().result()\n"
        "print([nblaunch.last_job().logs(rank).split() for rank in range(2)])"
    )
    assert cell.stdout == f"{[['thread', 'done', 'exit', 'handler']] * 2}\n"


LEAVING = """
import os, sys
from pathlib import Path
from nblaunch import notebook_launcher
from nblaunch.backends import process_group

def function(path, how):
    process_group.leave_at_exit = Path(path).touch
    if how == "exit":
        sys.exit(3)
    assert how == "return"
"""


@pytest.mark.parametrize(
    ("how", "error", "leaves"),
    [("return", None, True), ("raise", "AssertionError", False), ("exit", "WorkerDied", False)],
)
def test_only_a_rank_that_succeeded_destroys_its_group(
    shared: Kernel, tmp_path: Path, how: str, error: str | None, leaves: bool
) -> None:
    """Destroying an NCCL group waits for operations with other ranks, which may also wait, until all are killed."""
    left = tmp_path / "left"
    shared.run(LEAVING)
    shared.run(f"notebook_launcher(function, ({str(left)!r}, {how!r}), 1)", raises=error)
    assert left.exists() == leaves


OPENING = """
import gc, gzip, sys, zipfile
import nblaunch
from pathlib import Path
from nblaunch import notebook_launcher

def opening(path, ending):
    global kept
    folder = Path(path)
    text, binary, both = open(folder / "text", "w"), open(folder / "binary", "wb"), open(folder / "both", "w+b")
    packed, archive = gzip.open(folder / "packed", "wt"), zipfile.ZipFile(folder / "archive", "w")
    kept = [text, binary, both, packed, archive]
    print("of the worker", file=text)
    binary.write(b"of the worker")
    both.write(b"of the worker")
    packed.write("of the worker")
    archive.writestr("name", "of the worker")
    exec(ending)
"""


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_files_that_are_left_open_are_written(shared: Kernel, tmp_path: Path, start_method: str) -> None:
    shared.run(OPENING)
    shared.run(f"notebook_launcher(opening, ({str(tmp_path)!r}, ''), 1, start_method={start_method!r})")
    assert (tmp_path / "text").read_text() == "of the worker\n"
    assert (tmp_path / "binary").read_bytes() == (tmp_path / "both").read_bytes() == b"of the worker"
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == b"of the worker"
    assert zipfile.ZipFile(tmp_path / "archive").read("name") == b"of the worker"


@pytest.mark.parametrize(("ending", "error"), [("sys.exit(3)", "WorkerDied"), ("1 / 0", "ZeroDivisionError")])
def test_files_are_flushed_after_a_failure(shared: Kernel, tmp_path: Path, ending: str, error: str) -> None:
    shared.run(OPENING)
    shared.run(f"notebook_launcher(opening, ({str(tmp_path)!r}, {ending!r}), 1)", raises=error)
    assert (tmp_path / "text").read_text() == "of the worker\n"


@pytest.mark.parametrize("ending", ["", "gc.unfreeze()"])
def test_kernel_buffers_are_written_once(kernel: Kernel, tmp_path: Path, ending: str) -> None:
    kernel.run(OPENING)
    kernel.run(f"diary = open({str(tmp_path / 'diary')!r}, 'w'); print('of the kernel', file=diary, end='')")
    kernel.run(f"notebook_launcher(opening, ({str(tmp_path)!r}, {ending!r}), 2)")
    assert (tmp_path / "diary").read_text() == "of the kernel"  # before the fork
    kernel.run("diary.close()")
    assert (tmp_path / "diary").read_text() == "of the kernel"


@pytest.mark.parametrize("error", ["OSError(28, 'No space left on device')", "SystemExit(3)"])
def test_unwritable_files_do_not_change_the_outcome(shared: Kernel, tmp_path: Path, error: str) -> None:
    shared.run(OPENING)
    broken = f"""
import io
class Broken(io.TextIOWrapper):
    is_broken = False
    def flush(self):
        if self.is_broken:
            raise {error}
        super().flush()
kept.insert(0, Broken(open("/dev/null", "wb")))
kept[0].is_broken = True
"""
    shared.run(f"notebook_launcher(opening, ({str(tmp_path)!r}, {broken!r}), 1)")
    assert shared.run("nblaunch.last_job().status").value == "done"
    assert (tmp_path / "text").read_text() == "of the worker\n"


# A handler with an unwritten record, and a folder that is removed at exit.
KEEPING = """
import logging.handlers, os, tempfile
import nblaunch
from nblaunch import notebook_launcher

def keep(path):
    global folder
    handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler(path))
    logging.getLogger("of a test").addHandler(handler)
    logging.getLogger("of a test").warning("logged")
    folder = tempfile.TemporaryDirectory()
    return folder.name

def keep_until_shutdown(path):
    keep(path)
    logging.shutdown()
    return open(path).read()

def do(ending):
    exec(ending)
"""


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_worker_log_handlers_and_finalizers_run(shared: Kernel, tmp_path: Path, start_method: str) -> None:
    shared.run(KEEPING)
    launch = f"notebook_launcher(keep, ({str(tmp_path / 'log')!r},), 1, start_method={start_method!r})"
    folder = shared.run(launch).value
    assert (tmp_path / "log").read_text() == "logged\n"
    assert not Path(folder).exists()


def test_logging_shutdown_affects_only_worker_handlers(shared: Kernel, tmp_path: Path) -> None:
    shared.run(KEEPING)
    assert (
        shared.run(f"notebook_launcher(keep_until_shutdown, ({str(tmp_path / 'log')!r},), 1)").value
        == "logged\n"
    )


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "import logging; logging.shutdown()",
        "import logging.config; logging.config.dictConfig({'version': 1})",
        "import gc; globals().pop('folder'); gc.collect()",
    ],
)
def test_kernel_objects_stay_with_the_kernel(kernel: Kernel, tmp_path: Path, ending: str) -> None:
    kernel.run(KEEPING)
    folder = kernel.run(f"keep({str(tmp_path / 'log')!r})").value
    kernel.run(f"notebook_launcher(do, ({ending!r},), 2)")
    assert (tmp_path / "log").read_text() == ""
    assert Path(folder).exists()
    kernel.run("logging.shutdown(); folder.cleanup()")
    assert (tmp_path / "log").read_text() == "logged\n"


REPLACING = """
import sys
import nblaunch
from nblaunch import notebook_launcher

class Logger:
    def __init__(self):
        self.terminal = sys.stdout
    def write(self, text):
        self.terminal.write(text)

class FlushedLogger(Logger):
    def flush(self):
        pass

def talk(make):
    sys.stdout = make()
    print("seen", end="")
    return 5

def close():
    sys.stdout.close()
"""


@pytest.mark.parametrize("stream", ["Logger", "FlushedLogger"])
def test_output_can_be_replaced_by_any_object(shared: Kernel, stream: str) -> None:
    shared.run(REPLACING)
    cell = shared.run(f"notebook_launcher(talk, ({stream},), 1)")
    assert cell.value == 5
    assert "failed" not in str([display.data for display in cell.displays])
    assert shared.run("nblaunch.last_job().logs(0)").value == "seen"


def test_output_may_be_closed(shared: Kernel) -> None:
    shared.run(REPLACING)
    cell = shared.run("notebook_launcher(close, (), 1)")
    assert "failed" not in str([display.data for display in cell.displays])
