"""Plain PyTorch loops whose ranks all train on the same samples are reported; correct loops that look odd are not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

SETUP = """
import contextlib, itertools, math
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler, ConcatDataset, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Subset,
    TensorDataset, WeightedRandomSampler, get_worker_info)

torch.manual_seed(0)
DATA = TensorDataset(torch.randn(400, 4), torch.randn(400, 1))
PATH = os.path.join(os.environ["NBLAUNCH_LOG_DIR"], "samples")

def begin():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))

def ddp(**options):
    begin()
    return DistributedDataParallel(net(), **options)

def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).pow(2).mean()

def loop(model, loader, epochs=1, change=lambda batch: batch, loss_of=loss_of, after=lambda model: None):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(epochs):
        for batch in loader:
            loss_of(model, change(batch)).backward()  # here
            after(model)
            optimizer.step()
            optimizer.zero_grad()

class Stream(IterableDataset):
    def __init__(self, divides=False):
        self.divides = divides
    def __iter__(self):
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        if self.divides:
            number, count = dist.get_rank() * count + number, dist.get_world_size() * count
        return itertools.islice(iter(DATA), number, None, count)

class Augmented(Dataset):
    def __len__(self):
        return len(DATA)
    def __getitem__(self, index):
        inputs, target = DATA[index]
        return inputs + torch.randn(4), target

class Interleaved(Dataset):
    "The samples of a rank, which it looks up when they are read."
    def __len__(self):
        return len(DATA) // 2
    def __getitem__(self, index):
        return DATA[2 * index + dist.get_rank()]

class OwnBatches:
    "A batch sampler that divides the batches among the ranks."
    def __init__(self, sampler):
        self.batches = BatchSampler(sampler, 8, False)
    def __iter__(self):
        return itertools.islice(self.batches, dist.get_rank(), None, dist.get_world_size())
    def __len__(self):
        return len(self.batches) // dist.get_world_size()

def average_by_hand(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()
"""

WRONG = {
    "shuffled": "loop(ddp(), DataLoader(DATA, 8, shuffle=True))",
    "in order": "loop(ddp(), DataLoader(DATA, 8))",
    "loader processes": "loop(ddp(), DataLoader(DATA, 8, shuffle=True, num_workers=2))",
    "sampler=": "begin(); loop(ddp(), DataLoader(DATA, 8, sampler=DistributedSampler(DATA, 2, 0)))",
    "stream=": "loop(ddp(), DataLoader(Stream(), 8))",
    "fully_shard": "begin(); model = net(); fully_shard(model); loop(model, DataLoader(DATA, 8, shuffle=True))",
    "FSDP": """begin()
    model = FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))
    loop(model, DataLoader(DATA, 8, shuffle=True))""",
    "all_reduce": "begin(); loop(net(), DataLoader(DATA, 8), after=average_by_hand)",
    "accumulated": """model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number, batch in enumerate(DataLoader(DATA, 8)):
        with model.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            loss_of(model, batch).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()""",
    "SyncBatchNorm": """begin()
    loop(DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), net())), DataLoader(DATA, 8, shuffle=True))""",
    "half precision": """model, scaler = ddp(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch in DataLoader(DATA, 8):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()""",
}

ADVICE = {"sampler=": "without num_replicas and rank", "stream=": "itertools.islice"}
VARIATIONS = {"loader processes", "accumulated", "SyncBatchNorm", "half precision", "sampler=", "in order"}


def launched(kernel: Kernel, body: str, options: str = "") -> Any:
    kernel.run(SETUP)
    return kernel.run(f"def train():\n    {body}\nnotebook_launcher(train, num_processes=2{options})")


@pytest.mark.alarms("same_samples")
@pytest.mark.parametrize("name", [thorough(name) if name in VARIATIONS else name for name in WRONG])
def test_ranks_that_train_on_the_same_samples_are_reported(shared: Kernel, name: str) -> None:
    shown = " ".join(launched(shared, WRONG[name]).shown.split())
    warnings = shown.partition("warning: ")[2]
    assert warnings.count("NBLAUNCH_CHECKS") == 1
    assert "NBLAUNCH_CHECKS=-same_samples silences" in warnings
    assert "each rank trains on the same " in warnings
    assert ", in the same order (ranks 0 and 1, " in warnings
    assert ADVICE.get(name, "Pass sampler=DistributedSampler(dataset) to the DataLoader") in warnings
    assert "stopped showing" not in shown


@pytest.mark.alarms("samples_in_other_orders")
def test_ranks_that_shuffle_the_same_samples_differently_get_a_hint(shared: Kernel) -> None:
    body = "model = ddp(); torch.manual_seed(dist.get_rank()); loop(model, DataLoader(DATA, 8, shuffle=True))"
    cell = launched(shared, body)
    assert "1 hint about the training loop (samples_in_other_orders)" in cell.shown
    (hint,) = shared.run("nblaunch.last_job().hints()").value
    assert "ranks train on the same samples, each in its own order (ranks 0 and 1, " in hint
    shared.run("os.environ['NBLAUNCH_CHECKS'] = '-samples_in_other_orders'")
    try:
        assert "hint" not in launched(shared, body).shown
    finally:
        shared.run("del os.environ['NBLAUNCH_CHECKS']")


RIGHT = {
    "samplers": """begin()
    for loader in (
        DataLoader(DATA, 8, sampler=DistributedSampler(DATA)),
        DataLoader(DATA, 8, sampler=DistributedSampler(DATA, shuffle=False), num_workers=2),
        DataLoader(DATA, batch_sampler=OwnBatches(RandomSampler(DATA))),
    ):
        loop(ddp(), loader)""",
    "a last batch that begins anew": """rank, size = begin()
    class Padded:
        def __iter__(self):
            yield from itertools.islice(BatchSampler(range(192), 16, False), rank, None, size)
            yield list(range(16)) if rank else list(range(176, 192))
        def __len__(self):
            return 192 // 16 // size + 1
    loop(ddp(), DataLoader(DATA, batch_sampler=Padded()))""",
    "streams": """loop(ddp(), DataLoader(Stream(divides=True), 8))
    loop(ddp(), DataLoader(Stream(divides=True), 8, num_workers=2))""",
    "shares of a data set": """rank, size = begin()
    loop(ddp(), DataLoader(Subset(DATA, range(rank, len(DATA), size)), 8, shuffle=True))
    loop(ddp(), DataLoader(TensorDataset(*(part[rank::size] for part in DATA.tensors)), 8))
    loop(ddp(), DataLoader(Interleaved(), 8, shuffle=True))""",
    "data sets of the Hub": """from datasets import Dataset
    from datasets.distributed import split_dataset_by_node
    rank, size = begin()
    inputs, target = (part.tolist() for part in DATA.tensors)
    rows = Dataset.from_dict({"inputs": inputs, "target": target}).with_format("torch")
    stream = split_dataset_by_node(rows.to_iterable_dataset(), rank, size)
    for share in (rows.shard(size, rank), split_dataset_by_node(rows, rank, size), stream):
        loop(ddp(), DataLoader(share, 8), change=lambda batch: (batch["inputs"], batch["target"]))""",
    "augmentation": """rank, _ = begin()
    model = ddp()
    torch.manual_seed(rank)
    loop(model, DataLoader(Augmented(), 8, shuffle=False))
    torch.manual_seed(rank)
    loop(model, DataLoader(Augmented(), 8, shuffle=True, generator=torch.Generator().manual_seed(0)))
    loop(model, DataLoader(DATA, 8), change=lambda batch: (batch[0] + torch.randn(batch[0].shape), batch[1]))""",
    "experience of each rank": """rank, _ = begin()
    model = ddp()
    torch.manual_seed(rank)
    for _ in range(3):
        experience = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        loop(model, DataLoader(experience, 8, shuffle=True))
        for _ in range(8):
            loss_of(model, (torch.randn(8, 4), torch.randn(8, 1))).backward()""",
    "files of each rank": """rank, _ = begin()
    torch.save([part[200 * rank : 200 * (rank + 1)] for part in DATA.tensors], f"{PATH}-{rank}.pt")
    loop(ddp(), DataLoader(TensorDataset(*torch.load(f"{PATH}-{rank}.pt")), 8))""",
    "evaluation of all samples by each rank": """begin()
    model = ddp()
    for _ in range(3):
        loop(model, DataLoader(DATA, 8, sampler=DistributedSampler(DATA)))
        model.eval()
        with torch.no_grad():
            for batch in DataLoader(DATA, 8):
                loss_of(model, batch)
        model.train()""",
    "one batch on purpose, and four": """model = ddp()
    batch = next(iter(DataLoader(DATA, 8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(20):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    loop(model, DataLoader(Subset(DATA, range(8)), 8), epochs=20)
    loop(model, DataLoader(Subset(DATA, range(32)), 8), epochs=10)""",
    "few samples": """begin()
    few = Subset(DATA, range(5))
    loop(ddp(), DataLoader(few, 1, sampler=DistributedSampler(few, shuffle=False)), epochs=20)
    loop(ddp(), DataLoader(few, 5), epochs=20)""",
    "equal samples": """begin()
    repeated = TensorDataset(*(part[:5].repeat(80, 1) for part in DATA.tensors))
    loop(ddp(), DataLoader(repeated, 8, sampler=DistributedSampler(repeated)))
    constant = TensorDataset(torch.ones(400, 4), torch.ones(400, 1))
    loop(ddp(), DataLoader(constant, 8, sampler=DistributedSampler(constant)))""",
    "a part of each batch": """rank, size = begin()
    loop(ddp(), DataLoader(DATA, 8), change=lambda batch: [part[rank::size] for part in batch])
    loop(ddp(), DataLoader(DATA, 8, shuffle=True), change=lambda batch: [part.chunk(size)[rank] for part in batch])""",
    "a part of each sequence, and a loss of all parts": """from torch.distributed.nn.functional import all_reduce
    rank, size = begin()
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
        def forward(self, inputs):
            return self.net(inputs.chunk(size)[rank])
    def mean_of_all(model, batch):
        return all_reduce((model(batch[0]) - batch[1].chunk(size)[rank]).pow(2).mean())
    loop(DistributedDataParallel(Parts()), DataLoader(DATA, 8), loss_of=mean_of_all)
    model = Parts()
    fully_shard(model)
    loop(model, DataLoader(DATA, 8), loss_of=mean_of_all)
    loop(Parts(), DataLoader(DATA, 8), loss_of=mean_of_all, after=average_by_hand)""",
    "a loss of all samples": """from torch.distributed.nn.functional import all_gather
    begin()
    def contrast(model, batch):
        features = torch.cat(all_gather(model(batch[0])))
        return (features @ features.T).square().mean()
    loop(ddp(), DataLoader(DATA, 8, sampler=DistributedSampler(DATA)), loss_of=contrast)""",
    "tensor parallelism": """begin()
    model = parallelize_module(net(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "3": RowwiseParallel()})
    loop(model, DataLoader(DATA, 8, shuffle=True))""",
    "stages of a pipeline": """rank, _ = begin()
    stage = nn.Linear(4, 8) if rank == 0 else nn.Linear(8, 1)
    optimizer = torch.optim.SGD(stage.parameters(), 0.01)
    for inputs, target in DataLoader(DATA, 8):
        if rank == 0:
            hidden = stage(inputs)
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(8, 8)
            dist.recv(hidden, 0)
            (stage(hidden.requires_grad_()) - target).pow(2).mean().backward()
            dist.send(hidden.grad, 0)
        optimizer.step()
        optimizer.zero_grad()""",
    "a model of each rank": """rank, _ = begin()
    model = net()
    def show(model):
        dist.all_reduce(torch.ones(1))
    loop(model, DataLoader(DATA, 8), after=show)""",
    "a seed of each rank": """rank, _ = begin()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    loop(model, DataLoader(DATA, 8), after=lambda model: dist.all_reduce(torch.tensor(1.0)))""",
    "averaged weights": """rank, size = begin()
    def average(model):
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= size
    loop(net(), DataLoader(Subset(DATA, range(rank, 400, size)), 8), after=average)""",
    "two models": """begin()
    first, second = ddp(), ddp()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.01)
    labelled, more = (DataLoader(DATA, 8, sampler=DistributedSampler(DATA, seed=seed)) for seed in range(2))
    for one, other in zip(labelled, more):
        loss_of(first, one).backward()
        loss_of(second, other).backward()
        optimizer.step()
        optimizer.zero_grad()""",
    "gradients averaged twice": """begin()
    loop(ddp(), DataLoader(DATA, 8, sampler=DistributedSampler(DATA)), after=average_by_hand)""",
    "weighted samples": """rank, _ = begin()
    model = ddp()
    torch.manual_seed(rank)
    loop(model, DataLoader(DATA, 8, sampler=WeightedRandomSampler(torch.ones(400), 400)))""",
    "sparse gradients": """begin()
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(400, 4, sparse=True), net()))
    rows = TensorDataset(torch.arange(400), DATA.tensors[1])
    loop(model, DataLoader(rows, 8, sampler=DistributedSampler(rows)))""",
}


@pytest.mark.parametrize("name", RIGHT)
def test_unusual_correct_loops_get_no_warning(shared: Kernel, name: str) -> None:
    cell = launched(shared, RIGHT[name])
    assert "NBLAUNCH_CHECKS" not in cell.shown
    assert "stopped showing" not in cell.shown
    assert shared.run("nblaunch.last_job().hints()").value == []
