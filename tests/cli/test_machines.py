"""``nblaunch launch`` on several machines, simulated by two launchers on the loopback interface."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.benchmarks.bench import free_port
from tests.cli.conftest import Running, labelled, script
from tests.thorough import thorough


def meeting_here() -> list[str]:
    """Return options for machines that meet at a port of this machine."""
    place = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    return [*place, "--dashboard", "none"]


def test_the_processes_of_two_machines_are_one_job(start: Callable[..., Running]) -> None:
    name = script("""
        import os
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        print(*(os.environ[name] for name in names))
    """)
    meeting = meeting_here()
    shared = ["--num_machines", "2", "--num_processes", "4", *meeting]
    machines = [start(*shared, "--machine_rank", str(rank), name) for rank in range(2)]
    ended = [machine.end() for machine in machines]
    assert [one.code for one in ended] == [0, 0], ended
    assert labelled(ended[0].lines, 0) == ["0 0 0 4 2"]
    assert labelled(ended[0].lines, 1) == ["1 1 0 4 2"]
    assert labelled(ended[1].lines, 2) == ["2 0 1 4 2"]
    assert labelled(ended[1].lines, 3) == ["3 1 1 4 2"]


def test_an_absent_machine_is_named(start: Callable[..., Running]) -> None:
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
    assert "node 1 did not join" in ended.out.splitlines()[-1]


@pytest.mark.parametrize(
    "others",
    [
        thorough(["--num_processes", "3", "--num_machines", "3"], id="number"),
        pytest.param(["--num_machines", "2", "--rdzv_backend", "c10d"], id="backend"),
    ],
)
def test_different_settings_of_machines_are_reported_at_once(
    start: Callable[..., Running], others: list[str]
) -> None:
    """Otherwise they would wait for each other until the timeout, ten minutes by default."""
    name = script("raise AssertionError('must not run')\n")
    meeting = meeting_here()
    first = start("--num_machines", "2", *meeting, name)
    first.wait_for("waiting at", 1)
    ended = [start(*others, *meeting, "--machine_rank", "1", name).end(), first.end()]
    assert [one.code for one in ended] == [2, 2], ended
    for one in ended:
        assert "on all nodes" in one.out.splitlines()[-1], one.out
    assert f"{others[2].strip('-')}={others[3]}" in ended[1].out


def test_a_machine_can_start_alone_after_a_timeout(
    start: Callable[..., Running],
) -> None:
    name = script("import os\nprint('of', os.environ['WORLD_SIZE'])\n")
    meeting = ["--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--rdzv_timeout_s", "4", "--dashboard", "none"]
    machines = ["--num_machines", "1:2", "--rdzv_backend", "c10d", "--num_processes", "2"]
    ended = start(*machines, *meeting, name).end()
    assert ended.code == 0, ended.out
    assert "of 1" in ended.out


@pytest.mark.thorough
def test_a_failure_with_a_huge_message_is_reported_on_the_other_machine(
    start: Callable[..., Running],
) -> None:
    """The store between them rejects so large an exception."""
    name = script("""
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("too long" * 2_000_000)
        print("waits", flush=True)
        time.sleep(60)
    """)
    meeting = meeting_here()
    shared = ["--num_machines", "2", "--num_processes", "2", *meeting]
    machines = [start(*shared, "--machine_rank", str(rank), name) for rank in range(2)]
    ended = [machine.end() for machine in machines]
    assert [one.code for one in ended] == [1, 1], ended
    for one in ended:
        assert "ValueError: too long" in one.out
        assert "characters omitted" in one.out
        assert "has sent no heartbeat" not in one.out
