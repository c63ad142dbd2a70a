"""Launches on two machines, each with its own launching process: network namespaces with a cable, if possible."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.nodes.machines import LIMIT_S, Launch, Pair
from tests.thorough import thorough

Settings = dict[str, Any]

# Time until the loss of a machine is reported on a busy computer: two seconds of silence, and some to stop workers.
SOON_S = 60.0


def rows(launch: Launch) -> dict[int, str]:
    """Return rank -> its state in the final table."""
    found = re.findall(r"^ *(\d+)  (done|failed|stopped|killed)\b", launch.output, re.MULTILINE)
    return {int(rank): state for rank, state in found}


def error_of(outcome: dict[str, Any]) -> str:
    return f"{outcome['error']}: {outcome['message']}\n" + "\n".join(outcome["notes"])


def let_return(launch: Launch, request: Path) -> None:
    """Make the machine's rank return, and wait for the end of all its processes except the agent."""
    agent = launch.agent()
    others = [process for process in launch.descendants() if process != agent]
    request.touch()
    assert psutil.wait_procs(others, SOON_S)[1] == []


# --- what works --------------------------------------------------------------------------------------------------


def test_two_machines_train_together(pair: Pair, static: Settings) -> None:
    """Two workers are forked on one machine, and one starts from a clean process on the other: the weights are
    equal everywhere.
    """
    launches = [
        pair[0].start("train", 20, num_processes=2, **static),
        pair[1].start("train", 20, start_method="forkserver", **static),
    ]
    outcomes = [launch.result() for launch in launches]
    values = [value for outcome in outcomes for value in outcome["value"]]
    assert [value["place"] for value in values] == [[0, 0, 0, 3], [1, 1, 0, 3], [2, 0, 1, 3]]
    assert [value["sizes"] for value in values] == [[2, 2], [2, 2], [1, 2]]
    assert [value["restart_count"] for value in values] == ["0"] * 3
    assert {str(value["weights"]) for value in values} == {str(outcome["model"]) for outcome in outcomes}
    for launch in launches:
        assert "train: done in" in launch.output
        assert "ranks 0-2 alike" in launch.output, "of both machines"
    # On both machines, the means of the epoch include all ranks.
    here, there = (
        re.findall(r"^ *epoch .*training loss.*\n *1 +(\d\S+)", launch.output, re.MULTILINE)
        for launch in launches
    )
    assert here == there
    assert len(here) == 1
    if pair.has_cable:
        assert {value["interface"] for value in values} == {"cable"}
        own = {"014DC90A", "024DC90A"}  # 10.201.77.1 and .2 in the system's notation
        assert {where.partition(":")[0] for value in values for where in value["listens"]} <= own
        assert values[0]["listens"]
    pair.wait_until_empty()


@pytest.mark.parametrize(("backend", "victim"), [("c10d", 1), thorough("static", 0)])
def test_a_job_goes_on_from_its_checkpoint_when_a_machine_comes_back(
    pair: Pair, c10d: Settings, static: Settings, tmp_path: Path, backend: str, victim: int
) -> None:
    """This also holds if that machine hosts the rendezvous."""
    settings = {**(c10d if backend == "c10d" else static), "max_restarts": 2}
    launches = [pair[rank].start("resume", 30, str(tmp_path), **settings) for rank in range(2)]
    survivor = launches[1 - victim]
    survivor.wait_for("saved step 5")
    launches[victim].kill(whole_machine=True)
    # A machine that comes back at once is a change of members, and need not be reported as lost.
    survivor.wait_for(f"rank {victim} was lost: node {victim} (host ")
    launches[victim] = pair[victim].start("resume", 30, str(tmp_path), **settings)
    outcomes = [launch.result() for launch in launches]
    (first,), (second,) = (outcome["value"] for outcome in outcomes)
    assert first["first"] == second["first"] >= 5
    assert first["ranks"] == 2
    assert first["weights"] == second["weights"] == outcomes[0]["model"] == outcomes[1]["model"]
    assert "restart 1" in survivor.output
    pair.wait_until_empty()


def test_a_failure_on_one_machine_restarts_all(pair: Pair, static: Settings) -> None:
    launches = [pair[rank].start("fail_once", max_restarts=1, **static) for rank in range(2)]
    assert [launch.result()["value"] for launch in launches] == [[2], [2]]
    assert "attempt 0: rank 1 raised LookupError: for the first time (on node 1 (host " in launches[0].output
    assert "attempt 0: rank 1 raised LookupError: for the first time\n" in launches[1].output


@pytest.mark.thorough
def test_returned_machines_restart_with_the_others(pair: Pair, static: Settings) -> None:
    launches = [pair[rank].start("fail_late_once", max_restarts=1, **static) for rank in range(2)]
    assert [launch.result()["value"] for launch in launches] == [[[2, 1]], [[2, 1]]]


@pytest.mark.thorough
def test_machines_without_restarts_are_not_awaited(pair: Pair, static: Settings) -> None:
    """The other machine has restarts left, because restarts for a change of machines are not counted."""
    launches = [
        pair[rank].start("fail_on_node_1", "raise", max_restarts=2 - 2 * rank, **static) for rank in range(2)
    ]
    for launch, limit_s in zip(launches[::-1], (LIMIT_S, SOON_S), strict=True):
        assert error_of(launch.result(limit_s)).startswith("LookupError: no such sample")


@pytest.mark.parametrize(("num_nodes", "last_call_s"), [("1:2", 1), ("1:3", 5)], ids=["full", "open"])
@pytest.mark.thorough
def test_a_machine_may_join_later(pair: Pair, c10d: Settings, num_nodes: str, last_call_s: int) -> None:
    """If more machines may join, all wait until the end of the last call."""
    conf = {**c10d["rdzv_conf"], "last_call_timeout": last_call_s}
    settings = {**c10d, "num_nodes": num_nodes, "rdzv_conf": conf}
    one = pair[0].start("step_on", 10_000, **settings)
    one.wait_for("on 1 ranks")
    other = pair[1].start("step_on", 10_000, **settings)
    one.wait_for("all workers restart")
    one.wait_for("on 2 ranks")
    other.wait_for("on 2 ranks")
    os.kill(one.process.pid, signal.SIGINT)
    assert one.result()["error"] == "KeyboardInterrupt"
    assert other.result()["error"] == "NodeLost"


def test_all_ranks_of_both_stop_at_the_same_step(pair: Pair, static: Settings) -> None:
    """The request may go to either machine; here it goes to the one that follows."""
    launches = [
        pair[rank].start("go_on_until_stopped", num_processes=2, background=True, dashboard="text", **static)
        for rank in range(2)
    ]
    for launch in launches:
        launch.wait_for("can be stopped")
        launch.wait_for("step 10")
    os.kill(launches[1].process.pid, signal.SIGUSR1)
    steps = [step for launch in launches for step in launch.result(SOON_S)["value"]]
    for launch in launches:  # ranks that run for some seconds are certain to be measured
        assert "ranks 0-3 alike" in launch.output, launch.output
        assert re.search(r"peak memory: [\d.]+ MB", launch.output), launch.output
    assert len(steps) == 4
    assert len(set(steps)) == 1
    assert steps[0] > 10


@pytest.mark.thorough
def test_sigterm_leaves_time_to_save(pair: Pair, static: Settings) -> None:
    launches = [pair[rank].start("save_when_stopped", background=True, **static) for rank in range(2)]
    for launch in launches:
        launch.wait_for("can be stopped")
        launch.wait_for("step 10")
    for launch in launches:
        os.kill(launch.process.pid, signal.SIGTERM)
    here, there = (launch.result()["value"] for launch in launches)
    assert here == there


@pytest.mark.parametrize(
    ("asked", "signum"),
    [(1, signal.SIGUSR1), thorough(1, signal.SIGTERM), thorough(0, signal.SIGUSR1)],
    ids=["stop", "SIGTERM", "stop of the first"],
)
def test_ranks_stop_together_after_first_machine_returned(
    pair: Pair, static: Settings, tmp_path: Path, asked: int, signum: signal.Signals
) -> None:
    request = tmp_path / "return"
    launches = [
        pair[rank].start(
            "go_on_without_node_0", str(request), num_processes=1 + rank, background=True, **static
        )
        for rank in range(2)
    ]
    launches[1].wait_for("step 10")
    launches[asked].wait_for("can be stopped")
    let_return(launches[0], request)
    os.kill(launches[asked].process.pid, signum)
    steps = launches[1].result()["value"]
    assert len(set(steps)) == 1
    assert steps[0] > 10
    assert launches[0].result()["value"] == [0]


@pytest.mark.thorough
def test_an_early_stop_stops_both(pair: Pair, static: Settings) -> None:
    first = pair[0].start("go_on_until_stopped", background=True, **static)
    first.wait_for("can be stopped")
    os.kill(first.process.pid, signal.SIGUSR1)
    second = pair[1].start("go_on_until_stopped", background=True, **static)
    here, there = (launch.result()["value"] for launch in (first, second))
    assert here == there


def test_foreign_pickles_on_the_rendezvous_are_not_read(pair: Pair, static: Settings, tmp_path: Path) -> None:
    """Another process on the network writes them; the job warns and continues."""
    launches = [
        pair[rank].start("go_on_until_stopped", background=True, dashboard="text", **static)
        for rank in range(2)
    ]
    for launch in launches:
        launch.wait_for("step 10")
    pair[1].start("attack", pair[0].address, 29500, str(tmp_path / "witness")).result()
    for launch in launches:
        launch.wait_for(
            "the heartbeat of 'the attacker' at the rendezvous was not written by a node of this job"
        )
    os.kill(launches[1].process.pid, signal.SIGUSR1)
    assert len({launch.result(SOON_S)["value"][0] for launch in launches}) == 1
    assert not (tmp_path / "witness").exists()


@pytest.mark.thorough
def test_pickles_replacing_torchs_are_not_read(pair: Pair, c10d: Settings, tmp_path: Path) -> None:
    """They destroy the rendezvous, and the job reports that."""
    launches = [pair[rank].start("step_on", 10_000, **c10d) for rank in range(2)]
    for launch in launches:
        launch.wait_for("on 2 ranks")
    pair[1].start("attack", pair[0].address, 29400, str(tmp_path / "witness")).result()
    outcomes = [launch.result(SOON_S) for launch in launches]
    assert any("was not written by a node of this job" in error_of(outcome) for outcome in outcomes)
    assert not (tmp_path / "witness").exists()


# --- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("raise", "LookupError: no such sample"),
        thorough("kill", "WorkerDied: rank 1 was killed by SIGKILL"),
    ],
)
def test_remote_failures_are_raised_unchanged(pair: Pair, static: Settings, kind: str, error: str) -> None:
    launches = [pair[rank].start("fail_on_node_1", kind, **static) for rank in range(2)]
    here, there = (launch.result() for launch in launches)
    assert error_of(here).startswith(error)
    assert "on node 1 (host " in error_of(here)
    assert there["error"] == here["error"]
    assert "complete log: " in error_of(there)
    pair.wait_until_empty()


@pytest.mark.parametrize(
    ("victim", "whole_machine"),
    [thorough(1, False), (1, True), thorough(0, True)],
    ids=["launcher", "machine", "host"],
)
def test_a_death_is_named_on_the_other_machine(
    pair: Pair, static: Settings, victim: int, whole_machine: bool
) -> None:
    launches = [pair[rank].start("step_on", 10_000, **static) for rank in range(2)]
    survivor = launches[1 - victim]
    survivor.wait_for("step 10 ")
    launches[victim].kill(whole_machine=whole_machine)
    outcome = survivor.result(SOON_S)
    assert re.match(
        rf"NodeLost: node {victim} \(host \S+, rank {victim}\) (has sent no heartbeat for \d+ s|ended: its launching)",
        error_of(outcome),
    )
    assert rows(survivor)[victim] == "failed"
    pair.wait_until_empty()


def test_an_interrupt_is_reported_on_the_other_machine(pair: Pair, static: Settings) -> None:
    launches = [pair[rank].start("step_on", 10_000, **static) for rank in range(2)]
    launches[0].wait_for("step 10 ")
    launches[1].wait_for("step 10 ")
    os.kill(launches[1].process.pid, signal.SIGINT)
    assert launches[1].result(SOON_S)["error"] == "KeyboardInterrupt"
    assert re.match(
        r"NodeLost: node 1 \(host \S+, rank 1\) was interrupted", error_of(launches[0].result(SOON_S))
    )


@pytest.mark.parametrize("is_whole_on_each", [True, thorough(False)])
def test_interrupt_keeps_weights_if_a_machine_holds_all(
    pair: Pair, static: Settings, is_whole_on_each: bool
) -> None:
    launches = [
        pair[rank].start("train_shards", is_whole_on_each, num_processes=2, **static) for rank in range(2)
    ]
    here, there = [launch.result() for launch in launches]
    assert (here["error"], there["error"]) == ("NodeLost", "KeyboardInterrupt")
    assert re.match(r"NodeLost: node 1 \(host \S+, ranks 2 and 3\) was interrupted", error_of(here))
    found = re.search(r"interrupted after optimizer step (\d+): (.*)", launches[1].output)
    assert found, launches[1].output
    steps = int(found[1]) if is_whole_on_each else 0
    what = (
        "copied the weights of that step"
        if is_whole_on_each
        else "8 elements of weight are on other machines"
    )
    assert what in found[2]
    torch.manual_seed(0)  # the same as in the launching process
    expected = torch.nn.Linear(4, 2).weight.detach() + steps
    assert torch.allclose(torch.tensor(there["model"][0]), expected, atol=1e-5)
    pair.wait_until_empty()


@pytest.mark.thorough
def test_handled_interrupts_lose_nothing(pair: Pair, static: Settings) -> None:
    """The same holds for the function on the other machine, which is stopped because of the first."""
    launches = [pair[rank].start("handle_interrupt", **static) for rank in range(2)]
    for rank in range(2):
        launches[rank].wait_for("ready")
    os.kill(launches[1].process.pid, signal.SIGINT)
    outcomes = [launch.result(SOON_S) for launch in launches]
    assert outcomes[1]["error"] == "KeyboardInterrupt"
    assert [outcome["kept"] for outcome in outcomes] == [[10], [11]]
    assert [outcome["model"] for outcome in outcomes] == [[[[7.0] * 4] * 2, [7.0] * 2]] * 2


@pytest.fixture
def uneven(pair: Pair, static: Settings, tmp_path: Path) -> list[Launch]:
    """Start a job in which the rank of machine 0 has returned and the rank of machine 1 has not."""
    launches = [pair[rank].start("return_on_request", str(tmp_path), **static) for rank in range(2)]
    for launch in launches:
        launch.wait_for("ready")
    let_return(launches[0], tmp_path / "0")
    return launches


@pytest.mark.thorough
def test_returned_machines_wait_until_interrupted(uneven: list[Launch]) -> None:
    """Its value is kept; on the other machine, the job ends as after any interrupt."""
    os.kill(uneven[0].process.pid, signal.SIGINT)
    outcome = uneven[0].result(SOON_S)
    assert (outcome["error"], outcome["kept"]) == ("KeyboardInterrupt", [10])
    assert uneven[1].result(SOON_S)["error"] == "NodeLost"


@pytest.mark.thorough
def test_a_machine_that_returned_does_not_wait_for_a_dead_one(uneven: list[Launch]) -> None:
    uneven[1].kill(whole_machine=True)
    assert uneven[0].result(SOON_S)["value"] == [10]


def test_an_agent_that_is_killed_ends_the_job(pair: Pair, static: Settings) -> None:
    launches = [pair[rank].start("step_on", 10_000, **static) for rank in range(2)]
    launches[1].wait_for("step 10 ")
    launches[1].agent().kill()
    outcomes = [launch.result(SOON_S) for launch in launches]
    assert error_of(outcomes[1]).startswith("NodeLost: this node's agent has died; its log: ")
    assert "has sent no heartbeat" not in launches[1].output
    assert outcomes[0]["error"] == "NodeLost"
    pair.wait_until_empty()


# --- the cable ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cable(pair: Pair) -> Pair:
    if not pair.has_cable:
        pytest.skip("only root can make network namespaces, and the loopback has no cable to pull")
    return pair


def test_a_short_network_cut_is_survived(cable: Pair, static: Settings) -> None:
    settings = {**static, "rdzv_conf": {"keep_alive_interval": 2, "keep_alive_max_attempt": 100}}
    launches = [cable[rank].start("step_on", 60, **settings) for rank in range(2)]
    launches[0].wait_for("step 10 ")
    cable.cut()
    for rank, launch in enumerate(launches):
        launch.wait_for(f"node {1 - rank} (host ")
        assert re.search(r"has sent no heartbeat for \d+ s", launch.output)
    cable.mend()
    for launch in launches:
        assert launch.result()["value"] == [2]
        assert "is sending heartbeats again after" in launch.output


@pytest.mark.thorough
def test_a_long_network_cut_ends_the_job(cable: Pair, static: Settings) -> None:
    launches = [cable[rank].start("step_on", 10_000, **static) for rank in range(2)]
    launches[0].wait_for("step 10 ")
    cable.cut()
    for rank, launch in enumerate(launches):
        text = error_of(launch.result(2 * SOON_S))
        assert re.match(
            rf"NodeLost: node {1 - rank} \(host \S+, rank \d\) has sent no heartbeat for \d+ s", text
        )
    cable.wait_until_empty()


# --- not finding each other --------------------------------------------------------------------------------------


def test_missing_nodes_are_named(pair: Pair, static: Settings, c10d: Settings) -> None:
    """Three jobs that miss a node, at the same time."""
    short = {"rdzv_timeout_s": 3}
    waiting = pair[0].start("train", 1, **{**static, **short})
    flocking = pair[0].start("train", 1, **{**c10d, **short})
    searching = pair[1].start("train", 1, use_port=29700, **{**static, **short})
    address = re.escape(pair[0].address)
    for launch, expected in (
        (
            waiting,
            rf"at {address}:29500 within 3 s: node 1 did not join; joined \(1 of 2\): node 0 \(host .*\)",
        ),
        (
            flocking,
            rf"at {address}:29400 within 3 s: 1 more must join; joined \(1 of 2\): node 0 \(host .*\)",
        ),
        (searching, rf"node 1 can't reach the rendezvous at {address}:29700 \(3 s\): node 0 is missing"),
    ):
        text = error_of(launch.result())
        assert text.startswith("LaunchError")
        assert re.search(expected, text)
    pair.wait_until_empty()


@pytest.mark.thorough
def test_machines_lost_during_a_wait_are_named(pair: Pair, static: Settings) -> None:
    settings = {
        **static,
        "num_nodes": 3,
        "rdzv_timeout_s": 2 * LIMIT_S,
        "rdzv_conf": {"keep_alive_interval": 5},
    }
    one, other = (pair[rank].start("train", 1, **settings) for rank in range(2))
    one.wait_for("joined: node 0 (this one), node 1 (host ")
    other.agent().kill()
    one.wait_for("joined: node 0 (this one); no longer there: node 1 (host ")
    other.result()
    again = pair[1].start("train", 1, **settings)
    again.wait_for("joined: node 0 (host ")


@pytest.mark.thorough
def test_duplicate_machine_ranks_are_rejected(pair: Pair, static: Settings) -> None:
    launches = [pair[rank].start("step_on", 10_000, **static) for rank in range(2)]
    launches[1].wait_for("step 10 ")
    outcome = pair[1].start("step_on", 10_000, **static).result()
    assert outcome["error"] == "LaunchError"
    assert re.match(r"node_rank=1 is already used by a node on host \S+", outcome["message"])
    assert "restart" not in launches[0].output  # the job does not notice
    os.kill(launches[0].process.pid, signal.SIGINT)
    assert launches[1].result(SOON_S)["error"] == "NodeLost"


def test_invalid_calls_are_rejected_at_once(pair: Pair, static: Settings) -> None:
    holder = pair[0].start("train", 1, **static)
    holder.wait_for("waiting at ")
    taken = pair[0].start("train", 1, **static)
    foreign = pair[0].start("train", 1, **{**static, "master_addr": "192.0.2.200"})
    unknown = pair[1].start("train", 1, **{**static, "master_addr": "no-such-host.invalid"})
    for launch, expected in (
        (taken, r"port 29500 on \S+ is in use by another process; choose another .* use_port"),
        (foreign, r"192\.0\.2\.200 is not an address of this machine \(.*127\.0\.0\.1"),
        (unknown, r"can't resolve the host 'no-such-host\.invalid'"),
    ):
        outcome = launch.result()
        assert outcome["error"] == "LaunchError"
        assert re.search(expected, outcome["message"])
        assert "waiting at" not in launch.output
    os.kill(holder.process.pid, signal.SIGINT)  # while the launch waits
    assert holder.result()["error"] == "KeyboardInterrupt"
    pair.wait_until_empty()
