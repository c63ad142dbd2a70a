"""Sharded training from a notebook: a cell builds the model once, and its trained weights come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

SETUP = """
from nblaunch import Accelerator, FullyShardedDataParallelPlugin, load_checkpoint_in_model
from torch.distributed.fsdp import fully_shard

class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, size=17):
        super().__init__()
        self.entry = nn.Linear(6, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(3))
        self.exit = nn.Linear(size, 1)

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.exit(x)


def train(model, sharded):
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        inputs = torch.randn(8, 6, generator=generator).chunk(accelerator.num_processes)[accelerator.process_index]
        accelerator.backward((model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return type(model).__name__


def trained(sharded, device="cpu", method="fork"):
    torch.manual_seed(3)
    with torch.device(device):
        model = Net()
    torch.manual_seed(3)  # what a model without memory is made with
    notebook_launcher(train, (model, sharded), 2, start_method=method)
    return model


def largest_difference(one, other):     # weights have moved by up to 0.03
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
"""


@pytest.fixture(scope="module")
def sharding(shared: Kernel) -> Kernel:
    shared.run(SETUP + "\nreplicated = trained(False)")
    return shared


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_trained_weights_come_back_whole(sharding: Kernel, method: str) -> None:
    cell = sharding.run(
        f"""
model = trained(True, method={method!r})
largest_difference(model, replicated), type(model).__name__, type(model.blocks[0]).__name__
"""
    )
    difference, *names = cell.value
    assert difference < 1e-3
    assert names == ["Net", "Block"]  # the kernel's own weights are unchanged
    assert "Net: 4.63 kB of weights sharded over 2 ranks, 2.14 kB to 2.48 kB each" in cell.stdout
    assert "gathered in 4 units, each freed after its forward" in cell.stdout
    assert "copied trained weights into args[0] (Net): " in cell.stdout


@pytest.mark.parametrize("accelerator", ["Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())", "None"])
def test_weights_sharded_by_the_user_come_back_whole(sharding: Kernel, accelerator: str) -> None:
    cell = sharding.run(
        f"""
def train_sharded(model):
    accelerator = {accelerator}
    if accelerator is None and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        inputs = torch.randn(8, 6, generator=generator).chunk(2)[rank]
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model(inputs)  # gathers the weights, and keeps them for a backward
    torch.distributed.barrier()

torch.manual_seed(3)
model = Net()
notebook_launcher(train_sharded, (model,), 2)
largest_difference(model, replicated), type(model).__name__
"""
    )
    difference, name = cell.value
    assert difference < 1e-3
    assert name == "Net"
    assert "copied trained weights into args[0] (Net): " in cell.stdout


def test_whole_weights_are_loaded_into_parts_of_the_kernels_model(sharding: Kernel, tmp_path: Path) -> None:
    cell = sharding.run(
        f"""
def load(model, folder):
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    load_checkpoint_in_model(accelerator.prepare(model), folder, strict=True)

from safetensors.torch import save_file
model, saved = Net(128), Net(128)  # of many pages; the parts of rank 1 begin in the middle of the kernel's tensors
save_file(saved.state_dict(), {str(tmp_path / "model.safetensors")!r})
notebook_launcher(load, (model, {str(tmp_path)!r}), 2)
largest_difference(model, saved)
"""
    )
    assert float(cell.result or "nan") == 0


def test_meta_models_get_their_first_weights(sharding: Kernel) -> None:
    cell = sharding.run("model = trained(True, 'meta')\nlargest_difference(model, replicated)")
    assert float(cell.result or "nan") < 1e-3


def test_parts_are_views_of_the_kernels_pages(sharding: Kernel) -> None:
    cell = sharding.run(
        """
def hold(model):
    import re
    from pathlib import Path

    def own_mb():
        text = Path("/proc/self/smaps_rollup").read_text()
        return sum(int(kb) for kb in re.findall(r"^Private_(?:Dirty|Clean): +(\\d+) kB", text, re.M)) / 1024

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.prepare(Net(16))  # what libraries take at first use
    before = own_mb()
    model = accelerator.prepare(model)
    sharded = own_mb()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 6)).mean())
        optimizer.step()
        optimizer.zero_grad()
    return sharded - before, own_mb() - before

model = Net(2048)  # 48 MB in its three blocks
[[round(mb) for mb in grown] for grown in notebook_launcher(hold, (model,), 2, return_all=True, sync_weights=False)]
"""
    )
    for sharded, trained in cell.value:
        assert sharded < 5
        assert trained < 24 + 20  # its half, whose pages were copied on write, and space for a unit


@pytest.mark.parametrize("num_processes", [1, 2])
def test_fsdp1_shards_stay_with_their_ranks(shared: Kernel, num_processes: int) -> None:
    """Gathering them is a collective, in which the first rank would wait alone; a single rank has no shards."""
    cell = shared.run(
        f"""
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

def train(model):
    dist.init_process_group("gloo")
    cpu = torch.device("cpu")
    sharded = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({{nn.Linear}}), device_id=cpu)
    sharded(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.fill_(3.0)
    dist.barrier()
    return "trained"

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
notebook_launcher(train, (model,), {num_processes}), model[0].weight.unique().tolist() == [3.0]
"""
    )
    assert cell.value == ("trained", num_processes == 1)
    assert ("FSDP version 1" in cell.stdout) == (num_processes == 2)
