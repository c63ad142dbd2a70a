"""A session whose ranks compute with torch_xla (PJRT CPU)."""

from __future__ import annotations

from tests.kernels import Kernel


def test_code_and_functions_run_on_xla_devices_that_stay(shared: Kernel) -> None:
    shared.run("from nblaunch import Session\nsession = Session(2, backend='xla')")
    shared.run(
        "session.execute('accelerator = Accelerator(); x = torch.ones(2, device=accelerator.device)')",
    )
    assert shared.run("{*session.execute('x.device.type').values()}").value == {"xla"}
    summed = "accelerator.reduce(x + accelerator.process_index).tolist()"
    assert shared.run(f"session.execute({summed!r})").result == "[0-1] [3.0, 3.0]"
    shared.run(
        """
model = nn.Linear(2, 1)
before = model.weight.detach().clone()
def train(model):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(4, 2, device=accelerator.device)).sum())
    optimizer.step()
    return accelerator.device.type
"""
    )
    cell = shared.run("session.run(train, (model,)), (model.weight - before).round().tolist()")
    assert cell.value == ("xla", [[-2.0, -2.0]])
    failing = "if accelerator.process_index == 1: raise ValueError('bad')\naccelerator.reduce(x)"
    shared.run(f"session.execute({failing!r})", raises="ValueError")
    assert shared.run(f"session.execute({summed!r})").result == "[0-1] [3.0, 3.0]"
    shared.run("session.close()")
    assert shared.processes() == []
