"""Real ranks for tests: N processes joined by gloo over the loopback interface, without the launcher.

    results = ranks.run(program, 2, "an argument")     # program("an argument") in each; results in rank order

The test hosts the rendezvous store and the ranks are its clients, exactly as under ``torchrun``.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from nblaunch import backends, context, env
from nblaunch.topology import Topology


class RankFailed(AssertionError):
    """A rank raised; the message is its traceback."""


# What most modules of tests import besides, which every rank imports with the module whose function it calls.
_IMPORTED = (
    "torch",
    "torch.distributed",
    "nblaunch.training.accelerator",
    "tests.training.ranks",
    "hypothesis",
)
# What some of them need, up to two seconds in each rank. Not where a device is used: Accelerate may look for it.
_IMPORTED_BY_SOME = (
    "accelerate",
    "nblaunch.notebook",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
)
_preloaded: tuple[str, ...] | None = None


@pytest.fixture(scope="module", autouse=True)
def rank_server(request: pytest.FixtureRequest) -> None:
    """The process that the ranks of a module's tests are forked from, which never touches a device.

    A test module, or a folder's conftest, takes it by importing it. It serves the next module, too.
    """
    request.config.add_cleanup(stop_server)
    has_devices = request.node.get_closest_marker("cuda") is not None
    start_server(*[] if has_devices else _IMPORTED_BY_SOME)


def start_server(*preload: str) -> None:
    """Start the process that ranks are forked from, with torch and the modules ``preload`` imported once.

    Does nothing where one runs that has imported just these.
    """
    global _preloaded
    if _preloaded == preload:
        return
    if _preloaded is not None:
        stop_server()
    server = multiprocessing.forkserver
    server.set_forkserver_preload([*_IMPORTED, *preload, "tests.training.frozen_heap"])
    server.ensure_running()
    # The time that it takes to import is not the first rank's.
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()
    first.join()
    first.close()
    _preloaded = preload
    # The first store of a process makes libuv's signal pipe, which stays for good: not to be taken for a test's.
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def stop_server() -> None:
    """Stop it, and the resource tracker that comes with it."""
    from multiprocessing import resource_tracker

    global _preloaded
    _preloaded = None
    multiprocessing.forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


def run(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, backend: str = "cpu"
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a job; returns the results by rank.

    Raises:
        RankFailed: a rank raised, died or did not finish in time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = cloudpickle.dumps((function, args))
    spawn = multiprocessing.get_context("forkserver")
    ranks = []
    patience_s = (
        1.0  # after a failure the others wait for the rank that failed, so they are not worth waiting for
    )
    try:
        for rank in range(world_size):
            topology = Topology(rank, rank, 0, world_size, world_size, master_port=store.port)
            receiver, sender = spawn.Pipe(duplex=False)
            process = spawn.Process(target=_rank_main, args=(call, topology.to_env(), backend, sender))
            process.start()
            sender.close()
            ranks.append((process, receiver))
        deadline = time.monotonic() + timeout_s
        results = [_result(rank, receiver, deadline) for rank, (_, receiver) in enumerate(ranks)]
        patience_s = 20.0
        return results
    finally:
        stuck = [
            rank for rank, (process, receiver) in enumerate(ranks) if not _end(process, receiver, patience_s)
        ]
        if stuck:
            print(f"ranks {stuck} did not end by themselves and were killed")
        del store  # the traceback of a failure keeps this frame, and would keep its sockets


def _end(process: Any, receiver: multiprocessing.connection.Connection, patience_s: float) -> bool:
    """Wait for a rank to end, or make it; whether it ended by itself."""
    process.join(patience_s)
    is_ended = not process.is_alive()
    if not is_ended:
        process.kill()
        process.join()
    process.close()
    receiver.close()
    return is_ended


def _result(rank: int, receiver: multiprocessing.connection.Connection, deadline: float) -> Any:
    if not receiver.poll(max(0.0, deadline - time.monotonic())):
        raise RankFailed(f"rank {rank} did not finish in time")
    try:
        is_error, value = pickle.loads(receiver.recv_bytes())
    except EOFError:
        raise RankFailed(f"rank {rank} died without a result") from None
    if is_error:
        raise RankFailed(f"rank {rank} raised:\n{value}")
    return value


def _rank_main(
    call: bytes, environment: dict[str, str], backend: str, sender: multiprocessing.connection.Connection
) -> None:
    # A process takes over the start method it was made by; the readers of a loader would then come from one more
    # server, which ends some time after the rank. In launched workers and under torchrun they are forked.
    multiprocessing.set_start_method("fork", force=True)
    topology, chosen = Topology.from_env(environment), backends.choose(backend)
    env.apply({**environment, **chosen.worker_env(topology)})  # as in launched workers
    warnings.simplefilter("error")  # as in the tests' own process
    warnings.filterwarnings("ignore", "the last accumulation window of the loader has")
    torch.set_num_threads(1)
    context.install(context.ProcessContext(topology, chosen))
    try:
        function, args = cloudpickle.loads(call)
        answer = (False, function(*args))
    except BaseException:
        answer = (True, traceback.format_exc())
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    if dist.is_initialized():
        dist.destroy_process_group()
