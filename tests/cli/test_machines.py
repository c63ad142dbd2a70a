"""``nblaunch launch`` on several machines, which here are two launchers on the loopback interface."""

from __future__ import annotations

from collections.abc import Callable

from tests.benchmarks.bench import free_port
from tests.cli.conftest import Running, labelled, script


def test_the_processes_of_two_machines_are_one_job(start: Callable[..., Running]) -> None:
    name = script("""
        import os
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        print(*(os.environ[name] for name in names))
    """)
    meeting = [
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        str(free_port()),
        "--dashboard",
        "none",
    ]
    shared = ["--num_machines", "2", "--num_processes", "4", *meeting]
    machines = [start(*shared, "--machine_rank", str(rank), name) for rank in range(2)]
    ended = [machine.end() for machine in machines]
    assert [one.code for one in ended] == [0, 0], ended
    assert labelled(ended[0].lines, 0) == ["0 0 0 4 2"]
    assert labelled(ended[0].lines, 1) == ["1 1 0 4 2"]
    assert labelled(ended[1].lines, 2) == ["2 0 1 4 2"]
    assert labelled(ended[1].lines, 3) == ["3 1 1 4 2"]


def test_a_machine_that_does_not_come_is_named(start: Callable[..., Running]) -> None:
    name = script("raise AssertionError('must not run')\n")
    meeting = [
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        str(free_port()),
        "--rdzv_timeout_s",
        "3",
    ]
    ended = start("--num_machines", "2", *meeting, "--dashboard", "none", name).end()
    assert ended.code == 2
    assert "node 1 did not come" in ended.out.splitlines()[-1]
