"""What the machines of the tests run: ``main({"job": ..., "args": [...], "settings": {...}})``.

Launches one of the functions below and prints ``OUTCOME`` with what came of it, as JSON.
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
    """Addresses on which something listens in this network namespace, as hexadecimal numbers."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return [fields[1] for fields in lines if fields[3] == "0A"]  # source: proc(5), TCP_LISTEN


def train(model: nn.Module, steps: int) -> dict[str, Any]:
    """An epoch of real training; every rank sees other data."""
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
    """One all_reduce a step; prints each tenth. Returns the number of ranks, as they counted themselves."""
    accelerator = Accelerator()
    for step in accelerator.progress(range(steps)):
        total = accelerator.reduce(torch.ones(()), "sum")
        if step % 10 == 0 and accelerator.is_local_main_process:
            print(f"step {step} of attempt {current().attempt} on {int(total)} ranks", flush=True)
        time.sleep(pause_s)
    return int(total)


def resume(model: nn.Module, steps: int, folder: str) -> dict[str, Any]:
    """Training that saves its state every five steps and begins where the last state was saved."""
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
    """Steps of all ranks together, until all are to stop; returns how many there were."""
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
    """The rank of node 1 goes on for a while after the last step."""
    step = go_on_until_stopped(model)
    if current().topology.node_rank == 1:
        time.sleep(2.0)
    return step


def go_on_without_node_0(model: nn.Module, request: str) -> int:
    """Ranks of node 0 return when there is a file ``request``; each of the others steps until all are to stop."""
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
    """Waits for an interrupt, and returns with a trained model."""
    try:
        print("ready", flush=True)
        time.sleep(3600)
    except KeyboardInterrupt:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
    return current().topology.rank + 10


def train_shards(model: nn.Module, is_whole_on_each: bool) -> None:
    """Each step adds 1 to all weights, of which ranks hold shards. The last rank interrupts its launcher in step 5.

    Args:
        is_whole_on_each: shard the model over the ranks of each machine; False = over those of both.
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
            time.sleep(0.2)  # the other rank of this machine does its step meanwhile
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.2)
        optimizer.step()


def return_on_request(model: nn.Module, folder: str) -> int:
    """Every rank returns when there is a file with its number."""
    rank = current().topology.rank
    print("ready", flush=True)
    while not Path(folder, str(rank)).exists():
        time.sleep(0.02)
    return rank + 10


def fail_on_node_1(model: nn.Module, kind: str) -> None:
    """The others wait in a collective for a rank that fails."""
    accelerator = Accelerator()
    accelerator.reduce(torch.ones(()))
    if current().topology.node_rank == 1:
        if kind == "raise":
            raise LookupError("no such sample")
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.reduce(torch.ones(()))


def fail_once(model: nn.Module) -> int:
    """Every rank is well, except one on node 1 in the first attempt."""
    accelerator = Accelerator()
    if current().attempt == 0 and current().topology.node_rank == 1:
        raise LookupError("for the first time")
    return int(accelerator.reduce(torch.ones(()), "sum"))


def fail_late_once(model: nn.Module) -> list[int]:
    """In the first attempt, the rank of node 1 fails some time after that of node 0 has returned."""
    total = int(Accelerator().reduce(torch.ones(()), "sum"))
    if current().attempt == 0 and current().topology.node_rank == 1:
        time.sleep(1.0)
        raise LookupError("for the first time")
    return [total, current().attempt]


class _Crime:
    """Leaves a trace wherever a pickle of it is read."""

    def __init__(self, witness: str) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.witness,)


def attack(host: str, port: int, witness: str) -> None:
    """Another process that reaches the rendezvous of a job puts pickles wherever nodes read."""
    crime = pickle.dumps(_Crime(witness))
    store = TCPStore(host, port, None, False, wait_for_workers=False)
    num_nodes = store.add("none/num_nodes", 1)
    store.set(f"none/node/{num_nodes}", "the attacker")
    store.set("none/heartbeat/the attacker", crime)
    ids = [store.get(f"none/node/{number}").decode() for number in range(1, num_nodes)]
    with suppress(DistNetworkError):  # the job may be over before that
        for _ in range(20):  # the nodes write theirs again and again
            for id in ids:
                store.set(f"none/heartbeat/{id}", crime)
            store.set("torch.rendezvous.none", b64encode(crime).decode())
            time.sleep(0.05)
    print("OUTCOME {}", flush=True)


def _wait(job: nblaunch.Job) -> Any:
    """For the end of a job in the background; SIGUSR1 lets it end early and well, SIGTERM as in a script."""
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
