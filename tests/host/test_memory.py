"""Host memory of processes and of their allocator."""

from __future__ import annotations

import subprocess
import sys

from nblaunch.host import memory

KEEPS = """
import ctypes
from nblaunch.host import memory
is_tuned = memory.tune_allocator() if {tunes} else None
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
def take(size):
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    return block
libc.free(take(30 << 20))                     # glibc takes this as a sign to serve such blocks from its heap
blocks = [take(20 << 20) for _ in range(5)]
before = memory.proportional_bytes()
last = take(1 << 20)                          # above the blocks: the heap cannot shrink past it
for block in blocks:
    libc.free(block)
kept = memory.proportional_bytes()
memory.trim()
print(is_tuned, (before - kept) >> 20, (before - memory.proportional_bytes()) >> 20)
"""


def _run(tunes: bool) -> list[str]:
    program = KEEPS.format(tunes=tunes)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    return run.stdout.split()


def test_large_blocks_go_back_at_once_when_tuned() -> None:
    is_tuned, given_back, _ = _run(True)
    assert is_tuned == "True"
    assert int(given_back) >= 95


def test_trimming_returns_free_memory() -> None:
    _, given_back, after_trim = _run(False)
    assert int(given_back) < 40, "glibc keeps its heap; if not, the tuning may go"
    assert int(after_trim) >= 95


def test_shared_pages_count_once() -> None:
    own = memory.proportional_bytes()
    assert own is not None
    assert own > 1 << 20
    assert memory.proportional_bytes(1 << 30) is None


SHARES = """
import mmap, os
import ctypes
from nblaunch.host import memory
size = 64 * mmap.PAGESIZE
block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
block.write(b"x" * size)
address = ctypes.addressof(ctypes.c_char.from_buffer(block))
before = memory.is_shared(address, size)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    os.read(reading, 1)                       # until the parent is through
    os._exit(0)
held = memory.is_shared(address, size)
block[:] = b"y" * size                        # the system makes copies for this process
written = memory.is_shared(address, size)
os.close(writing)
os.waitpid(child, 0)
print(before, held, written, memory.is_shared(address, 0))
"""


def test_memory_is_shared_while_a_forked_process_has_it_too() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SHARES], capture_output=True, text=True, timeout=300, check=True
    )
    assert run.stdout.split() == ["False", "True", "False", "False"]
