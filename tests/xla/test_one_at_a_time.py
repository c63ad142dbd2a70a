"""Blocks that one worker after the other runs, as to build a large model on its device (PJRT CPU)."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel

pytestmark = pytest.mark.timeout(110)


def test_blocks_run_one_at_a_time(shared: Kernel) -> None:
    cell = shared.run(
        """
import mmap
from nblaunch import one_at_a_time
times = memoryview(mmap.mmap(-1, 4096)).cast("d")

def train():
    accelerator = Accelerator()
    rank = accelerator.process_index
    with one_at_a_time():
        times[2 * rank] = time.monotonic()
        model = nn.Linear(64, 64).to(accelerator.device)
        times[2 * rank + 1] = time.monotonic()
    accelerator.prepare(model)

notebook_launcher(train, num_processes=3)
spans = sorted((times[2 * rank], times[2 * rank + 1]) for rank in range(3))
sum(later[0] < earlier[1] for earlier, later in zip(spans, spans[1:]))
""",
        timeout_s=60,
    )
    assert cell.value == 0
