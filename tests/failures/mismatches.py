"""Programs in which ranks call collectives that do not match.

Each is the body of a function ``train`` in a cell. Comments mark the lines that an explanation must name:

    # <- fault    of the ranks at fault, or of one side if ranks merely disagree
    # <- others   of the other ranks

The helpers that bodies use are in :data:`PREAMBLE`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PREAMBLE = """
import os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import nblaunch
from nblaunch import notebook_launcher, Accelerator

def rank():
    return int(os.environ["RANK"])

def begin(model=None, lr=0.1, **options):
    "Join the group, with collectives that go together before anything else; return what trains a model."
    dist.init_process_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(2), 0)
    torch.manual_seed(0)
    model = DDP(model or nn.Linear(4, 4), **options)
    return model, torch.optim.SGD(model.parameters(), lr=lr)

def batches(number, size=2):
    return [torch.ones(size, 4) for _ in range(number)]

def shards(model=None):
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group()
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
"""

_HEADLINE = re.compile(r"failed in rank (\d+) after")


@dataclass(frozen=True)
class Mismatch:
    """A program whose ranks disagree.

    Args:
        name: name of the program.
        body: body of ``train``.
        faulty: ranks at fault; empty if neither side is more likely to be wrong.
        says: texts that the explanation must contain, besides ranks and lines.
        num_ranks: number of ranks.
        is_quiet: whether nothing raises, hangs or dies unless ranks are compared.
    """

    name: str
    body: str
    faulty: tuple[int, ...]
    says: tuple[str, ...] = ()
    num_ranks: int = 3
    is_quiet: bool = False

    @property
    def source(self) -> str:
        """Return the cell that defines ``train``."""
        body = self.body.strip("\n")
        return f"def train():\n{body}\n"

    def lines(self, whose: str) -> list[int]:
        """Return the marked lines of the cell; ``whose`` is ``fault`` or ``others``."""
        lines = enumerate(self.source.splitlines(), start=1)
        return [number for number, line in lines if f"<- {whose}" in line]

    def problems(self, explanation: str, shown: str) -> list[str]:
        """Return what is missing or wrong in an explanation; empty if it is right.

        Args:
            explanation: the exception of the launch, with its notes.
            shown: the final table in the cell.
        """
        first = explanation.partition("\n")[0]
        found = [text for text in self.says if text not in explanation]
        lines = {*self.lines("fault"), *self.lines("others")}
        # Where the traceback ends at the only line, the explanation need not repeat it.
        text = f"{explanation}\n{shown}"
        found += [f"line {line}" for line in lines if not re.search(rf"line {line}\b", text)]
        accused = set(map(int, _HEADLINE.findall(shown)))
        if not _named(first) | accused >= set(self.faulty):
            found.append(f"ranks {self.faulty} in the headline: {first}")
        if not accused <= set(self.faulty):
            found.append(f"accuses {sorted(accused)}")
        return found


def _named(text: str) -> set[int]:
    """Return the ranks that a text names."""
    named: set[int] = set()
    for spans in re.findall(r"ranks? (\d+(?:-\d+)?(?:(?:, | and )\d+(?:-\d+)?)*)", text):
        for span in re.split(", | and ", spans):
            low, _, high = span.partition("-")
            named |= set(range(int(low), int(high or low) + 1))
    return named


PLAIN = (
    Mismatch(
        "another kind",
        """
    dist.init_process_group()
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank() == 1:
        dist.broadcast(x, 0)  # <- fault
    else:
        dist.all_reduce(x)  # <- others
""",
        (1,),
        ("broadcast", "all_reduce", "float32[4]"),
    ),
    Mismatch(
        "a barrier instead",
        """
    dist.init_process_group()
    dist.all_reduce(torch.ones(1))
    if rank() == 2:
        dist.barrier()  # <- fault
    else:
        dist.all_reduce(torch.ones(8))  # <- others
""",
        (2,),
        ("barrier", "all_reduce", "float32[8]"),
        num_ranks=4,
    ),
    Mismatch(
        "a smaller all_reduce",
        """
    dist.init_process_group()
    dist.all_reduce(torch.ones(1))
    size = 3 if rank() == 1 else 4
    dist.all_reduce(torch.ones(size))  # <- fault <- others
""",
        (1,),
        ("float32[3]", "float32[4]", "all_reduce"),
        num_ranks=4,
    ),
    Mismatch(
        "a larger all_reduce",
        """
    dist.init_process_group()
    size = 4000 if rank() == 0 else 4
    dist.all_reduce(torch.ones(size))  # <- fault
""",
        (0,),
        ("float32[4000]", "float32[4]", "all_reduce"),
    ),
    Mismatch(
        "broadcast of another size",
        """
    dist.init_process_group()
    dist.barrier()
    dist.broadcast(torch.ones(2, 5 if rank() == 2 else 3), 0)  # <- fault
""",
        (2,),
        ("float32[2, 5]", "float32[2, 3]", "broadcast"),
    ),
    Mismatch(
        "all_gather of another size",
        """
    dist.init_process_group()
    dist.barrier()
    x = torch.ones(6 if rank() == 1 else 2)
    dist.all_gather([torch.empty_like(x) for _ in range(3)], x)  # <- fault
""",
        (1,),
        ("float32[6]", "float32[2]", "all_gather"),
    ),
    Mismatch(
        "two ranks with two sizes",
        """
    dist.init_process_group()
    dist.barrier()
    x = torch.ones(6 if rank() == 1 else 2)
    dist.all_reduce(x)  # <- fault
""",
        (),
        ("float32[6]", "float32[2]", "rank 0", "rank 1"),
        num_ranks=2,
    ),
    Mismatch(
        "reduce_scatter of another size",
        """
    dist.init_process_group()
    dist.barrier()
    out = torch.ones(2 + (rank() == 2))
    dist.reduce_scatter_tensor(out, torch.ones(3 * len(out)))  # <- fault
""",
        (2,),
        ("float32[9]", "float32[6]", "reduce_scatter"),
    ),
    Mismatch(
        "double instead of float",
        """
    dist.init_process_group()
    x = torch.ones(4, dtype=torch.float64 if rank() == 1 else torch.float32)
    dist.all_reduce(x)  # <- fault
""",
        (1,),
        ("float64[4]", "float32[4]"),
    ),
    Mismatch(
        "integers of the same size",
        """
    dist.init_process_group()
    x = torch.ones(4, dtype=torch.int32 if rank() == 1 else torch.float32)
    dist.all_reduce(x)  # <- fault
    time.sleep(3)
""",
        (1,),
        ("int32[4]", "float32[4]"),
        is_quiet=True,
    ),
    Mismatch(
        "broadcast into integers",
        """
    dist.init_process_group()
    x = torch.ones(4, dtype=torch.int32 if rank() == 3 else torch.float32)
    dist.broadcast(x, 0)  # <- fault
    time.sleep(3)
""",
        (3,),
        ("int32[4]", "float32[4]", "broadcast"),
        num_ranks=4,
        is_quiet=True,
    ),
    Mismatch(
        "half with bfloat16, at the end",
        """
    dist.init_process_group()
    x = torch.ones(4, dtype=torch.float16 if rank() == 0 else torch.bfloat16)
    dist.all_reduce(x)  # <- fault
""",
        (0,),
        ("float16[4]", "bfloat16[4]"),
        is_quiet=True,
    ),
    Mismatch(
        "sum with max",
        """
    dist.init_process_group()
    for step in range(30):
        op = dist.ReduceOp.MAX if rank() == 1 and step == 20 else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(4), op=op)  # <- fault
        time.sleep(0.1)
""",
        (1,),
        ("MAX", "SUM", "all_reduce"),
        is_quiet=True,
    ),
    Mismatch(
        "reduce with another reduction",
        """
    dist.init_process_group()
    op = dist.ReduceOp.PRODUCT if rank() == 2 else dist.ReduceOp.SUM
    dist.reduce(torch.ones(4), 0, op=op)  # <- fault
    time.sleep(3)
""",
        (2,),
        ("PRODUCT", "SUM", "reduce"),
        num_ranks=4,
        is_quiet=True,
    ),
    Mismatch(
        "broadcast from another root",
        """
    dist.init_process_group()
    dist.barrier()
    dist.broadcast(torch.ones(4), 1 if rank() == 1 else 0)  # <- fault
    dist.barrier()
    time.sleep(3)
""",
        (1,),
        ("root 1", "root 0", "broadcast"),
    ),
    Mismatch(
        "reduce to another root",
        """
    dist.init_process_group()
    dist.barrier()
    dist.reduce(torch.ones(4), 2 if rank() == 2 else 0)  # <- fault
    dist.barrier()
""",
        (2,),
        ("root 2", "root 0", "reduce"),
        num_ranks=4,
    ),
    Mismatch(
        "gather to another root",
        """
    dist.init_process_group()
    root = rank() if rank() == 1 else 0
    x = torch.ones(4)
    parts = [torch.empty(4) for _ in range(3)] if root == rank() else None
    dist.gather(x, parts, dst=root)  # <- fault
    dist.barrier()
""",
        (1,),
        ("root 1", "root 0", "gather"),
    ),
    Mismatch(
        "scatter from another root",
        """
    dist.init_process_group()
    root = rank() if rank() == 2 else 0
    parts = [torch.ones(4) for _ in range(3)] if root == rank() else None
    dist.scatter(torch.empty(4), parts, src=root)  # <- fault
    dist.barrier()
    time.sleep(3)
""",
        (2,),
        ("root 2", "root 0", "scatter"),
    ),
    Mismatch(
        "two collectives in another order",
        """
    dist.init_process_group()
    x, y = torch.ones(4), torch.ones(6)
    if rank() == 3:
        dist.broadcast(y, 0)  # <- fault
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)  # <- others
        dist.broadcast(y, 0)
""",
        (3,),
        ("broadcast", "all_reduce", "float32[6]", "float32[4]"),
        num_ranks=4,
    ),
    Mismatch(
        "two sizes in another order",
        """
    dist.init_process_group()
    x, y = torch.ones(4), torch.ones(6)
    for one in (y, x) if rank() == 1 else (x, y):
        dist.all_reduce(one)  # <- fault
""",
        (1,),
        ("float32[6]", "float32[4]"),
    ),
    Mismatch(
        "another group",
        """
    dist.init_process_group()
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine = first if rank() < 2 else second
    dist.all_reduce(torch.ones(2), group=mine)
    group = mine if rank() == 1 else None
    dist.all_reduce(torch.ones(4), group=group)  # <- fault <- others
""",
        (1,),
        ("ranks 0 and 1", "all_reduce"),
        num_ranks=4,
    ),
    Mismatch(
        "a group with the same ranks",
        """
    dist.init_process_group()
    twin = dist.new_group()
    dist.barrier()
    dist.all_reduce(torch.ones(4), group=twin if rank() == 2 else None)  # <- fault
""",
        (2,),
        ("all_reduce", "group"),
    ),
    Mismatch(
        "a group that one member does not make",
        """
    dist.init_process_group()
    dist.barrier()
    if rank() != 0:
        group = dist.new_group([0, 1])  # <- others
    dist.all_reduce(torch.ones(4))  # <- fault
""",
        (0,),
        ("new_group with ranks 0 and 1", "all_reduce"),
    ),
    Mismatch(
        "groups made in another order",
        """
    dist.init_process_group()
    pairs = [(0, 1), (1, 2)]
    if rank() == 2:
        pairs.reverse()
    for pair in pairs:
        dist.new_group(pair)  # <- fault
    dist.barrier()
""",
        (2,),
        ("new_group with ranks 0 and 1", "new_group with ranks 1 and 2"),
        num_ranks=4,
    ),
    Mismatch(
        "transfers in a ring, of which one is missing",
        """
    dist.init_process_group()
    size = dist.get_world_size()
    transfers = [dist.P2POp(dist.irecv, torch.empty(4), (rank() - 1) % size)]
    if rank() != 1:
        transfers.append(dist.P2POp(dist.isend, torch.ones(4), (rank() + 1) % size))
    for work in dist.batch_isend_irecv(transfers):
        work.wait()  # <- others
    dist.barrier()  # <- fault
""",
        (),
        ("recv float32[4]", "from rank 1", "has not called send"),
    ),
    Mismatch(
        "all receive first",
        """
    dist.init_process_group()
    dist.recv(torch.empty(3), (rank() - 1) % 3)  # <- fault
    dist.send(torch.ones(3), (rank() + 1) % 3)
""",
        (),
        ("wait for each other", "from rank 2"),
    ),
    Mismatch(
        "a rank that skips one and returns",
        """
    dist.init_process_group()
    dist.barrier()
    if rank() != 1:
        dist.all_reduce(torch.ones(4))  # <- others
""",
        (1,),
        ("all_reduce", "returned"),
    ),
    Mismatch(
        "a rank that skips one and goes on",
        """
    dist.init_process_group()
    dist.barrier()
    if rank() != 2:
        dist.all_reduce(torch.ones(4))  # <- others
    dist.barrier()  # <- fault
""",
        (2,),
        ("all_reduce", "barrier"),
        num_ranks=4,
    ),
    Mismatch(
        "a rank that does not come",
        """
    dist.init_process_group()
    dist.barrier()
    if rank() == 1:
        while not os.path.exists("/nowhere"):
            time.sleep(0.01)  # <- fault
    dist.all_reduce(torch.ones(4))  # <- others
""",
        (1,),
        ("all_reduce",),
    ),
    Mismatch(
        "a loop left early",
        """
    dist.init_process_group()
    for step in range(6):
        dist.all_reduce(torch.ones(4))  # <- others
        if rank() == 1 and step == 2:
            break
    dist.barrier()  # <- fault
""",
        (1,),
        ("all_reduce", "barrier", "loop"),
    ),
    Mismatch(
        "a function left early",
        """
    dist.init_process_group()
    for step in range(6):
        dist.all_reduce(torch.ones(4))  # <- others
        if rank() == 3 and step == 2:
            return
""",
        (3,),
        ("all_reduce", "returned"),
        num_ranks=4,
    ),
    Mismatch(
        "the main process alone",
        """
    dist.init_process_group()
    dist.barrier()
    if rank() == 0:
        x = torch.ones(4)
        dist.all_gather([torch.empty(4) for _ in range(3)], x)  # <- fault
""",
        (0,),
        ("all_gather", "if rank() == 0", "alone"),
    ),
    Mismatch(
        "the main process alone, of two",
        """
    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 0:
        dist.barrier()  # <- fault
    dist.all_reduce(torch.ones(4))  # <- others
""",
        (0,),
        ("barrier", "if dist.get_rank() == 0"),
        num_ranks=2,
    ),
    Mismatch(
        "objects of the main process alone",
        """
    dist.init_process_group()
    dist.barrier()
    if rank() == 0:
        dist.all_gather_object([None] * 3, "one")  # <- fault
    dist.all_reduce(torch.ones(4))  # <- others
""",
        (0,),
        ("all_gather_object", "all_reduce", "if rank() == 0"),
    ),
    Mismatch(
        "objects from another root",
        """
    dist.init_process_group()
    dist.barrier()
    things = ["one"]
    dist.broadcast_object_list(things, src=1 if rank() == 1 else 0)  # <- fault
    dist.barrier()
""",
        (1,),
        ("broadcast_object_list", "root 1", "root 0"),
    ),
    Mismatch(
        "works that are waited for later",
        """
    dist.init_process_group()
    x = torch.ones(5 if rank() == 2 else 4)
    works = [dist.all_reduce(torch.ones(4), async_op=True)]
    works.append(dist.all_reduce(x, async_op=True))  # <- fault
    for work in works:
        work.wait()
""",
        (2,),
        ("float32[5]", "float32[4]"),
    ),
    Mismatch(
        "splits that do not fit",
        """
    dist.init_process_group()
    splits = [1, 1, 2] if rank() == 0 else [1, 1, 1]
    x = torch.ones(sum(splits))
    out = torch.empty(3)
    dist.all_to_all_single(out, x, [1, 1, 1], splits)  # <- fault
""",
        (),
        ("all_to_all_single", "rank 0", "rank 2"),
    ),
)

OF_DDP = (
    Mismatch(
        "DDP: one batch fewer, then the end",
        """
    model, optimizer = begin()
    for x in batches(5 if rank() == 1 else 6):
        optimizer.zero_grad()
        model(x).sum().backward()  # <- others
        optimizer.step()
""",
        (1,),
        ("5 batches", "returned", "join_uneven_inputs"),
    ),
    Mismatch(
        "DDP: one batch fewer, then a barrier",
        """
    model, optimizer = begin()
    for x in batches(5 if rank() == 2 else 6):
        optimizer.zero_grad()
        model(x).sum().backward()  # <- others
        optimizer.step()
    dist.barrier()  # <- fault
""",
        (2,),
        ("5 batches", "barrier", "join_uneven_inputs"),
        num_ranks=4,
    ),
    Mismatch(
        "DDP: the main process reduces alone",
        """
    model, optimizer = begin()
    for step, x in enumerate(batches(6)):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()  # <- others
        optimizer.step()
        if step == 2 and rank() == 0:
            dist.all_reduce(loss.detach())  # <- fault
""",
        (0,),
        ("all_reduce", "backward", "rank() == 0"),
    ),
    Mismatch(
        "DDP: another dtype",
        """
    model, optimizer = begin(nn.Linear(4, 4, dtype=torch.float64 if rank() == 1 else torch.float32))
    for x in batches(4):
        model(x.to(model.module.weight.dtype)).sum().backward()
""",
        (1,),
        ("float64", "float32", "DistributedDataParallel"),
    ),
    Mismatch(
        "DDP: another model",
        """
    model, optimizer = begin(nn.Linear(4, 5 if rank() == 2 else 4))
    for x in batches(4):
        model(x).sum().backward()
""",
        (2,),
        ("25 elements", "20 elements", "DistributedDataParallel"),
    ),
    Mismatch(
        "DDP: an evaluation of the main process alone",
        """
    model, optimizer = begin()
    for epoch in range(3):
        for x in batches(3):
            model(x).sum().backward()  # <- others
            optimizer.step()
        if rank() == 0:
            total = torch.zeros(1)
            for x in batches(2):
                total += model.module(x).sum().detach()
            dist.all_reduce(total)  # <- fault
""",
        (0,),
        ("all_reduce", "backward", "if rank() == 0"),
        num_ranks=4,
    ),
    Mismatch(
        "DDP: no_sync on one rank",
        """
    from contextlib import nullcontext
    model, optimizer = begin()
    for step, x in enumerate(batches(6)):
        with model.no_sync() if rank() == 1 and step == 3 else nullcontext():
            loss = model(x).sum()  # <- fault
        loss.backward()
        optimizer.step()
""",
        (1,),
        ("no_sync",),
    ),
    Mismatch(
        "DDP: a step more of the main process",
        """
    model, optimizer = begin(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for x in batches(3):
        model(x).sum().backward()
        optimizer.step()
    if rank() == 0:
        model(torch.ones(2, 4)).sum().backward()  # <- fault
    dist.barrier()  # <- others
""",
        (0,),
        ("barrier", "if rank() == 0"),
    ),
    Mismatch(
        "DDP: a parameter unused on one rank",
        """
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        def forward(self, x, skips):
            return self.first(x) if skips else self.first(x) + self.second(x)
    model, optimizer = begin(Two())
    for step in range(4):
        model(torch.ones(2, 4), rank() == 1 and step == 2).sum().backward()  # <- fault
        optimizer.step()
        dist.all_reduce(torch.ones(()))
""",
        (1,),
        ("backward 3", "find_unused_parameters"),
    ),
    Mismatch(
        "DDP: two models in another order",
        """
    models = [begin()[0], DDP(nn.Linear(4, 9))]
    for step in range(3):
        if rank() == 1 and step == 1:
            models.reverse()
        for model in models:
            model(torch.ones(2, 4)).sum().backward()  # <- fault
""",
        (1,),
        ("forward 3", "model 1", "model 2"),
    ),
    Mismatch(
        "DDP: a reduction of one rank in a helper",
        """
    model, optimizer = begin()
    def evaluate():
        dist.all_reduce(torch.ones(1))  # <- fault
    for step in range(6):
        model(torch.ones(2, 4)).sum().backward()  # <- others
        optimizer.step()
        if rank() == 2 and step == 3:
            evaluate()
""",
        (2,),
        ("rank 2 alone called all_reduce float32[1]",),
    ),
    Mismatch(
        "DDP: another learning rate",
        """
    model, optimizer = begin(lr=0.2 if rank() == 1 else 0.1)
    for x in batches(40):
        model(x).sum().backward()
        optimizer.step()  # <- fault
        time.sleep(0.1)
""",
        (1,),
        ("0.2", "0.1", "learning rate"),
        is_quiet=True,
    ),
)

OF_ACCELERATOR = (
    Mismatch(
        "Accelerator: gather of another size",
        """
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    accelerator.gather(torch.ones(3 if rank() == 1 else 2))  # <- fault
""",
        (1,),
        ("gather", "[3]", "[2]", "float32"),
    ),
    Mismatch(
        "Accelerator: gather under is_main_process",
        """
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step, x in enumerate(batches(6)):
        loss = model(x).sum()
        accelerator.backward(loss)  # <- others
        optimizer.step()
        if step == 3 and accelerator.is_main_process:
            accelerator.gather(loss.detach())  # <- fault
""",
        (0,),
        ("gather", "accelerator.is_main_process", "alone"),
    ),
    Mismatch(
        "Accelerator: a barrier under is_main_process",
        """
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()  # <- fault
    accelerator.reduce(torch.ones(3))  # <- others
""",
        (0,),
        ("wait_for_everyone", "if accelerator.is_main_process", "reduce"),
        num_ranks=2,
    ),
    Mismatch(
        "Accelerator: unequal data",
        """
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for x in batches(4 if rank() == 3 else 5):
        accelerator.backward(model(x).sum())  # <- others
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()  # <- fault
""",
        (3,),
        ("4 batches", "even_batches", "wait_for_everyone"),
        num_ranks=4,
    ),
    Mismatch(
        "Accelerator: a prepared loop left early",
        """
    accelerator = Accelerator(cpu=True)
    data = torch.utils.data.DataLoader(torch.ones(24, 4), batch_size=2)
    model = nn.Linear(4, 4)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    for step, x in enumerate(data):
        accelerator.backward(model(x).sum())  # <- others
        optimizer.step()
        optimizer.zero_grad()
        if rank() == 1 and step == 1:
            break
    accelerator.wait_for_everyone()  # <- fault
""",
        (1,),
        ("2 batches", "wait_for_everyone"),
    ),
    Mismatch(
        "Accelerator: reduce instead of gather",
        """
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    if rank() == 1:
        accelerator.reduce(torch.ones(4))  # <- fault
    else:
        accelerator.gather(torch.ones(4))  # <- others
""",
        (1,),
        ("reduce", "gather"),
    ),
    Mismatch(
        "Accelerator: metrics of the main process alone",
        """
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(12, 4), batch_size=2))
    for x in data:
        if accelerator.is_main_process:
            accelerator.gather_for_metrics(x)  # <- fault
    accelerator.wait_for_everyone()  # <- others
""",
        (0,),
        ("gather_for_metrics", "if accelerator.is_main_process", "wait_for_everyone"),
    ),
    Mismatch(
        "Accelerator: objects of one rank alone",
        """
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    if accelerator.process_index == 2:
        accelerator.gather_for_metrics(["x"])  # <- fault
    accelerator.reduce(torch.ones(3))  # <- others
""",
        (2,),
        ("gather_for_metrics", "reduce"),
        num_ranks=4,
    ),
)

OF_FSDP2 = (
    Mismatch(
        "Accelerator: objects where others gather tensors",
        """
    accelerator = Accelerator()
    if rank() == 1:
        accelerator.gather_for_metrics(["text"], use_gather_object=True)  # <- fault
    else:
        accelerator.gather_for_metrics(torch.ones(3))  # <- others
""",
        (1,),
        ("gather_for_metrics",),
    ),
    Mismatch(
        "FSDP2: one batch fewer",
        """
    model, optimizer = shards()
    for x in batches(3 if rank() == 1 else 4):
        model(x).sum().backward()
        optimizer.step()
""",
        (1,),
        ("3 batches", "returned"),
    ),
    Mismatch(
        "FSDP2: a forward of the main process alone",
        """
    model, optimizer = shards()
    for x in batches(3):
        model(x).sum().backward()
        optimizer.step()
    if rank() == 0:
        model(torch.ones(2, 4))  # <- fault
    dist.barrier()  # <- others
""",
        (0,),
        ("all_gather", "barrier", "if rank() == 0"),
    ),
    Mismatch(
        "FSDP2: another layer",
        """
    model, optimizer = shards(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8 if rank() == 2 else 4)))
    for x in batches(3):
        model(x).sum().backward()  # <- fault
        optimizer.step()
""",
        (2,),
        ("float32",),
    ),
    Mismatch(
        "FSDP2: another dtype",
        """
    model, optimizer = shards(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).to(
        torch.bfloat16 if rank() == 1 else torch.float16))
    for x in batches(30):
        model(x.to(model[0].weight.dtype)).sum().backward()  # <- fault
        time.sleep(0.1)
""",
        (1,),
        ("bfloat16", "float16"),
        is_quiet=True,
    ),
    Mismatch(
        "FSDP2: a norm on one rank alone",
        """
    model, optimizer = shards()
    for x in batches(3):
        model(x).sum().backward()
        if rank() == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- fault
        optimizer.step()
""",
        (0,),
        ("clip_grad_norm_", "if rank() == 0"),
    ),
)

MISMATCHES = (*PLAIN, *OF_DDP, *OF_ACCELERATOR, *OF_FSDP2)
