"""The interrupt button, SIGTERM and requests, while ranks run on nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Cell, Kernel
from tests.thorough import thorough


def test_interrupt_runs_finally_on_all_nodes(notebook: Kernel, tmp_path: Path) -> None:
    notebook.run(f"""
def train():
    try:
        dist.init_process_group("gloo")
        dist.barrier()
        print(f"rank {{rank()}} is under way", flush=True)
        time.sleep(3600)
    finally:
        open({str(tmp_path)!r} + f"/left_{{rank()}}", "w").close()
""")
    # A busy machine may keep a rank from its finally block for more than a second.
    cell = notebook.submit("launch(train, interrupt_grace_s=30.0)")
    for number in range(4):
        cell.wait_for_text(f"rank {number} is under way")
    notebook.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert notebook.run(f"sorted(n for n in os.listdir({str(tmp_path)!r}) if n[:4] == 'left')").value == [
        f"left_{number}" for number in range(4)
    ]
    assert notebook.run("node_programs()").value == []


def test_a_second_interrupt_kills_remaining_ranks(kept: Kernel) -> None:
    kept.run("""
def train():
    signal.signal(signal.SIGINT, lambda *_: print(f"rank {rank()} holds out", flush=True))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"rank {rank()} is under way", flush=True)
    while True:
        time.sleep(1)

""")
    cell = kept.submit("launch(train, interrupt_grace_s=3600.0)")
    for number in range(4):
        cell.wait_for_text(f"rank {number} is under way")
    kept.interrupt()
    for number in range(4):
        cell.wait_for_text(f"rank {number} holds out")
    kept.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"


LOADING = """
class Slow:
    def __init__(self, marks):
        self.marks = marks
    def __reduce__(self):
        return _slowly, (self.marks,)

def _slowly(marks):
    import os, time
    open(f"{marks}/{os.getpid()}", "w").close()
    time.sleep(3600)
"""


def test_an_interrupt_while_nodes_load_the_call_ends_them(notebook: Kernel, tmp_path: Path) -> None:
    cell = _load_slowly(notebook, tmp_path)
    notebook.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert notebook.run("node_programs()").value == []


def test_nodes_that_load_the_call_end_with_a_killed_kernel(notebook: Kernel, tmp_path: Path) -> None:
    _load_slowly(notebook, tmp_path)
    notebook.kill()
    notebook.wait_for_no_processes()


def _load_slowly(notebook: Kernel, folder: Path) -> Cell:
    """Launch a call that two nodes never finish loading."""
    marks = folder / "marks"
    marks.mkdir()
    notebook.run(LOADING)
    cell = notebook.submit(f"launch(print, Slow({str(marks)!r}))")
    notebook.wait_until(lambda: len(list(marks.iterdir())) == 2, 180, "nodes to load the call", cell)
    return cell


@pytest.mark.parametrize("times", [1, thorough(3)])
def test_interrupt_ends_all_nodes_at_one_optimizer_step(kept: Kernel, tmp_path: Path, times: int) -> None:
    kept.run(f"""
def train(number):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    steps = 0
    try:
        while True:
            model(torch.ones(2, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps % 20 == 0:  # until then, the first node runs ahead
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data, dist.ReduceOp.MAX)
            if steps == 20:
                print(f"rank {{rank()}} is under way", flush=True)
            time.sleep(0.01 * (rank() // 2))
    except KeyboardInterrupt:
        torch.save({{"steps": steps, "weights": model.state_dict()}}, f"{tmp_path}/{{number}}_{{rank()}}.pt")
        raise

def checkpoints(number):
    saved = [torch.load(f"{tmp_path}/{{number}}_{{r}}.pt") for r in range(4)]
    return ({{one["steps"] for one in saved}},
            all(torch.equal(one["weights"]["weight"], saved[0]["weights"]["weight"]) for one in saved))
""")
    for number in range(times):
        cell = kept.submit(f"launch(train, {number}, interrupt_grace_s=20.0)")
        for rank in range(4):
            cell.wait_for_text(f"rank {rank} is under way")
        kept.interrupt()
        assert cell.wait().raised.name == "KeyboardInterrupt"
        steps, are_equal = kept.run(f"checkpoints({number})").value
        assert len(steps) == 1
        assert min(steps) >= 20
        assert are_equal


def test_weights_of_the_last_step_come_back_from_an_interrupt(kept: Kernel) -> None:
    kept.run("""
model = nn.Linear(4, 2)
before = model.weight.detach().clone()

def train(model):
    accelerator = Accelerator()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(10**9):
        accelerator.backward(wrapped(torch.ones(2, 4)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            print(f"rank {rank()} is under way", flush=True)
""")
    cell = kept.submit("launch(train, model)")
    for number in range(4):
        cell.wait_for_text(f"rank {number} is under way")
    kept.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert kept.run("bool((model.weight != before).any())").value is True
    assert "interrupted after optimizer step" in cell.shown


UNTIL_STOPPED = """
def train():
    accelerator = Accelerator()
    step = 0
    while not accelerator.should_stop:
        accelerator.reduce(torch.ones(()))
        step += 1
        if step == 5:
            print(f"rank {rank()} is under way", flush=True)
        time.sleep(0.02)
    return step

job = launch(train, background=True, return_all=True)
while not all("under way" in job.logs(r) for r in range(4)): time.sleep(0.05)
"""


@pytest.mark.parametrize(
    "stop", ["job.stop()", "os.kill(programs[0], signal.SIGTERM)"], ids=["stop()", "SIGTERM on one machine"]
)
def test_all_ranks_stop_at_the_same_step(kept: Kernel, stop: str) -> None:
    kept.run(UNTIL_STOPPED)
    steps = kept.run(f"{stop}; job.result(200)").value
    assert len(steps) == 4
    assert len(set(steps)) == 1


def test_cancel_kills_the_ranks(kept: Kernel) -> None:
    kept.run("job = launch(time.sleep, 3600, background=True)")
    kept.run("job.cancel(); job.result(200)", raises="JobCancelled")
