"""``accelerator.log`` in workers fills ``job.metrics`` in the kernel."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

TRAIN = """
def train():
    accelerator = nblaunch.Accelerator()
    for step in range(3):
        loss = torch.tensor(float(step + accelerator.process_index))
        accelerator.log({"loss": loss, "of": {"rank": accelerator.process_index}, "tensor": torch.ones(2)}, step=step)
        accelerator.log({"lr": 0.5}, step=step)
"""


@pytest.mark.parametrize(
    "how", ["num_processes=2", thorough("num_processes=2, start_method='forkserver'"), "engine='inline'"]
)
def test_logged_metrics_reach_the_job(shared: Kernel, how: str) -> None:
    cell = shared.run(
        f"""{TRAIN}
notebook_launcher(train, {how})
job = nblaunch.last_job()
rows = [{{name: value for name, value in row.items() if name != "time_s"}} for row in job.metrics]
rows, all(row["time_s"] > 1e9 for row in job.metrics)
"""
    )
    rows, has_times = cell.value
    about = {"rank": 0, "attempt": 0}
    assert rows == [
        {"step": step, **about, **values}
        for step in range(3)
        for values in ({"loss": float(step), "of/rank": 0}, {"lr": 0.5})
    ]
    assert has_times


ENUMS = """
import enum
import numpy as np

class P(enum.IntEnum):
    A = 3

def train():
    class Local(enum.Enum):
        B = "b"
    accelerator = nblaunch.Accelerator()
    accelerator.log({"p": P.A, "local": Local.B, "half": np.float16(0.5), "kind": P}, step=np.int64(2))
    accelerator.log({"p": 4}, step=3)
"""


@pytest.mark.parametrize("how", ["start_method='fork'", "start_method='forkserver'", "engine='inline'"])
def test_classes_of_the_notebook_stay_with_the_worker(shared: Kernel, how: str) -> None:
    """``job.metrics`` has only Python's own types, even if the kernel knows the classes of logged values."""
    cell = shared.run(
        f"""{ENUMS}
notebook_launcher(train, (), 1, {how}, dashboard="none")
repr([[row.get(name) for name in ("step", "p", "local", "half", "kind")] for row in nblaunch.last_job().metrics])
"""
    )
    assert cell.value == "[[2, 3, 'b', 0.5, None], [3, 4, None, None, None]]"


def test_metrics_of_a_job_that_failed_are_kept(shared: Kernel) -> None:
    shared.run(
        TRAIN + "def fail():\n    train()\n    raise ValueError\nnotebook_launcher(fail, num_processes=2)",
        raises="ValueError",
    )
    assert shared.run("len(nblaunch.last_job().metrics)").result == "6"
