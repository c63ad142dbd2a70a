"""An interrupt keeps the weights of the last optimizer step, or a note says why it can't."""

from __future__ import annotations

import re

import pytest

from tests.failures.conftest import assert_as_before, value_of
from tests.kernels import Cell, Kernel

TRAINING = """
class Net(torch.nn.Module):
    # Each step adds 1 to every weight, one parameter after the other.
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(4)) for _ in range(8)])

    def forward(self, x):
        return -sum(part.sum() for part in self.parts) * x

class Sgd(torch.optim.SGD):
    # Interrupts the kernel in the middle of step 5, where that is wanted, and goes on when it has had the interrupt.
    num = 0
    def step(self, closure=None):
        self.num += 1
        for number, part in enumerate(self.param_groups[0]["params"]):
            part.data -= part.grad
            if number == 3 and self.num == 5 and moment == "inside of a step":
                interrupt_and_wait()

KERNEL = os.getpid()

def interrupt_and_wait():
    # Until SIGINT has come, which is held back here; where it is raised, the loop ends so.
    dist.is_initialized() and dist.barrier()
    if rank() == 0:
        os.kill(KERNEL, signal.SIGINT)
    slot = nblaunch.context.current().slot
    while not slot.read(0).interrupts:
        time.sleep(0.001)

def train(model):
    parts = list(model.parameters())
    net = model
    if how == "ddp":
        dist.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(model)
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("gloo")
        fully_shard(model)
    optimizer = Sgd(model.parameters(), lr=1.0)
    while True:
        optimizer.zero_grad()
        net(torch.ones(())).backward()
        if optimizer.num == 4 and moment == "between two steps":
            interrupt_and_wait()
        optimizer.step()
        if optimizer.num == 3 and moment == "from outside":
            print("train" + "ing")

def weights():
    return sorted({value for part in model.parameters() for value in part.tolist()})
"""

_STEP = re.compile(
    r"interrupted after optimizer step (\d+): copied the weights of that step into args\[0\] \(Net\)"
)


def shown(cell: Cell) -> str:
    return cell.stdout + cell.stderr


@pytest.fixture(scope="module", autouse=True)
def definitions(shared: Kernel) -> None:
    shared.run("import nblaunch.context\n" + TRAINING)


@pytest.mark.parametrize("moment", ["inside of a step", "between two steps"])
@pytest.mark.parametrize("how", ["alone", "ddp", "fsdp"])
def test_the_weights_of_the_last_step_are_kept(shared: Kernel, how: str, moment: str) -> None:
    shared.run(f"how, moment, model = {how!r}, {moment!r}, Net()")
    cell = shared.run("notebook_launcher(train, (model,), num_processes=2)", raises="KeyboardInterrupt")
    found = _STEP.search(shown(cell))
    assert found, cell.describe()
    assert value_of(shared, "weights()") == [float(found[1])]
    assert int(found[1]) >= (5 if moment == "inside of a step" else 4)
    assert value_of(shared, "nblaunch.last_job().status") == "interrupted"
    assert_as_before(shared)


def test_optimizer_states_match_the_interrupted_step(shared: Kernel) -> None:
    shared.run(
        """
def train_on(model, optimizer):
    while True:
        optimizer.zero_grad()
        model(torch.ones(())).backward()
        optimizer.step()
        if optimizer.state[next(model.parameters())]["step"] == 7 and rank() == 0:
            os.kill(KERNEL, signal.SIGINT)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, foreach=False)
"""
    )
    cell = shared.run(
        "notebook_launcher(train_on, (model, optimizer), num_processes=2, sync_optimizers=True)",
        raises="KeyboardInterrupt",
    )
    found = _STEP.search(shown(cell))
    assert found, cell.describe()
    steps = "sorted({state['step'].item() for state in optimizer.state.values()})"
    assert value_of(shared, steps) == [float(found[1])]
    shared.run("del optimizer; gc.collect()")  # its states are in memory that the workers have written
    assert_as_before(shared)


def test_a_stopped_rank_is_not_interrupted_again(shared: Kernel) -> None:
    """It is not interrupted in its ``finally``, which takes longer than an interrupt waits for the other ranks."""
    shared.run(
        """
def train_and_clean_up(model):
    try:
        train(model)
    finally:
        if rank() == 1:
            time.sleep(1.5)
            print("clean" + "ed up")

how, moment, model = "ddp", "from outside", Net()
"""
    )
    cell = shared.submit("notebook_launcher(train_and_clean_up, (model,), num_processes=2)")
    cell.wait_for_text("[0] training")
    shared.interrupt()
    cell.wait()
    assert "[1] cleaned up" in shown(cell), cell.describe()
    found = _STEP.search(shown(cell))
    assert found, cell.describe()
    assert value_of(shared, "weights()") == [float(found[1])]
    assert_as_before(shared)


ENDS = {
    "the handler raises": (
        "raise ValueError('no')",
        "",
        "the changes that workers made to args[0] (Net) are lost: rank 0 raised ValueError when it was interrupted",
    ),
    "a rank does not end": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM]); time.sleep(3600)",
        ", interrupt_grace_s=0.1",
        "the changes that workers made to args[0] (Net) are lost: rank 0 was killed by SIGKILL before it left the "
        "function",
    ),
    "no weights are wanted": ("raise", ", sync_weights=False", ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_reason_for_lost_weights_is_shown(shared: Kernel, end: str) -> None:
    handler, settings, text = ENDS[end]
    shared.run(
        f"""
moment, model = "between two steps", Net()
def train_to_an_end(model):
    try:
        train(model)
    except KeyboardInterrupt:
        {handler}
how = "alone"
"""
    )
    cell = shared.run(
        f"notebook_launcher(train_to_an_end, (model,), num_processes=2{settings})",
        raises="KeyboardInterrupt",
    )
    assert text in shown(cell), cell.describe()
    assert ("return" in shown(cell)) == bool(text)
    assert "copied" not in shown(cell)
    assert value_of(shared, "weights()") == [0.0]
    assert_as_before(shared)


def test_a_step_that_does_not_end_is_not_waited_for(shared: Kernel) -> None:
    shared.run(
        """
class Stuck(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["params"][0].data += 1
        if rank() == 0:
            os.kill(KERNEL, signal.SIGINT)
        time.sleep(3600)

def train_stuck(model):
    optimizer = Stuck(model.parameters(), lr=1.0)
    model(torch.ones(())).backward()
    optimizer.step()

model = Net()
"""
    )
    cell = shared.run("notebook_launcher(train_stuck, (model,), num_processes=2)", raises="KeyboardInterrupt")
    assert "rank 0 was interrupted during optimizer step 1, which did not finish in time" in shown(cell)
    assert value_of(shared, "weights()") == [0.0]
    assert_as_before(shared)


def test_a_call_on_a_session_keeps_its_weights(shared: Kernel) -> None:
    shared.run(
        """
def train_in_session(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    for number in range(10**9):
        optimizer.zero_grad()
        model(torch.ones(())).backward()
        optimizer.step()
        if number == 5 and torch.distributed.get_rank() == 0:
            os.kill(KERNEL, signal.SIGINT)

session = nblaunch.Session(2)
"""
    )
    for _ in range(3):
        shared.run("model = Net()")
        cell = shared.run("session.run(train_in_session, (model,))", raises="KeyboardInterrupt")
        found = _STEP.search(shown(cell))
        assert found, cell.describe()
        assert value_of(shared, "weights()") == [float(found[1])]
    shared.run("session.close()")
    assert_as_before(shared)


def test_ranks_of_a_session_end_at_the_same_step(shared: Kernel) -> None:
    """The shards then belong to one model, although rank 0 has finished a step before which the interrupt comes on
    rank 1.
    """
    shared.run(
        """
def train_shards(model):
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    for number in range(10**9):
        optimizer.zero_grad()
        model(torch.ones(())).backward()
        if number == 5 and dist.get_rank() == 1:
            time.sleep(0.2)                        # rank 0 does its step in the meantime
            os.kill(KERNEL, signal.SIGINT)
            time.sleep(0.2)
        optimizer.step()

session = nblaunch.Session(2)
"""
    )
    shared.run(
        "session.ranks(0).execute('parts = torch.nn.Linear(1, 1); torch.optim.SGD(parts.parameters(), 1.0).step()')"
    )
    for _ in range(2):
        shared.run("model = Net()")
        cell = shared.run("session.run(train_shards, (model,))", raises="KeyboardInterrupt")
        found = _STEP.search(shown(cell))
        assert found, cell.describe()
        assert value_of(shared, "weights()") == [float(found[1])]
    shared.run("session.close()")
    assert_as_before(shared)
