"""Real ranks for tests: N processes that gloo joins over the loopback interface, without the launcher.

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
from functools import cached_property
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from nblaunch import backends, context, env
from nblaunch.events import Event, Observation
from nblaunch.topology import Topology
from tests import alarms


class RankFailed(AssertionError):
    """A rank raised an exception; the message is its traceback."""


# Other imports of most test modules, which every rank makes together with the module of its function.
_IMPORTED = (
    "torch",
    "torch.distributed",
    "nblaunch.training.accelerator",
    "tests.training.ranks",
    "hypothesis",
    "multiprocessing.popen_fork",
    "nblaunch.config.settings",
    "torch.utils.serialization.config",
)
# Modules that some tests import, which takes up to four seconds in each rank. Import none if the ranks use a device,
# because Accelerate may search for one.
_IMPORTED_BY_SOME = (
    "accelerate",
    "datasets",
    "nblaunch.notebook",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torchdata.stateful_dataloader",
    "transformers.models.bert.modeling_bert",
)
_preloaded: tuple[str, ...] | None = None


@pytest.fixture(scope="module", autouse=True)
def rank_server(request: pytest.FixtureRequest) -> None:
    """Start the process from which the ranks of a module's tests are forked; it never touches a device.

    A test module, or a folder's conftest, uses the fixture by importing it. The process also serves the next module.
    """
    request.config.add_cleanup(stop_server)
    has_devices = request.node.get_closest_marker("cuda") is not None
    start_server(*[] if has_devices else _IMPORTED_BY_SOME)


def start_server(*preload: str) -> None:
    """Start the process from which ranks are forked, with torch and the modules ``preload`` imported.

    Do nothing if a process with exactly these imports is running.
    """
    global _preloaded
    if _preloaded == preload:
        return
    if _preloaded is not None:
        stop_server()
    server = multiprocessing.forkserver
    server.set_forkserver_preload([*_IMPORTED, *preload, "tests.training.frozen_heap"])
    with env.patched(
        {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    ):  # read when transformers is imported
        server.ensure_running()
    # The time for imports does not count for the first rank.
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()
    first.join()
    first.close()
    _preloaded = preload
    # The first store of a process creates libuv's permanent signal pipe, which must not count as left behind by a test.
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def stop_server() -> None:
    """Stop the process and its resource tracker."""
    from multiprocessing import resource_tracker

    global _preloaded
    _preloaded = None
    multiprocessing.forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


def run(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300.0, backend: str = "cpu"
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a job; return the results by rank.

    Raises:
        RankFailed: a rank raised, died or did not finish in time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = cloudpickle.dumps((function, args))
    spawn = multiprocessing.get_context("forkserver")
    ranks = []
    patience_s = 1.0  # after a failure, the other ranks only wait for the failed rank, so don't wait for them
    try:
        for rank in range(world_size):
            topology = Topology(rank, rank, 0, world_size, world_size, master_port=store.port)
            receiver, sender = spawn.Pipe(duplex=False)
            process = spawn.Process(target=_rank_main, args=(call, topology.to_env(), backend, sender))
            process.start()
            sender.close()
            ranks.append((process, receiver))
        deadline = time.monotonic() + timeout_s
        answers = [_answer(rank, receiver, deadline) for rank, (_, receiver) in enumerate(ranks)]
        patience_s = 20.0
        alarms.judge([seen for _, observations in answers for seen in observations], world_size)
        return [result for result, _ in answers]
    finally:
        stuck = [
            rank for rank, (process, receiver) in enumerate(ranks) if not _end(process, receiver, patience_s)
        ]
        if stuck:
            print(f"ranks {stuck} did not end by themselves and were killed")
        del store  # the traceback of a failure keeps this frame and would keep its sockets


class Together:
    """Programs that run one after the other in one job, which starts when a test first asks for a result.

    Args:
        world_size: number of ranks.
        **programs: functions that end at the same collective on all ranks.
    """

    def __init__(self, world_size: int, **programs: Callable[[], Any]) -> None:
        self._world_size = world_size
        self._programs = programs

    @cached_property
    def _results(self) -> list[dict[str, Any]]:
        programs = self._programs
        return run(lambda: {name: program() for name, program in programs.items()}, self._world_size)

    def __getitem__(self, name: str) -> list[Any]:
        """Return what a program returned, by rank."""
        return [results[name] for results in self._results]


def _end(process: Any, receiver: multiprocessing.connection.Connection, patience_s: float) -> bool:
    """Wait for the end of a rank, or end it; return whether it ended by itself."""
    process.join(patience_s)
    is_ended = not process.is_alive()
    if not is_ended:
        process.kill()
        process.join()
    process.close()
    receiver.close()
    return is_ended


def _answer(
    rank: int, receiver: multiprocessing.connection.Connection, deadline: float
) -> tuple[Any, list[Observation]]:
    """Return what a rank's function has returned, and what its checks have observed."""
    if not receiver.poll(max(0.0, deadline - time.monotonic())):
        raise RankFailed(f"rank {rank} did not finish in time")
    try:
        is_error, value, observations = pickle.loads(receiver.recv_bytes())
    except EOFError:
        raise RankFailed(f"rank {rank} died without a result") from None
    if is_error:
        raise RankFailed(f"rank {rank} raised:\n{value}")
    return value, observations


def _rank_main(
    call: bytes, environment: dict[str, str], backend: str, sender: multiprocessing.connection.Connection
) -> None:
    # A process inherits the start method with which it was created; a loader's processes would then come from another
    # server, which ends some time after the rank. In launched workers and under torchrun, they are forked.
    multiprocessing.set_start_method("fork", force=True)
    topology, chosen = Topology.from_env(environment), backends.choose(backend)
    env.apply({**environment, **chosen.worker_env(topology)})  # as in launched workers
    warnings.simplefilter("error")  # as in the test process
    warnings.filterwarnings("ignore", "the last accumulation window of the loader has")
    torch.set_num_threads(1)
    observed: list[Event] = []
    context.install(context.ProcessContext(topology, chosen, emit=observed.append))
    try:
        function, args = cloudpickle.loads(call)
        answer = (False, function(*args))
    except BaseException:
        answer = (True, traceback.format_exc())
    observations = [event for event in observed if isinstance(event, Observation)]
    sender.send_bytes(pickle.dumps((*answer, observations)))
    sender.close()
    if dist.is_initialized():
        dist.destroy_process_group()
