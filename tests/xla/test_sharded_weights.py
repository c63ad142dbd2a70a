"""Weights, gradients and optimizer state sharded over eight devices of one process (PJRT CPU)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Kernel
from tests.xla.conftest import xla_kernel

NUM_DEVICES = 8

TRAIN = """
from nblaunch import FullyShardedDataParallelPlugin

class Network(nn.Module):
    '''Tied and frozen weights, and lengths that eight devices do not divide.'''
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.norm = nn.BatchNorm1d(12)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.hidden = nn.Linear(64, 130)
        self.back = nn.Linear(130, 64)
        self.head = nn.Linear(64, 96)
        self.head.weight = self.embedding.weight
    def forward(self, tokens):
        x = self.frozen(self.norm(self.embedding(tokens)))
        return self.head(x + self.back(torch.relu(self.hidden(x))))

def build():
    torch.manual_seed(0)
    return Network()

def on_each(tensors):
    '''The largest part on a device, of the whole.'''
    import torch_xla
    shards = [torch_xla._XLAC._get_local_shards([tensor])[0] for tensor in tensors]
    return sum(max(part.numel() for part, _ in parts) for parts in shards) / sum(t.numel() for t in tensors)

class Training:
    def __init__(self, model, plugin=None, **options):
        self.accelerator = Accelerator(fsdp_plugin=plugin, **options)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.001)
        tokens = torch.randint(0, 96, (160, 12), generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(tokens, tokens.roll(1, 1)), 16)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
    def epoch(self):
        losses, norms = [], []
        for tokens, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).tolist(), torch.stack(norms).tolist()
    def states(self):
        states = self.optimizer.state.values()
        return [value for state in states for name, value in state.items() if name != "step"]
    def weights(self):
        return {name: value.cpu() for name, value in self.model.state_dict().items()}
"""


@pytest.fixture(scope="module")
def kernel(compile_quickly: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    logs = tmp_path_factory.mktemp("logs")
    with xla_kernel(logs, CPU_NUM_DEVICES=str(NUM_DEVICES)) as kernel:
        kernel.run(TRAIN)
        yield kernel


def test_sharded_training_matches_one_device(kernel: Kernel) -> None:
    cell = kernel.run(
        """
def train(model, is_sharded):
    training = Training(model, FullyShardedDataParallelPlugin() if is_sharded else None,
                        gradient_accumulation_steps=2)
    losses, norms = training.epoch()
    compiled = metrics().counter_value("UncachedCompile")
    losses += training.epoch()[0]
    compiled = metrics().counter_value("UncachedCompile") - compiled
    weights = [p for p in model.parameters()]
    parts = (on_each(weights), on_each(training.states())) if is_sharded else None
    gathered = training.accelerator.gather(torch.arange(3, device=training.accelerator.device)).tolist()
    return losses, norms, parts, gathered, training.weights(), model.head.weight is model.embedding.weight, compiled

model = build()
parts = notebook_launcher(train, (model, True), strategy="spmd", dashboard="text", threads_per_process=4)
whole = notebook_launcher(train, (build(), False), num_processes=1, threads_per_process=4)
difference = lambda a, b: max(abs(x - y) for x, y in zip(a, b, strict=True))
apart = max((parts[4][name] - whole[4][name]).abs().max().item() for name in whole[4])
returned = all(torch.equal(value, parts[4][name]) for name, value in model.state_dict().items())
difference(parts[0], whole[0]), difference(parts[1], whole[1]), apart, parts[2], parts[3], returned, parts[5], parts[6]
""",
    )
    losses, norms, weights, (held, state), gathered, is_returned, is_tied, num_compiled = cell.value
    assert losses < 1e-5
    assert norms < 1e-5
    assert weights < 1e-4
    assert held < 1 / 6
    assert state < 1 / 6
    assert gathered == [0, 1, 2]
    assert is_returned
    assert is_tied
    assert num_compiled == 0, "the second epoch has the programs of the first"
    assert "of weights sharded over 8 devices" in cell.stdout


def test_a_checkpoint_is_whole_and_loads_in_parts(kernel: Kernel, tmp_path: Path) -> None:
    cell = kernel.run(
        f"""
def save_and_load(model, folder):
    from nblaunch.errors import CheckpointError
    training = Training(model, FullyShardedDataParallelPlugin())
    training.epoch()
    before, states = training.weights(), [state.cpu() for state in training.states()]
    training.accelerator.save_state(folder)
    training.epoch()
    training.accelerator.load_state(folder)
    parts = on_each(list(model.parameters())), on_each(training.states())
    after = training.weights()
    is_equal = all(torch.equal(before[name], after[name]) for name in before)
    is_equal &= all(torch.equal(one, other.cpu()) for one, other in zip(states, training.states(), strict=True))
    wrong = {{**after, "back.weight": torch.zeros(3, 3)}}
    training.accelerator.save(wrong, folder + "/model.safetensors", safe_serialization=True)
    os.remove(folder + "/nblaunch_checkpoint.json")
    with torch.no_grad():
        model.norm.bias.fill_(7)
    try:
        training.accelerator.load_state(folder)
    except CheckpointError as error:
        problem = str(error)
    return is_equal, parts, problem, model.norm.bias.tolist()[0]

notebook_launcher(save_and_load, (build(), {str(tmp_path / "saved")!r}), strategy="spmd", threads_per_process=4)
""",
    )
    is_equal, (held, state), problem, bias = cell.value
    assert is_equal
    assert held < 1 / 6
    assert state < 1 / 6
    assert "size mismatch for back.weight" in problem
    assert bias == 7, "nothing was loaded of a checkpoint that does not fit"


def test_weights_that_are_left_out_are_whole_on_every_device(kernel: Kernel) -> None:
    cell = kernel.run(
        """
def parts(model):
    training = Training(model, FullyShardedDataParallelPlugin(ignored_modules="hidden"), mixed_precision="bf16")
    training.epoch()
    return on_each([model.hidden.weight]), on_each([model.back.weight]), on_each([model.frozen.weight])
notebook_launcher(parts, (build(),), strategy="spmd", threads_per_process=4)
""",
    )
    assert cell.value == (1.0, 0.125, 0.125)


def test_spmd_rejects_a_process_per_device(kernel: Kernel) -> None:
    cell = kernel.run(
        "notebook_launcher(lambda: Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()), num_processes=2)",
        raises="ValueError",
    )
    assert "strategy='spmd'" in cell.raised.value
