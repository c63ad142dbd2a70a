"""Processes outside the job: nothing that they send is unpickled, and no other machine can reach the job's sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

CELL = """
import os
from contextlib import suppress
import nblaunch
from nblaunch import Accelerator, context, notebook_launcher

class Crime:
    def __init__(self, witness):
        self.witness = witness
    def __reduce__(self):
        return os.mkdir, (self.witness,)

def meet(witness):
    accelerator = Accelerator()
    ranks = accelerator.gather_object([accelerator.process_index])
    if accelerator.process_index == 1:
        context.current().key = b""  # all that a stranger would not have
        with suppress(Exception):  # to pickle, the signature before what rank 0 sends may mean anything
            accelerator.gather_object([Crime(witness)])
    else:
        accelerator.gather_object([ranks])

def launch(witness, start_method):
    settings = dict(backend="cpu", dashboard="none", start_method=start_method)
    try:
        return notebook_launcher(meet, (witness,), 2, **settings)
    except Exception as error:
        return type(error).__name__, str(error)
"""


def test_foreign_objects_are_rejected(shared: Kernel, tmp_path: Path) -> None:
    shared.run(CELL)
    for start_method in ("fork", "spawn"):
        witness = tmp_path / start_method
        name, text = shared.run(f"launch({str(witness)!r}, {start_method!r})").value
        assert (name, "does not carry the signature of this job" in text) == ("ValueError", True)
        assert not witness.exists()


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_nothing_listens_beyond_the_loopback_interface(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
import psutil
def train():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    me = psutil.Process()
    addresses = [c.laddr.ip for process in (me, psutil.Process({shared.pid}), me.parent())
                 for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    dist.barrier()
    return addresses
# Kernels of users listen on TCP by themselves; this one of the tests uses Unix sockets.
sum(notebook_launcher(train, (), 2, start_method={method!r}, return_all=True), [])
"""
    )
    assert set(cell.value) == {"127.0.0.1"}
