"""The Accelerator on XLA devices (PJRT CPU): weights, ties, collectives, checkpoints, random numbers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import Kernel


def run(kernel: Kernel, body: str, num_processes: int = 2) -> list[object]:
    """Return all ranks' values of a function with this body, which can use ``accelerator`` and ``model``."""
    lines = "\n    ".join(body.strip().splitlines())
    cell = kernel.run(
        f"def function(model):\n    accelerator = Accelerator()\n    rank = accelerator.process_index\n    {lines}\n"
        f"notebook_launcher(function, (nn.Linear(3, 2),), {num_processes}, return_all=True)",
    )
    found: list[object] = cell.value
    return found


def test_a_function_may_return_right_after_joining(shared: Kernel) -> None:
    """A rank that leaves must not disturb ranks that still join; with eight ranks, one launch in four once failed."""
    for _ in range(5):
        assert run(shared, "return rank", 8) == list(range(8))


@pytest.mark.parametrize("moved", ["", ".to(accelerator.device)"])
def test_different_models_become_rank_0s_model(shared: Kernel, moved: str) -> None:
    found = run(
        shared,
        f"""
torch.manual_seed(rank)
own = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)){moved}
before = own[0].weight.sum().item()
own = accelerator.prepare(own)
return before, own[0].weight.sum().item(), str(own[0].weight.device)
""",
    )
    (first, first_after, device), (second, second_after, _) = found  # type: ignore[misc]
    assert first != second
    assert first_after == second_after == pytest.approx(first, abs=1e-6)
    assert device == "xla:0"


def test_unmoved_model_gets_rank_0_weights(shared: Kernel) -> None:
    found = run(
        shared,
        """
torch.manual_seed(rank)
own = accelerator.prepare(nn.Linear(3, 3), device_placement=[False])
return own.weight.sum().item(), str(own.weight.device)
""",
    )
    assert found[0] == found[1]
    assert found[0][1] == "cpu"  # type: ignore[index]


def test_an_optimizer_built_before_follows_its_parameters(shared: Kernel) -> None:
    """A module that moves to an XLA device gets new parameters, also in the optimizer, in any order of preparation."""
    found = run(
        shared,
        """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()                                       # its state is on the CPU
optimizer, model = accelerator.prepare(optimizer, model)
same = [p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters())]
state = {str(s["exp_avg"].device) for s in optimizer.state.values()}
before = model.weight.sum().item()
accelerator.backward(model(torch.ones(4, 3, device=accelerator.device)).sum())
optimizer.step()
return all(same), len(same), state == {"xla:0"}, model.weight.sum().item() < before
""",
    )
    assert found == [(True, 2, True, True)] * 2


def test_tied_weights_stay_tied(shared: Kernel) -> None:
    found = run(
        shared,
        """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.recurrent = nn.LSTM(4, 4)
    def forward(self, x):
        return self.recurrent(self.second(self.first(x)))[0]
tied = Tied()
optimizer = torch.optim.SGD(tied.parameters(), lr=0.1)
tied, optimizer = accelerator.prepare(tied, optimizer)
accelerator.backward(tied(torch.ones(2, 4, device=accelerator.device)).sum())
optimizer.step()
flat = [any(w is p for p in tied.parameters()) for w in tied.recurrent._flat_weights]
return tied.first.weight is tied.second.weight, len(optimizer.param_groups[0]["params"]), all(flat)
""",
    )
    assert found == [(True, 7, True)] * 2


def test_collectives(shared: Kernel) -> None:
    found = run(
        shared,
        """
device = accelerator.device
own = torch.full((2,), float(rank), device=device)
flags = accelerator.gather(torch.tensor([rank == 1], device=device))
padded = accelerator.pad_across_processes(torch.ones(rank + 1, 2, device=device))
nested = accelerator.gather({"a": own, "b": [own.double(), own.bfloat16()]})
return (
    accelerator.gather(own).tolist(),
    accelerator.reduce(own, "mean").tolist(),
    accelerator.reduce(own, "max").tolist(),
    accelerator.broadcast(torch.full((1,), rank + 5, device=device)).tolist(),
    flags.tolist(),
    padded.tolist(),
    nested["b"][1].tolist(),
    str(nested["a"].device),
    accelerator.gather_object([rank]),
    accelerator.backend,
)
""",
    )
    for rank, answers in enumerate(found):
        gathered, mean, largest, sent, flags, padded, halves, device, objects, group = answers  # type: ignore[misc]
        assert gathered == [0, 0, 1, 1]
        assert mean == [0.5, 0.5]
        assert largest == [1, 1]
        assert sent == [5]
        assert flags == [False, True]
        assert padded == [[1, 1], [0, 0] if rank == 0 else [1, 1]]
        assert halves == [0, 0, 1, 1]
        assert device == "xla:0"
        assert objects == [0, 1]
        assert group == "gloo"


def test_gradients_of_some_ranks_only(shared: Kernel) -> None:
    """Only one rank took a branch: the others count as zero, as in DistributedDataParallel."""
    found = run(
        shared,
        """
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Parameter(torch.ones(1)) for _ in range(3))
    def forward(self, takes):
        return self.always * 2 + (self.sometimes * 4 if takes else 0)
branches = Branches()
optimizer = torch.optim.SGD(branches.parameters(), lr=1.0)
branches, optimizer = accelerator.prepare(branches, optimizer)
accelerator.backward(branches(rank == 1).sum())
optimizer.step()
return branches.always.item(), branches.sometimes.item(), branches.never.item(), branches.never.grad is None
""",
    )
    assert found == [(-1.0, -1.0, 1.0, True)] * 2


def test_checkpoints_are_on_the_cpu_and_resumable(shared: Kernel, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    found = run(
        shared,
        f"""
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
def step():
    x = torch.ones(2, 3, device=accelerator.device) + torch.rand(2, 3, device=accelerator.device)
    accelerator.backward(model(x).square().sum())
    optimizer.step()
    optimizer.zero_grad()
    return model.weight.detach().cpu().tolist()
set_seed(3)
step()
accelerator.save_state({folder!r})
expected = step()
step()
accelerator.load_state({folder!r})
again = step()
accelerator.save_model(model, {folder!r} + "/model")
return expected == again, str(model.weight.device), str(next(iter(optimizer.state.values()))["exp_avg"].device)
""",
    )
    assert found == [(True, "xla:0", "xla:0")] * 2
    cell = shared.run(
        f"""
from safetensors.torch import load_file
weights = load_file({folder!r} + "/model/model.safetensors")
{{name: str(tensor.device) for name, tensor in weights.items()}}
"""
    )
    assert cell.value == {"weight": "cpu", "bias": "cpu"}


def test_seeds_reach_the_device(shared: Kernel) -> None:
    found = run(
        shared,
        """
def draw():
    return torch.rand(3, device=accelerator.device).tolist()
set_seed(1)
first = draw()
set_seed(1)
second = draw()
set_seed(1, device_specific=True)
third = draw()
return first == second, third == first
""",
    )
    assert found == [(True, True), (True, False)]


SCRIPT = """
import torch
from nblaunch import Accelerator, set_seed
set_seed(5)
accelerator = Accelerator()
first = torch.rand(3, device=accelerator.device).tolist()
set_seed(5)
print(accelerator.device, first == torch.rand(3, device=accelerator.device).tolist())
"""


def test_unlaunched_scripts_seed_their_device() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
    )
    assert ended.stdout.split() == ["xla:0", "True"], ended.stderr


def test_ranks_agree_on_the_devices_generator(shared: Kernel) -> None:
    found = run(
        shared,
        """
from nblaunch.training.collectives.rng import synchronize_rng_state
set_seed(5, device_specific=True)
synchronize_rng_state("xla")
together = torch.rand(2, device=accelerator.device).tolist()
return together
""",
    )
    assert found[0] == found[1]


def test_the_runtimes_own_rendezvous_gives_the_ranks(shared: Kernel) -> None:
    """Workers on a TPU join the process group this way, with the runtime's ordinals, which are simulated here."""
    cell = shared.run(
        """
def join_as_on_a_tpu():
    import torch.distributed as dist
    import torch_xla.runtime as xr
    from nblaunch import context
    from nblaunch.backends import xla
    from nblaunch.backends import xla_runtime
    topology = context.current().topology
    xla_runtime.kind = lambda: "TPU"
    xr.world_size = lambda: topology.world_size
    xr.global_ordinal = lambda: topology.world_size - 1 - topology.rank     # the runtime's order is its own
    xla.BACKEND.join(topology, None)
    total = torch.tensor([float(topology.rank)])
    dist.all_reduce(total)
    accelerator = Accelerator()
    return topology.rank, dist.get_rank(), accelerator.process_index, dist.get_backend(), total.item()
notebook_launcher(join_as_on_a_tpu, num_processes=4, return_all=True)
""",
    )
    assert cell.value == [(rank, 3 - rank, 3 - rank, "gloo", 6.0) for rank in range(4)]


def test_blocks_run_one_at_a_time(shared: Kernel) -> None:
    shared.run(
        "import mmap\nfrom nblaunch import one_at_a_time\ntimes = memoryview(mmap.mmap(-1, 4096)).cast('d')"
    )
    run(
        shared,
        """
accelerator.wait_for_everyone()
with one_at_a_time():
    times[2 * rank] = time.monotonic()
    model.to(accelerator.device)
    time.sleep(0.1)         # all would be inside in the meantime
    times[2 * rank + 1] = time.monotonic()
accelerator.prepare(model)
""",
        3,
    )
    cell = shared.run("sorted((times[2 * rank], times[2 * rank + 1]) for rank in range(3))")
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(cell.value))
