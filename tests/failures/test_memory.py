"""Memory runs out in workers under a limit; the kernel survives and reports what happened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control_groups import control_group
from tests.failures.conftest import assert_as_before, start_kernel, value_of
from tests.kernels import Kernel
from tests.thorough import thorough

LIMIT = 1400 << 20

BUILD = """
def train():
    print("building")
    layers = [torch.nn.Linear(4096, 4096) for _ in range(6)]     # 400 MB
    print("built")
    time.sleep(3600)
"""


@pytest.fixture
def limited(nothing_left_behind: None, tmp_path: Path) -> Iterator[Kernel]:
    """Start a kernel in a control group with limited memory."""
    with control_group("memory") as group, start_kernel(tmp_path / "logs") as kernel:
        group.add(kernel.pid)
        group.limit.write_text(str(LIMIT))
        yield kernel


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_building_large_models_in_workers_is_explained(limited: Kernel, method: str) -> None:
    cell = limited.run(
        BUILD + f"notebook_launcher(train, num_processes=6, start_method={method!r})",
        raises="WorkerDied",
    )
    text = cell.raised.value
    assert "was killed by SIGKILL" in text, cell.describe()
    assert "Memory ran out: the system killed" in text, cell.describe()
    assert "Peak memory of each process: rank 0 " in text, cell.describe()
    assert "each built a model of " in text, cell.describe()
    assert "notebook_launcher(train, (model,))" in text, cell.describe()
    assert "limit 1.47 GB" in text, cell.describe()
    assert len(cell.raised.lines) <= 25, cell.describe()
    assert limited.is_alive
    assert_as_before(limited)


def test_a_rejected_allocation_has_the_same_evidence(shared: Kernel) -> None:
    cell = shared.run(
        """
def train():
    used = psutil.Process().memory_info().vms
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    layers = []
    for _ in range(8):
        layers.append(torch.nn.Linear(4096, 4096))               # 67 MB each
    return len(layers)
notebook_launcher(train, num_processes=2)
""",
        raises="RuntimeError",
    )
    assert "can't allocate memory" in cell.raised.value
    for text in (
        "Memory ran out",
        "Peak memory of each process",
        "built a model of",
        "rank 1 (pid ",
    ):
        assert text in cell.raised.text, cell.describe()
    assert len(cell.raised.lines) <= 25, cell.describe()
    assert value_of(shared, "any('Memory ran out' in note for note in sys.last_value.__notes__)")
    assert_as_before(shared)


def test_shared_memory_counts_in_parts(shared: Kernel) -> None:
    shared.run("block = b'x' * 600_000_000")
    cell = shared.run(
        """
def train():
    for _ in range(40):
        torch.nn.Linear(2048, 2048)                              # 17 MB, one after the other
    raise MemoryError("no room")
notebook_launcher(train, num_processes=2, start_method="fork")
""",
        raises="MemoryError",
    )
    shared.run("del block")
    line = re.search(r"Peak memory of each process: .*", cell.raised.text)
    assert line is not None, cell.describe()
    sizes = re.findall(r"rank \d ([\d.]+) (MB|GB)", line[0])
    assert sizes, line[0]
    assert all(unit == "MB" and float(size) < 600 for size, unit in sizes), line[0]
