"""DeepSpeed from a real notebook: forked workers, weights loaded back into the kernel's module, several launches."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel

TRAIN = """
from nblaunch import Accelerator, DeepSpeedPlugin
def train(model, stage, precision="no"):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin({"zero_optimization": zero}), mixed_precision=precision)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    torch.manual_seed(accelerator.process_index)
    losses = []
    for _ in range(20):
        x = torch.randn(16, 6)
        loss = (prepared(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    whole = accelerator.get_state_dict(prepared)
    accelerator.end_training()
    return losses[0], losses[-1], whole
torch.manual_seed(0)
"""


STAGES = {"fork": ((2, "no"), (3, "no"), (3, "bf16")), "forkserver": ((3, "no"),)}


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.thorough
def test_weights_of_every_stage_come_back(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
{TRAIN}
results = []
for stage, precision in {STAGES[method]}:
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
    model(torch.ones(1, 6)).sum().backward()  # OpenMP and autograd were at work here
    model.zero_grad()
    first, last, whole = notebook_launcher(train, (model, stage, precision), 2, start_method={method!r})
    results.append((last < first / 2, all(torch.equal(value.float(), whole[name].float())
                                       for name, value in model.state_dict().items()),
                 {{str(value.dtype) for value in model.state_dict().values()}}))
results, "deepspeed" in sys.modules, [type(p).__name__ for p in model.parameters()][0]
""",
    )
    results, is_imported, kind = cell.value
    assert results == [(True, True, {"torch.float32"})] * len(STAGES[method])
    assert not is_imported  # only workers import it
    assert kind == "Parameter"
    assert "copied trained weights into args[0] (Sequential)" in cell.stdout
    replicated = (
        "228 B of weights on each of 2 ranks; gradients and optimizer states are sharded (ZeRO stage 2)"
    )
    assert (f"Sequential: {replicated}" in cell.stdout) == (method == "fork")
    assert (
        "Sequential: 228 B of weights sharded over 2 ranks, 120 B each; gradients and optimizer states, too "
        "(ZeRO stage 3)" in cell.stdout
    )
    assert "deprecated" not in cell.stdout + cell.stderr
    assert "[WARNING]" not in cell.stdout  # DeepSpeed reports nothing that a user needs


@pytest.mark.thorough
def test_deepspeed_can_be_launched_repeatedly(fresh: Kernel) -> None:
    cell = fresh.run(
        f"""
{TRAIN}
import warnings
model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
alone = [notebook_launcher(train, (nn.Linear(6, 1), 2), 1, engine="inline")[:2] for _ in range(2)]
results = [notebook_launcher(train, (model, stage), 2)[:2] for stage in (3, 1)]
[last < first for first, last in alone + results], "deepspeed" in sys.modules
""",
    )
    assert cell.value == ([True] * 4, True)
