"""What a launch leaves in the kernel (nothing), and what it must not disturb there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Kernel

WATCH = """
import gc, signal, socket, tempfile, threading, psutil

# The kernel's own: a socket for each thread that prints, collected every ten seconds; the history and its folder, open
# while it is written.
KERNELS_OWN = ("eventfd", "history.sqlite", "profile_default", "IPythonHistorySavingThread")

def not_of_kernel(items):
    return [item for item in items if not any(own in str(item) for own in KERNELS_OWN)]

def descriptors():
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield int(fd), os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue   # that of the listing

def traces():
    me = psutil.Process()
    return {
        "descriptors": not_of_kernel(sorted(descriptors())),
        "native threads": me.num_threads() - sum(t.name == "IPythonHistorySavingThread" for t in threading.enumerate()),
        "threads": not_of_kernel(sorted(thread.name for thread in threading.enumerate())),
        "children": sorted(child.pid for child in me.children(recursive=True)),
        "listening": sorted(c.laddr.port for c in me.net_connections("inet") if c.status == psutil.CONN_LISTEN),
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "environment": dict(os.environ),
        "temporary files": sorted(name for name in os.listdir(tempfile.gettempdir()) if "nblaunch" in name),
        "frozen": gc.get_freeze_count(),
        "hooks": (sys.stdout, sys.stderr, sys.excepthook, sys.displayhook, __builtins__.input),
        "folder": os.getcwd(),
        "memory files": sum("memfd:nblaunch" in line for line in open("/proc/self/maps")),
    }

def changes(before, after):
    # Of a list only what came and went.
    found = {}
    for name, old in before.items():
        new = after[name]
        if isinstance(old, list):
            old, new = [item for item in old if item not in new], [item for item in new if item not in old]
        if old != new:
            found[name] = old, new
    return found

def settled(before):
    # A native thread of torch may take a moment to end.
    deadline = time.monotonic() + 5
    while changes(before, after := traces()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return after

def train(how):
    import torch.distributed as dist
    dist.init_process_group()
    if how == "raise" and dist.get_rank() == 1:
        raise ValueError("on purpose")
    if how == "exit" and dist.get_rank() == 1:
        os._exit(3)
    print("x" * 1000)
    return threading.Lock() if how == "unpicklable" else {"rank": dist.get_rank()}

def launch(how, **options):
    try:
        return notebook_launcher(train, (how,), 2, **options)
    except Exception as error:
        return type(error).__name__
"""

ROUND = """
outcomes = [
    launch("return"), launch("raise"), launch("exit"), launch("unpicklable", sync_weights=False),
    launch("return", start_method="forkserver"), launch("raise", start_method="forkserver"),
    launch("exit", start_method="spawn"),
]
lock = threading.Lock()
try:
    notebook_launcher(lambda: lock, num_processes=2, start_method="forkserver")
except nblaunch.PayloadError:
    outcomes.append("payload")
with socket.create_server(("127.0.0.1", 0)) as taken:
    try:
        notebook_launcher(train, ("return",), 2, use_port=taken.getsockname()[1])
    except nblaunch.LaunchError as error:
        outcomes.append(str(error))
job = notebook_launcher(train, ("return",), 2, background=True)
outcomes.append(job.result())
del job
"""


def test_launches_of_every_outcome_leave_nothing(shared: Kernel) -> None:
    shared.run(WATCH + ROUND)  # what is made once per process, as torch's first store, is made here
    cell = shared.run("before = traces()\n" + ROUND + "after = settled(before)\noutcomes")
    assert cell.result is not None
    *outcomes, refusal, last = cell.value
    assert outcomes == [
        {"rank": 0}, "ValueError", "WorkerDied", "ResultError", {"rank": 0}, "ValueError", "WorkerDied",
        "payload",
    ]  # fmt: skip
    assert last == {"rank": 0}
    assert "in use" in refusal
    assert "use_port" in refusal
    assert shared.run("changes(before, after)").result == "{}"
    assert shared.processes() == []


def test_a_refused_descriptor_ends_the_workers_that_had_started(shared: Kernel, tmp_path: Path) -> None:
    shared.run(WATCH + "launch('return')\nbefore = traces()")
    # With every number of free descriptors, from one on, until it is enough.
    cell = shared.run(
        f"here = {str(tmp_path)!r}"
        """
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
in_use = max(map(int, os.listdir("/proc/self/fd"))) + 1
outcomes = []
def meet(attempt):
    mine, other = (f"{here}/{attempt}-{rank}" for rank in (int(os.environ["RANK"]), 1 - int(os.environ["RANK"])))
    os.mkdir(mine)                       # needs no descriptor
    while not os.path.exists(other):     # for ever, where the other one was never started
        time.sleep(0.01)
    return True
for spare in range(1, 60):
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 60, hard))
    fillers = []
    try:
        while True:
            fillers.append(os.dup(0))
    except OSError:
        pass
    for _ in range(spare):
        os.close(fillers.pop())
    try:
        outcomes.append(notebook_launcher(meet, (spare,), num_processes=2, dashboard="none"))
    except Exception as error:
        outcomes.append([type(error).__name__, str(error)])
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if outcomes[-1] is True:
        break
    outcomes[-1].append(len(psutil.Process().children()))
outcomes
"""
    )
    *refused, last = cell.value
    assert last is True
    assert len(refused) >= 2
    # OSError as it is: where not even the devices of the machine could be looked at.
    assert {name for name, *_ in refused} in ({"LaunchError"}, {"LaunchError", "OSError"}), refused
    assert {num_left for *_, num_left in refused} == {0}, refused
    assert all("descriptors" in text or "open files" in text for _, text, _ in refused), refused
    assert shared.run("changes(before, settled(before))").result == "{}"


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_that_cannot_be_watched_are_ended(shared: Kernel, method: str) -> None:
    shared.run(
        f"""
import errno, threading, psutil
import nblaunch.launcher.attempt as attempt
real = attempt.Guardian.start
def refuse(guardian):
    raise OSError(errno.EMFILE, "Too many open files")
attempt.Guardian.start = refuse
try:
    notebook_launcher(time.sleep, (3600,), 2, start_method={method!r})
finally:
    attempt.Guardian.start = real
    children = psutil.Process().children(recursive=True)
""",
        raises="LaunchError",
    )
    assert shared.run("children").result == "[]"
    assert shared.processes() == []


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_nothing_listens_beyond_the_loopback_interface(shared: Kernel, method: str) -> None:
    cell = shared.submit(
        f"""
import psutil
def train(pids):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    me = psutil.Process()
    addresses = [(c.laddr.ip, os.getpid()) for process in (me, psutil.Process({shared.pid}), me.parent())
                 for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    dist.barrier()
    return addresses
# Kernels of users listen on TCP by themselves; this one of the tests uses Unix sockets.
sum(notebook_launcher(train, ([],), 2, start_method={method!r}, return_all=True), [])
"""
    ).wait()
    assert cell.status == "ok", cell.describe()
    addresses = {ip for ip, _ in cell.value}
    assert addresses == {"127.0.0.1"}


def test_two_kernels_launch_at_once(shared: Kernel, fresh: Kernel) -> None:
    train = """
def train():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([os.getppid()])
    dist.all_reduce(total)
    return total.item() // 4
[notebook_launcher(train, num_processes=4) for _ in range(3)]
"""
    cells = [kernel.submit(train) for kernel in (shared, fresh)]
    for cell, kernel in zip(cells, (shared, fresh), strict=True):
        assert cell.wait().result == str([kernel.pid] * 3), cell.describe()


def test_what_the_kernel_runs_by_itself_goes_on(shared: Kernel) -> None:
    """Pools, data loaders and temporary folders of the kernel are not the workers' to end."""
    cell = shared.run(
        """
import multiprocessing, tempfile, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from torch.utils.data import DataLoader
pool = multiprocessing.get_context("fork").Pool(2)
processes = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
threads = ThreadPoolExecutor(2)
folder = tempfile.TemporaryDirectory()
loader = DataLoader(range(64), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
batches = iter(loader)
first = next(batches)
used = pool.map(abs, [-1]), list(processes.map(abs, [-2])), threads.submit(abs, -3).result()

def train():
    import weakref
    class Thing: pass
    thing = Thing()
    weakref.finalize(thing, print, "finalized")   # makes the worker run finalizers at its end
    multiprocessing.active_children()
    return True

launched = [notebook_launcher(train, num_processes=2, start_method=method) for method in ("fork", "forkserver")]
"""
    )
    cell = shared.run(
        "launched, pool.map(abs, [-1]), list(processes.map(abs, [-2])), threads.submit(abs, -3).result(), "
        "os.path.isdir(folder.name), len(list(batches))",
        timeout_s=30,
    )
    assert cell.value == ([True, True], [1], [2], 3, True, 63)
    shared.run(
        "del batches, loader\npool.terminate(); pool.join()\nprocesses.shutdown()\nthreads.shutdown()\nfolder.cleanup()"
    )
