"""Launched scripts whose ranks form a group at their own address, and scripts that start ranks themselves."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.conftest import launch, script
from tests.thorough import thorough

SPAWNS = """
    import os
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def run(rank, world_size):
        {address}
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        total = torch.ones(1)
        dist.all_reduce(total)
        print("total %d\\n" % total.item(), end="", flush=True)  # one write, because ranks share the stream
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.{call}(run, args=(2,), nprocs=2)
"""
ADDRESS = "os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'] = 'localhost', '{port}'"
CATCHING = """try:
            mp.spawn(run, args=(2,), nprocs=2)
        except mp.ProcessRaisedException:
            open("failed", "w").close()
            raise"""


@pytest.fixture
def unused_ports() -> list[int]:
    """Return two ports that are free now."""
    with socket.socket() as one, socket.socket() as other:
        for listener in (one, other):
            listener.bind(("localhost", 0))
        return [listener.getsockname()[1] for listener in (one, other)]


@pytest.mark.parametrize("method", ["spawn", thorough("fork")])
@pytest.mark.parametrize("first", ["env", thorough("tcp"), thorough("file")])
def test_ranks_meet_at_addresses_of_the_script(
    first: str, method: str, unused_ports: list[int], tmp_path: Path
) -> None:
    """They form one group after the other, at another kind of address each time."""
    urls = {"tcp": f"tcp://localhost:{unused_ports[1]}", "env": "env://", "file": f"file://{tmp_path}/store"}
    name = script(f"""
        import os
        import torch
        import torch.distributed as dist
        {ADDRESS.format(port=unused_ports[0])}
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for url in {sorted(urls.values(), key=lambda url: not url.startswith(first))}:
            dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
            total = torch.ones(1)
            dist.all_reduce(total)
            print(url[:3], int(total), os.environ["TORCHELASTIC_USE_AGENT_STORE"])
            dist.destroy_process_group()
    """)
    ended = launch("--num_processes", "2", "--start_method", method, name)
    assert ended.code == 0, ended.err
    met = [f"[{rank}] {url[:3]} 2 True" for rank in range(2) for url in sorted(urls.values())]
    assert sorted(ended.lines) == met


@pytest.mark.parametrize(
    ("call", "has_address"),
    [
        ("spawn", True),
        ("start_processes", False),
        thorough("spawn", False),
        thorough("start_processes", True),
    ],
)
def test_one_process_may_spawn_its_ranks(call: str, has_address: bool, unused_ports: list[int]) -> None:
    address = ADDRESS.format(port=unused_ports[0]) if has_address else "pass"
    ended = launch("--num_processes", "1", script(SPAWNS.format(address=address, call=call)))
    assert ended.code == 0, ended.err
    assert ended.lines == ["total 2"] * 2


def test_ranks_that_spawned_processes_still_meet() -> None:
    name = script("""
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as mp

        def read(index):
            pass

        if __name__ == "__main__":
            mp.spawn(read, nprocs=1)
            dist.init_process_group("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            print("total", int(total), flush=True)
            dist.destroy_process_group()
    """)
    ended = launch("--num_processes", "2", name)
    assert ended.code == 0, ended.err
    assert sorted(ended.lines) == ["[0] total 2", "[1] total 2"]


def test_ranks_that_spawn_ranks_fail_at_once(unused_ports: list[int]) -> None:
    """Both groups need the same port, so the second one fails while the first one still runs."""
    meeting = ADDRESS.format(port=unused_ports[0])
    waiting = "\n        ".join(["while not os.path.exists('failed'):", "    __import__('time').sleep(0.01)"])
    text = SPAWNS.format(address=meeting, call="spawn").replace("dist.destroy_process_group()", waiting)
    name = script(text.replace("mp.spawn(run, args=(2,), nprocs=2)", CATCHING))
    ended = launch("--num_processes", "2", name)
    assert ended.code == 1
    assert "nblaunch has already started one process per rank" in ended.err
    assert "num_processes=1" in ended.err
