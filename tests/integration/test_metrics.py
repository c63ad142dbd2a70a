"""``accelerator.log`` in workers fills ``job.metrics`` in the kernel."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel

TRAIN = """
def train():
    accelerator = nblaunch.Accelerator()
    for step in range(3):
        loss = torch.tensor(float(step + accelerator.process_index))
        accelerator.log({"loss": loss, "of": {"rank": accelerator.process_index}, "tensor": torch.ones(2)}, step=step)
        accelerator.log({"lr": 0.5}, step=step)
"""


@pytest.mark.parametrize(
    "how", ["num_processes=2", "num_processes=2, start_method='spawn'", "engine='inline'"]
)
def test_what_is_logged_reaches_the_job(shared: Kernel, how: str) -> None:
    cell = shared.run(
        f"""{TRAIN}
notebook_launcher(train, {how})
job = nblaunch.last_job()
rows = [{{name: value for name, value in row.items() if name != "time_s"}} for row in job.metrics]
frame = job.metrics_frame()
rows, sorted(frame.columns), frame["loss"].to_dict(), all(row["time_s"] > 1e9 for row in job.metrics)
"""
    )
    rows, columns, losses, has_times = cell.value
    about = {"rank": 0, "attempt": 0}
    assert rows == [
        {"step": step, **about, **values}
        for step in range(3)
        for values in ({"loss": float(step), "of/rank": 0}, {"lr": 0.5})
    ]
    assert columns == ["loss", "lr", "of/rank", "time_s"]
    assert losses == {0: 0.0, 1: 1.0, 2: 2.0}
    assert has_times


def test_metrics_of_a_job_that_failed_are_kept(shared: Kernel) -> None:
    shared.run(
        TRAIN + "def fail():\n    train()\n    raise ValueError\nnotebook_launcher(fail, num_processes=2)",
        raises="ValueError",
    )
    assert shared.run("len(nblaunch.last_job().metrics)").result == "6"
