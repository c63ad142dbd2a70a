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
        print("total", int(total), flush=True)
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
def unused_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize("method", ["spawn", thorough("fork")])
@pytest.mark.parametrize("way", ["tcp", "env", "file"])
def test_ranks_meet_at_an_address_of_the_script(
    way: str, method: str, unused_port: int, tmp_path: Path
) -> None:
    url = {"tcp": f"tcp://localhost:{unused_port}", "env": "env://", "file": f"file://{tmp_path}/store"}[way]
    address = ADDRESS.format(port=unused_port) if way == "env" else "pass"
    name = script(f"""
        import os
        import torch
        import torch.distributed as dist
        {address}
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method={url!r}, rank=rank, world_size=world_size)
        total = torch.ones(1)
        dist.all_reduce(total)
        print("total", int(total), os.environ["TORCHELASTIC_USE_AGENT_STORE"])
        dist.destroy_process_group()
    """)
    ended = launch("--num_processes", "2", "--start_method", method, name, timeout=90)
    assert ended.code == 0, ended.err
    assert sorted(ended.lines) == ["[0] total 2 True", "[1] total 2 True"]


@pytest.mark.parametrize("call", ["spawn", "start_processes"])
@pytest.mark.parametrize("has_address", [True, False])
def test_one_process_may_spawn_its_ranks(call: str, has_address: bool, unused_port: int) -> None:
    address = ADDRESS.format(port=unused_port) if has_address else "pass"
    ended = launch("--num_processes", "1", script(SPAWNS.format(address=address, call=call)), timeout=90)
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
    ended = launch("--num_processes", "2", name, timeout=90)
    assert ended.code == 0, ended.err
    assert sorted(ended.lines) == ["[0] total 2", "[1] total 2"]


def test_ranks_that_spawn_ranks_fail_at_once(unused_port: int) -> None:
    """Both groups need the same port, so the second one fails while the first one still runs."""
    meeting = ADDRESS.format(port=unused_port)
    waiting = "\n        ".join(["while not os.path.exists('failed'):", "    __import__('time').sleep(0.01)"])
    text = SPAWNS.format(address=meeting, call="spawn").replace("dist.destroy_process_group()", waiting)
    name = script(text.replace("mp.spawn(run, args=(2,), nprocs=2)", CATCHING))
    ended = launch("--num_processes", "2", name, timeout=90)
    assert ended.code == 1
    assert "nblaunch has already started one process per rank" in ended.err
    assert "num_processes=1" in ended.err
