"""Many nodes with simulated ranks: their messages, and many simultaneous failures."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from nblaunch.engines.collectives import sharing
from nblaunch.wire.collective_calls import REGION_BYTES, CallReader, CallWriter, Group, RankCalls, WrittenSite
from tests.engines.simulated_nodes import Play, Played
from tests.kernels import Kernel

NUM_NODES = 64


def launch_of(play: Play) -> str:
    return f"""
from nblaunch.engines import runner
from tests.engines import simulated_nodes
from tests.engines.simulated_nodes import Play
runner.find = simulated_nodes.engine({play!r})
launch(time.sleep, 1, num_nodes={play.num_nodes}, num_processes={play.num_nodes * play.ranks_per_node})
"""


def test_many_nodes_send_few_messages_and_fail_together(notebook: Kernel, tmp_path: Path) -> None:
    play = Play(NUM_NODES, ranks_per_node=2, seconds=4.0, result_path=str(tmp_path / "played.json"))
    cell = notebook.submit(launch_of(play)).wait()
    assert cell.error is not None, cell.describe()
    assert cell.error.name == "ValueError", cell.describe()
    assert cell.error.value == "the loss is zero, which it can't be"
    played = Played(**json.loads(Path(play.result_path).read_text()))
    assert 0 < played.messages <= NUM_NODES * (2 * play.seconds + 2)


def calls_of(num_calls: int, *, differs_at: int = -1) -> RankCalls:
    memory = memoryview(bytearray(REGION_BYTES))
    writer, reader = CallWriter(memory), CallReader(memory)
    writer.add_group(Group(tuple(range(512)), 0, True))
    for number in range(1, num_calls + 1):
        site = WrittenSite("all_reduce", 0, "float32", 1, 1, "SUM", -1, "step", "train.py", 1)
        writer.put(site, number, chain=number + 1000 * (number == differs_at), size=8)
    return reader.read()


def test_calls_of_ranks_that_agree_are_sent_once() -> None:
    calls = {rank: calls_of(300) for rank in range(8)}
    alone = len(pickle.dumps({0: calls[0]}))
    shared = sharing(calls)
    assert len(pickle.dumps(shared)) < 2 * alone < len(pickle.dumps(calls))
    assert [one.last for one in shared.values()] == [one.last for one in calls.values()], "their times, too"


def test_calls_that_differ_are_kept_as_they_are() -> None:
    calls = {rank: calls_of(40 + rank, differs_at=30 if rank == 2 else -1) for rank in range(4)}
    shared = sharing(calls)
    for rank, rank_calls in calls.items():
        there = [(call.serial, call.chain, call.site) for call in shared[rank].calls]
        assert there == [(call.serial, call.chain, call.site) for call in rank_calls.calls]
