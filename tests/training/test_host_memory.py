"""The line about the host memory of a job: whose memory it is."""

from __future__ import annotations

from nblaunch.training.host_memory import JobHostMemory, describe_host_memory


def test_the_line_says_whose_memory_it_is_since_the_table_has_the_workers_alone() -> None:
    usage = JobHostMemory(
        num_workers=2, total_bytes=622_000_000, has_launcher=True, model_bytes=40_000, device_bytes=80_000,
        is_built_in_workers=False,
    )  # fmt: skip
    assert describe_host_memory(usage).startswith(
        "2 workers and the launching process, host memory 622 MB (model 40.0 kB held once), besides 80.0 kB "
    )
