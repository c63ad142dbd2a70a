"""Launched scripts that start ranks of their own, as ``python script.py`` would run them."""

from __future__ import annotations

import socket

import pytest

from tests.cli.conftest import launch, script

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


@pytest.fixture
def unused_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize("call", ["spawn", "start_processes"])
@pytest.mark.parametrize("has_address", [True, False])
def test_one_process_may_spawn_its_ranks(call: str, has_address: bool, unused_port: int) -> None:
    address = ADDRESS.format(port=unused_port) if has_address else "pass"
    ended = launch("--num_processes", "1", script(SPAWNS.format(address=address, call=call)), timeout=90)
    assert ended.code == 0, ended.err
    assert ended.lines == ["total 2"] * 2


def test_ranks_that_spawn_ranks_fail_at_once(unused_port: int) -> None:
    """They would all join as ranks 0 and 1, and wait for each other."""
    name = script(SPAWNS.format(address=ADDRESS.format(port=unused_port), call="spawn"))
    ended = launch("--num_processes", "2", name, timeout=90)
    assert ended.code == 1
    assert "nblaunch has already started one process per rank" in ended.err
    assert "num_processes=1" in ended.err
