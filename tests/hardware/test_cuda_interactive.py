"""Sessions, the debugger and detached jobs with a GPU, from real kernels. Skipped without one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nblaunch.backends.gpu import CUDA
from tests.hardware.test_cuda_kernel import ONE, SLACK_BYTES, StartKernel, _used, start  # noqa: F401  a fixture

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(CUDA.affinity() == 0, reason="no CUDA GPU here"),
    pytest.mark.timeout(300),
]

SESSION = """
from nblaunch import Session
session = Session(2, backend="cuda")
"""


def _wait_for_memory(before: int) -> None:
    deadline = time.monotonic() + 5
    while _used() > before + SLACK_BYTES and time.monotonic() < deadline:
        continue
    assert _used() <= before + SLACK_BYTES


def test_a_session_keeps_its_model_on_the_gpu(start: StartKernel) -> None:  # noqa: F811
    kernel, before = start(**ONE), _used()
    kernel.run(SESSION, timeout_s=100)
    kernel.run(
        """
session.execute('''
accelerator = Accelerator()
kept = torch.ones(1 << 28, device=accelerator.device)
model, optimizer = accelerator.prepare(net := build(), torch.optim.SGD(net.parameters(), lr=0.1))
steps = 0
''')
""",
        timeout_s=100,
    )
    assert _used() > before + (1 << 30)
    step = """
x = torch.ones(4, 64, device=accelerator.device)
accelerator.backward(model(x).square().mean())
optimizer.step()
steps += 1
"""
    kernel.run(f"for _ in range(3): session.execute({step!r})", timeout_s=100)
    found = kernel.run("dict(session.execute('steps, str(x.device), float(kept[0])'))", timeout_s=100).value
    assert found == {0: (3, "cuda:0", 1.0), 1: (3, "cuda:0", 1.0)}
    cell = kernel.submit(
        "session.execute('import time\\nprint(\"spins\", flush=True)\\nwhile True: kept.add_(1)')"
    )
    cell.wait_for_text("spins")
    kernel.interrupt()
    cell.wait(60)
    assert cell.raised.name == "KeyboardInterrupt", cell.describe()
    assert kernel.run("dict(session.execute('steps'))", timeout_s=60).value == {0: 3, 1: 3}
    kernel.run("session.close()")
    kernel.wait_for_no_processes()
    _wait_for_memory(before)
    assert kernel.run("touches_gpu()").value is False


def test_a_session_trains_the_model_of_the_notebook(start: StartKernel) -> None:  # noqa: F811
    kernel = start(**ONE)
    kernel.run(SESSION + "model = build()", timeout_s=100)
    found = kernel.run("session.run(train, (model,), return_all=True)[0]['losses']", timeout_s=100).value
    assert found[-1] < found[0] / 2
    assert kernel.run("str(next(model.parameters()).device)").value == "cpu"
    again = kernel.run("session.run(train, (model,), return_all=True)[0]['losses']", timeout_s=100).value
    assert again[0] < found[0] / 2, "it goes on with the weights that came back"
    kernel.run("session.close()")


def test_the_debugger_reads_gpu_tensors(start: StartKernel) -> None:  # noqa: F811
    kernel, before = start(**ONE), _used()
    kernel.run(
        """
def fail():
    accelerator = Accelerator()
    batch = torch.full((4, 2), float(accelerator.process_index), device=accelerator.device)
    if accelerator.process_index == 1:
        raise ValueError("boom")
    accelerator.reduce(batch)
"""
    )
    kernel.run(
        "notebook_launcher(fail, num_processes=2, backend='cuda', post_mortem=True)",
        raises="ValueError",
        timeout_s=100,
    )
    assert kernel.run("dict(last_job().inspect('batch.mean().item(), str(batch.device)'))").value == {
        0: (0.0, "cuda:0"),
        1: (1.0, "cuda:0"),
    }
    cell = kernel.submit("nblaunch.debug()", is_typed_into=True)
    for line in ("p batch[0]", "p (batch @ batch.T).sum().item()", "q"):
        cell.type(line)
    cell.wait(60)
    assert "tensor([1., 1.], device='cuda:0')" in cell.stdout, cell.describe()
    assert "32.0" in cell.stdout
    kernel.run("last_job().release()")
    kernel.wait_for_no_processes()
    _wait_for_memory(before)


def test_a_job_on_the_gpu_outlives_its_kernel(start: StartKernel, tmp_path: Path) -> None:  # noqa: F811
    first = start(**ONE)
    gate = tmp_path / "gate"
    first.run(
        f"""
def train_slowly(model):
    found = train(model)
    while not Path({str(gate)!r}).exists():
        time.sleep(0.01)
    return found
model = build()
"""
    )
    launch = "notebook_launcher(train_slowly, (model,), background=True, detach=True, dashboard='text')"
    job_id = first.run(f"job = {launch}\njob.id", timeout_s=100).value
    first.kill()
    second = start(**ONE)
    second.run(f"job = nblaunch.attach({job_id!r})")
    assert second.run("job.status").value == "running"
    gate.touch()
    losses = second.run("job.result(100)['losses']", timeout_s=120).value
    assert losses[-1] < losses[0] / 2
    second.run("trained = build()\njob.load_weights(trained)")
    assert second.run("touches_gpu(), str(trained[0].weight.device)").value == (False, "cpu")
