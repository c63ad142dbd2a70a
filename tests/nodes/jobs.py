"""The program of the simulated machines: ``main({"job": ..., "args": [...], "settings": {...}})``.

It launches one of the functions below and prints ``OUTCOME`` and the outcome as JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import time
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import nblaunch
from nblaunch import Accelerator, notebook_launcher
from nblaunch.context import current


def listening() -> list[str]:
    """Return the listening addresses in this network namespace, as hexadecimal numbers."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return [fields[1] for fields in lines if fields[3] == "0A"]  # source: proc(5), TCP_LISTEN


def train(model: nn.Module, steps: int) -> dict[str, Any]:
    """Train for an epoch; every rank sees different data."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(steps * accelerator.num_processes), batch_size=1))
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(accelerator.process_index)
    listens = listening()
    for _ in loader:
        loss = wrapped(torch.randn(8, 4)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    topology = current().topology
    return {
        "weights": [parameter.detach().tolist() for parameter in model.parameters()],
        "place": [topology.rank, topology.local_rank, topology.node_rank, topology.world_size],
        "sizes": [topology.local_world_size, topology.num_nodes],
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
        "listens": listens,
        "restart_count": os.environ["TORCHELASTIC_RESTART_COUNT"],
    }


def step_on(model: nn.Module, steps: int, pause_s: float = 0.05) -> int:
    """Run one all_reduce per step, and print every tenth step. Return the number of ranks, counted by an all_reduce."""
    accelerator = Accelerator()
    for step in accelerator.progress(range(steps)):
        total = accelerator.reduce(torch.ones(()), "sum")
        if step % 10 == 0 and accelerator.is_local_main_process:
            print(f"step {step} of attempt {current().attempt} on {int(total)} ranks", flush=True)
        time.sleep(pause_s)
    return int(total)


def resume(model: nn.Module, steps: int, folder: str) -> dict[str, Any]:
    """Train, save the state every five steps, and begin at the last saved state."""
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    model, optimizer = accelerator.prepare(model, optimizer)
    done = Path(folder, "done")
    first = int(done.read_text()) if done.exists() else 0
    if first:
        accelerator.load_state(str(Path(folder, f"state_{first}")))
    accelerator.wait_for_everyone()
    print(f"begins at step {first}", flush=True)
    for step in range(first, steps):
        loss = model(torch.full((2, 4), float(step))).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 5 == 0:
            accelerator.save_state(str(Path(folder, f"state_{step + 1}")))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                done.write_text(str(step + 1))
            accelerator.wait_for_everyone()
            print(f"saved step {step + 1}", flush=True)
        time.sleep(0.05)
    weights = [parameter.detach().tolist() for parameter in model.parameters()]
    return {"first": first, "weights": weights, "ranks": accelerator.num_processes}


def go_on_until_stopped(model: nn.Module) -> int:
    """Take steps together with all ranks until all must stop; return the number of steps."""
    accelerator = Accelerator()
    step = 0
    while not accelerator.should_stop:
        accelerator.reduce(torch.ones(()))
        step += 1
        if step == 10:
            print("step 10", flush=True)
        time.sleep(0.02)
    return step


def save_when_stopped(model: nn.Module) -> int:
    """Continue on node 1 for some time after the last step."""
    step = go_on_until_stopped(model)
    if current().topology.node_rank == 1:
        time.sleep(2.0)
    return step


def go_on_without_node_0(model: nn.Module, request: str) -> int:
    """Return on node 0 when the file ``request`` exists; step on the other nodes until all must stop."""
    accelerator = Accelerator()
    step = 0
    if current().topology.node_rank == 0:
        while not Path(request).exists():
            time.sleep(0.02)
        return step
    while not accelerator.should_stop:
        step += 1
        if step == 10:
            print("step 10", flush=True)
        time.sleep(0.02)
    return step


def handle_interrupt(model: nn.Module) -> int:
    """Wait for an interrupt, and return with a trained model."""
    try:
        print("ready", flush=True)
        time.sleep(3600)
    except KeyboardInterrupt:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
    return current().topology.rank + 10


def train_shards(model: nn.Module, is_whole_on_each: bool) -> None:
    """Add 1 to all sharded weights in each step. The last rank interrupts its launcher in step 5.

    Args:
        is_whole_on_each: shard the model over the ranks of each machine; False = over the ranks of both.
    """
    accelerator = Accelerator()
    place = current().topology
    sizes = (place.num_nodes, place.local_world_size) if is_whole_on_each else (place.world_size,)
    names = ("machine", "rank")[-len(sizes) :]
    fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    for number in range(10**9):
        optimizer.zero_grad()
        (-model(torch.ones(4)).sum()).backward()
        if number == 4 and accelerator.is_last_process:
            time.sleep(0.2)  # meanwhile, the other rank of this machine takes its step
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.2)
        optimizer.step()


def return_on_request(model: nn.Module, folder: str) -> int:
    """Return when a file with this rank's number exists."""
    rank = current().topology.rank
    print("ready", flush=True)
    while not Path(folder, str(rank)).exists():
        time.sleep(0.02)
    return rank + 10


def fail_on_node_1(model: nn.Module, kind: str) -> None:
    """Fail on one rank while the others wait for it in a collective."""
    accelerator = Accelerator()
    accelerator.reduce(torch.ones(()))
    if current().topology.node_rank == 1:
        if kind == "raise":
            raise LookupError("no such sample")
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.reduce(torch.ones(()))


def fail_once(model: nn.Module) -> int:
    """Fail only on one rank of node 1, in the first attempt."""
    accelerator = Accelerator()
    if current().attempt == 0 and current().topology.node_rank == 1:
        raise LookupError("for the first time")
    return int(accelerator.reduce(torch.ones(()), "sum"))


def fail_late_once(model: nn.Module) -> list[int]:
    """In the first attempt, fail on node 1 some time after the rank of node 0 has returned."""
    total = int(Accelerator().reduce(torch.ones(()), "sum"))
    if current().attempt == 0 and current().topology.node_rank == 1:
        time.sleep(1.0)
        raise LookupError("for the first time")
    return [total, current().attempt]


class _Crime:
    """An object that leaves a trace wherever it is unpickled."""

    def __init__(self, witness: str) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.witness,)


def attack(host: str, port: int, witness: str) -> None:
    """Put pickles wherever nodes read, like another process that reaches the rendezvous of a job."""
    crime = pickle.dumps(_Crime(witness))
    store = TCPStore(host, port, None, False, wait_for_workers=False)
    num_nodes = store.add("none/num_nodes", 1)
    store.set(f"none/node/{num_nodes}", "the attacker")
    store.set("none/heartbeat/the attacker", crime)
    ids = [store.get(f"none/node/{number}").decode() for number in range(1, num_nodes)]
    with suppress(DistNetworkError):  # the job may end before that
        for _ in range(20):  # the nodes repeatedly write their own values
            for id in ids:
                store.set(f"none/heartbeat/{id}", crime)
            store.set("torch.rendezvous.none", b64encode(crime).decode())
            time.sleep(0.05)
    print("OUTCOME {}", flush=True)


def _wait(job: nblaunch.Job) -> Any:
    """Wait for the end of a background job; SIGUSR1 stops it early, SIGTERM acts as in a script."""
    signal.signal(signal.SIGUSR1, lambda signum, frame: job.stop())
    signal.signal(signal.SIGTERM, lambda signum, frame: job.requests.terminate(20.0))
    print("can be stopped", flush=True)
    return job.result()


def main(order: dict[str, Any]) -> None:
    if order["job"] == "attack":
        attack(*order["args"])
        return
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    outcome: dict[str, Any] = {}
    began_s = time.time()
    try:
        settings = {"num_processes": 1, "backend": "cpu", "return_all": True, **order["settings"]}
        value = notebook_launcher(globals()[order["job"]], (model, *order["args"]), **settings)
        outcome["value"] = _wait(value) if settings.get("background") else value
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        outcome |= {"error": type(error).__name__, "message": str(error), "notes": notes}
    job = nblaunch.last_job()
    outcome |= {
        "began_s": began_s,
        "host": socket.gethostname(),
        "model": [parameter.detach().tolist() for parameter in model.parameters()],
        "status": job.status if job is not None else None,
        "kept": job.results() if job is not None and job.status == "done" else None,
    }
    print("OUTCOME " + json.dumps(outcome), flush=True)
