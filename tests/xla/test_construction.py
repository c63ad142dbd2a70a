"""Models that the function builds by itself, on a host whose memory would not hold all at once (PJRT CPU)."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel

pytestmark = pytest.mark.timeout(110)

# Every worker writes when it went on beyond the first of four layers, and when its model was on the device.
BUILD = """
import mmap
from nblaunch import context, one_at_a_time
from nblaunch.host import memory
from nblaunch.worker import construction
construction._FIRST_MARK_BYTES = 1 << 20
real = memory.limit_and_available
times = memoryview(mmap.mmap(-1, 4096)).cast("d")

def train(differs=False):
    accelerator = Accelerator()
    rank = accelerator.process_index
    torch.manual_seed(rank if differs else 0)
    first = nn.Linear(512, 512)                               # a MiB: here a worker waits
    times[2 * rank] = time.monotonic()
    model = nn.Sequential(first, *(nn.Linear(512, 512) for _ in range(3)))
    backend = context.current().backend
    real_place = backend.place
    def place(model, device):
        real_place(model, device)
        times[2 * rank + 1] = time.monotonic()
    backend.place = place
    model = accelerator.prepare(model)
    weights = [p.detach().cpu().double().sum().item() for p in model.parameters()]
    return weights, accelerator.gather(torch.ones(1, device=accelerator.device)).sum().item()

def overlaps(count):
    spans = sorted((times[2 * rank], times[2 * rank + 1]) for rank in range(count))
    return sum(later[0] < earlier[1] for earlier, later in zip(spans, spans[1:]))
"""


@pytest.fixture(scope="module")
def building(shared: Kernel) -> Kernel:
    shared.run(BUILD)
    return shared


def test_big_models_are_built_one_after_the_other_where_memory_is_tight(building: Kernel) -> None:
    building.run("memory.limit_and_available = lambda: (1 << 20, 1 << 20)")
    cell = building.run(
        "found = notebook_launcher(train, (True,), 4, return_all=True, dashboard='text')\n"
        "overlaps(4), len({tuple(weights) for weights, _ in found}), {total for _, total in found}",
        timeout_s=90,
    )
    building.run("memory.limit_and_available = real")
    # Weights differ by rank before: rank 0's are on all of them although they were sent after the move.
    assert cell.value == (0, 1, {4.0})
    assert "the workers build their models one after the other" in cell.stdout


def test_nobody_waits_where_memory_is_plenty(building: Kernel) -> None:
    cell = building.run(
        "notebook_launcher(train, (False,), 2, return_all=True, dashboard='text')[0][1]", timeout_s=60
    )
    assert cell.value == 2.0
    assert "one after the other" not in cell.stdout


def test_blocks_that_a_person_marks_run_one_at_a_time(building: Kernel) -> None:
    cell = building.run(
        """
def mark():
    accelerator = Accelerator()
    rank = accelerator.process_index
    with one_at_a_time():
        times[2 * rank] = time.monotonic()
        model = nn.Linear(64, 64).to(accelerator.device)
        times[2 * rank + 1] = time.monotonic()
    accelerator.prepare(model)
notebook_launcher(mark, num_processes=3)
overlaps(3)
""",
        timeout_s=60,
    )
    assert cell.value == 0
