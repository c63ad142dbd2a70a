"""Pausing OpenMP before a fork: children keep their threads, and an impossible pause is reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nblaunch.start_methods import fork

# A parallel operation, a fork, and a parallel operation in the child, which must not hang.
FORK = """
import os, signal, sys
from nblaunch.start_methods.fork import pause_pools
assert pause_pools()  # nothing to pause yet: that libraries have been loaded since is noticed below
import torch
torch.set_num_threads(2)
big = torch.randn(1500, 1500)
(big @ big).sum(); torch.empty(1 << 20).normal_()
for _ in range(3):
    paused = pause_pools()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        torch.empty(1 << 20).normal_(); (big @ big).sum()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "the child hung"
    torch.empty(1 << 20).normal_()
print(paused)
"""


def test_children_of_a_paused_process_can_use_threads() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=300, capture_output=True, text=True
    )
    assert result.stdout == "True\n"


# pip leaves a process in this state when it upgrades a library in use. Source: libgomp, GOMP_parallel(function, data,
# threads, flags).
REPLACED = """
import ctypes, os, shutil, signal, sys
from pathlib import Path
from nblaunch.start_methods.fork import pause_pools

library, folder, is_there_again = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "again"
copy = folder / "libgomp-e985bcbb.so.1.0.0"
shutil.copy(library, copy)
(folder / "package").mkdir()
free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
gomp = ctypes.CDLL(folder / "package" / ".." / copy.name)  # as a wheel's modules find it
gomp.GOMP_parallel(free, None, 2, 0)
copy.unlink()
if is_there_again:
    shutil.copy(library, copy)
can_use_threads = pause_pools()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    gomp.GOMP_parallel(free, None, 2, 0)
    os._exit(0)
print(can_use_threads, os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize("then", ["removed", "again"])
def test_a_library_whose_file_is_gone_is_paused(tmp_path: Path, then: str) -> None:
    (gomp,) = (Path(torch.__file__).parent / "lib").glob("libgomp*")
    result = subprocess.run(
        [sys.executable, "-c", REPLACED, gomp, tmp_path, then],
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert result.stdout == "True 0\n"


# dlopen keeps the interpreter's lock, like an import of an extension, and takes the loader's lock.
IMPORTING = """
import _ctypes, threading, sys
from nblaunch.start_methods import fork

stop = threading.Event()
def load():
    while not stop.is_set():
        _ctypes.dlclose(_ctypes.dlopen(sys.argv[1], 2))

sys.setswitchinterval(1e-6)
thread = threading.Thread(target=load, daemon=True)
thread.start()
counts = {fork._executable_size() for _ in range(5_000)}
stop.set()
thread.join()
print(len(counts) > 1)
"""


def test_another_thread_may_load_libraries_meanwhile() -> None:
    library = next((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    result = subprocess.run(
        [sys.executable, "-c", IMPORTING, library], check=True, timeout=300, capture_output=True, text=True
    )
    assert result.stdout == "True\n"


def test_a_process_without_openmp_needs_no_pause() -> None:
    program = "from nblaunch.start_methods.fork import pause_pools; assert pause_pools() is True"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.parametrize(
    ("path", "is_openmp"),
    [
        ("/env/lib/python3.11/site-packages/torch/lib/libgomp.so.1", True),
        ("/env/site-packages/scikit_learn.libs/libgomp-d22c30c5.so.1.0.0", True),
        ("/usr/lib/x86_64-linux-gnu/libomp.so.5", True),
        ("/opt/intel/libiomp5.so", True),
        ("/env/lib/libcompress.so.1", False),
        ("/env/lib/libgompers.txt", False),
    ],
)
def test_openmp_libraries_are_recognised_by_their_names(path: str, is_openmp: bool) -> None:
    assert bool(fork._LIBRARY.search(path)) is is_openmp


def test_a_library_without_the_call_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "_loaded_libraries", lambda *args: [str(Path("/proc/self/exe"))])
    assert fork.pause_pools() is False
