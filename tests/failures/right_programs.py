"""Correct programs that look odd: ranks do different things, and nblaunch must not report it.

Each is the body of a function ``train`` in a cell, as in ``mismatches.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RightProgram:
    """A program that ends well."""

    name: str
    body: str
    num_ranks: int = 3

    @property
    def source(self) -> str:
        """Return the cell that defines ``train``."""
        body = self.body.strip("\n")
        return f"def train():\n{body}\n    return 'right'\n"


RIGHT_PROGRAMS = (
    RightProgram(
        "groups that do different things",
        """
    dist.init_process_group()
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    for _ in range(5):
        if rank() < 2:
            dist.all_reduce(torch.ones(4), group=first)
        else:
            dist.broadcast(torch.ones(7, dtype=torch.int64), 2, group=second)
            dist.barrier(group=second)
    dist.barrier()
""",
        4,
    ),
    RightProgram(
        "groups that only their members make",
        """
    dist.init_process_group()
    mine = {}
    for pair in ((0, 1), (2, 3)):
        if rank() in pair:
            mine[pair] = dist.new_group(list(pair), use_local_synchronization=True)
    for pair, group in mine.items():
        dist.all_reduce(torch.ones(sum(pair)), group=group)
    dist.barrier()
""",
        4,
    ),
    RightProgram(
        "a default group that is destroyed and made again",
        """
    for number in range(1, 4):
        dist.init_process_group()
        total = torch.ones(number)
        dist.all_reduce(total)
        assert total.tolist() == [3.0] * number
        dist.barrier()
        dist.destroy_process_group()
""",
    ),
    RightProgram(
        "twins of a group",
        """
    dist.init_process_group()
    twins = [dist.new_group() for _ in range(3)]
    for number, twin in enumerate(twins):
        dist.all_reduce(torch.ones(number + 1), group=twin)
    for number, twin in reversed(list(enumerate(twins))):
        dist.broadcast(torch.ones(number + 1), 0, group=twin)
""",
    ),
    RightProgram(
        "uneven inputs with join",
        """
    model, optimizer = begin()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for epoch in range(3):
        with model.join():
            for x in batches(3 + 2 * rank()):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        schedule.step()
""",
    ),
    RightProgram(
        "a pipeline of sends",
        """
    dist.init_process_group()
    for number in range(1, 4):
        x = torch.ones(number * 10)
        if rank() > 0:
            dist.recv(x, rank() - 1)
        if rank() < 2:
            dist.send(x, rank() + 1)
    dist.barrier()
""",
    ),
    RightProgram(
        "a ring of exchanges",
        """
    dist.init_process_group()
    sent, received = torch.ones(4), torch.empty(4)
    ops = [dist.P2POp(dist.isend, sent, (rank() + 1) % 3), dist.P2POp(dist.irecv, received, (rank() - 1) % 3)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if rank() == 0:
        dist.isend(torch.ones(2), 2).wait()
    elif rank() == 2:
        dist.recv(torch.empty(2))
    dist.barrier()
""",
    ),
    RightProgram(
        "works that are waited for later",
        """
    dist.init_process_group()
    works = [dist.all_reduce(torch.ones(size), async_op=True) for size in range(1, 20)]
    for work in works if rank() else reversed(works):
        work.wait()
""",
    ),
    RightProgram(
        "groups in another order, not waited for",
        """
    dist.init_process_group()
    first, second = dist.new_group(), dist.new_group()
    x, y = torch.ones(3), torch.ones(5)
    works = [dist.all_reduce(x, group=first, async_op=True), dist.all_reduce(y, group=second, async_op=True)]
    if rank() == 1:
        works.reverse()
    for work in works:
        work.wait()
""",
    ),
    RightProgram(
        "the same collectives on different lines",
        """
    dist.init_process_group()
    for _ in range(3):
        if rank() == 0:
            dist.barrier()
            dist.all_reduce(torch.ones(3))
        else:
            dist.barrier()
            dist.all_reduce(torch.zeros(3))
""",
    ),
    RightProgram(
        "a monitored barrier",
        """
    from datetime import timedelta
    dist.init_process_group("gloo")
    if rank() == 1:
        time.sleep(0.3)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
""",
    ),
    RightProgram(
        "objects of different sizes",
        """
    dist.init_process_group()
    for number in range(4):
        dist.all_gather_object([None] * 3, "x" * (1 + 1000 * rank() * number))
        dist.gather_object("y" * (rank() + 1), [None] * 3 if rank() == 1 else None, dst=1)
        things = ["z" * 5000, number] if rank() == 0 else [None, None]
        dist.broadcast_object_list(things, src=0)
        out = [None]
        dist.scatter_object_list(out, ["a" * 10 ** one for one in range(3)] if rank() == 2 else None, src=2)
""",
    ),
    RightProgram(
        "unequal parts",
        """
    dist.init_process_group()
    sent = [rank() + 1 + peer for peer in range(3)]
    received = [peer + 1 + rank() for peer in range(3)]
    dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)
    out = torch.empty(2)
    dist.reduce_scatter(out, [torch.ones(2) for _ in range(3)])
""",
    ),
    RightProgram(
        "shapes with as many elements",
        """
    dist.init_process_group()
    dist.all_reduce(torch.ones(2, 3) if rank() == 0 else torch.ones(6))
    dist.broadcast(torch.ones(12) if rank() == 0 else torch.ones(3, 4), 0)
""",
    ),
    RightProgram(
        "arguments that one rank passes wrongly, and catches",
        """
    dist.init_process_group()
    if rank() == 1:
        for wrong in ("no tensor", torch.ones(2, device="meta")):
            try:
                dist.all_reduce(wrong)
            except TypeError:
                pass
        try:
            dist.all_gather([torch.empty(2)], torch.ones(2))
        except (ValueError, RuntimeError):
            time.sleep(0.5)
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(3), 0)
""",
    ),
    RightProgram(
        "the main process works while others wait",
        """
    dist.init_process_group()
    for _ in range(2):
        if rank() == 0:
            time.sleep(0.7)
        dist.barrier()
""",
    ),
    RightProgram(
        "gradient accumulation",
        """
    from contextlib import nullcontext
    model, optimizer = begin()
    for step, x in enumerate(batches(8)):
        with model.no_sync() if step % 4 != 3 else nullcontext():
            model(x).sum().backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    RightProgram(
        "two optimizers",
        """
    model, first = begin(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    second = torch.optim.Adam(model.parameters(), lr=0.01)
    for x in batches(4):
        for optimizer in (first, second):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
""",
    ),
    RightProgram(
        "a sweep over learning rates",
        """
    dist.init_process_group()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank() + 1))
    for x in batches(5 + rank()):
        model(x).sum().backward()
        optimizer.step()
    dist.all_gather_object([None] * 3, rank())
""",
    ),
    RightProgram(
        "an evaluation of the main process",
        """
    model, optimizer = begin()
    for epoch in range(2):
        for x in batches(3):
            model(x).sum().backward()
            optimizer.step()
        if rank() == 0:
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
                model.module(torch.ones(2, 4))
            model.train()
""",
    ),
    RightProgram(
        "branches of a model",
        """
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        def forward(self, x):
            return self.layers[rank()](x)
    model, optimizer = begin(Branches(), find_unused_parameters=True)
    for x in batches(4):
        model(x).sum().backward()
        optimizer.step()
""",
    ),
    RightProgram(
        "a group that is left and joined again",
        """
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()
    store = dist.PrefixStore("again", dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    dist.init_process_group("gloo", store=store, rank=rank(), world_size=3)
    dist.all_reduce(torch.ones(2))
    dist.broadcast(torch.ones(3), 0)
""",
    ),
    RightProgram(
        "hundreds of shapes",
        """
    dist.init_process_group()
    for size in range(1, 400):
        dist.all_reduce(torch.ones(size), async_op=True).wait()
        dist.broadcast(torch.ones(size, 2), size % 3)
""",
    ),
    RightProgram(
        "collectives that are put together",
        """
    dist.init_process_group()
    from torch.distributed.distributed_c10d import _coalescing_manager
    with _coalescing_manager():
        for size in (3, 4):
            dist.all_reduce(torch.ones(size))
    dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2))
""",
    ),
    RightProgram(
        "two threads with a group each",
        """
    import threading
    dist.init_process_group()
    groups = [dist.new_group(), dist.new_group()]
    def reduce(group, size):
        for _ in range(50):
            dist.all_reduce(torch.ones(size), group=group)
    threads = [threading.Thread(target=reduce, args=(group, size)) for size, group in enumerate(groups, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
""",
    ),
    RightProgram(
        "Accelerator: an odd last batch",
        """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.utils.data.DataLoader(torch.ones(11, 4), batch_size=2)
    model = nn.Linear(4, 4)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    for x in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.gather_for_metrics(x)
    accelerator.pad_across_processes(torch.ones(rank() + 1))
    accelerator.gather_for_metrics(["x" * rank()], use_gather_object=True)
    if accelerator.is_main_process:
        time.sleep(0.3)
    accelerator.wait_for_everyone()
""",
    ),
    RightProgram(
        "FSDP2: steps, a norm, and a whole state",
        """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    model, optimizer = shards()
    for x in batches(3):
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    dist.barrier()
""",
    ),
)
