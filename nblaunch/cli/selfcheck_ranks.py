"""Functions that the workers of ``nblaunch test`` run, written as a user would write them.

Functions return a list of wrong results on their rank, as sentences. They print nothing.
"""

from __future__ import annotations

import copy
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.training.accelerator import Accelerator
from nblaunch.training.strategies.fsdp2.strategy import FullyShardedDataParallelPlugin

_BATCH_SIZE = 4
_NUM_STEPS = 6
_NUM_FEATURES = 12


def collectives() -> list[str]:
    """Compare gather, reduce, broadcast, pad and gather_object with their expected results."""
    accelerator = Accelerator()
    rank, count = accelerator.process_index, accelerator.num_processes
    device = accelerator.device
    own = torch.tensor([float(rank), 10.0 * rank], device=device)
    ragged = torch.full((rank + 1,), float(rank), device=device)
    total = count * (count - 1) / 2
    pairs = [(float(other), 10.0 * other) for other in range(count)]
    padded = [[float(other)] * (other + 1) + [-1.0] * (count - other - 1) for other in range(count)]
    # The name is part of the message.
    checks = {
        "gather": (accelerator.gather(own), [number for pair in pairs for number in pair]),
        "reduce(sum)": (accelerator.reduce(own, "sum"), [total, 10 * total]),
        "reduce(mean)": (accelerator.reduce(own, "mean"), [total / count, 10 * total / count]),
        "broadcast": (
            accelerator.broadcast(own + 1, from_process=count - 1),
            [count, 10.0 * (count - 1) + 1],
        ),
        "pad_across_processes": (
            accelerator.gather(accelerator.pad_across_processes(ragged, pad_index=-1)),
            [number for row in padded for number in row],
        ),
    }
    wrong = [
        f"{name} gave {got.tolist()}, expected {[float(number) for number in expected]}"
        for name, (got, expected) in checks.items()
        if got.tolist() != [float(number) for number in expected]
    ]
    objects = accelerator.gather_object([f"rank {rank}"])
    if objects != [f"rank {other}" for other in range(count)]:
        wrong.append(f"gather_object gave {objects}")
    return wrong


def gradients(tolerance: float, is_sharded: bool = False) -> list[str]:
    """Compare training on all ranks with training in one process on all batches together.

    Args:
        tolerance: largest relative difference.
        is_sharded: every rank holds a shard of each weight (FSDP2).
    """
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin() if is_sharded else None)
    reference = build_model().to(accelerator.device)
    model = copy.deepcopy(reference)
    data = _dataset(_NUM_STEPS * _BATCH_SIZE * accelerator.num_processes)
    prepared = _train_prepared(accelerator, model, data)
    _train(reference, data, _BATCH_SIZE * accelerator.num_processes, accelerator.device)
    # With sharded weights, only the main process has all of them.
    trained = accelerator.get_state_dict(prepared)
    return _differences(dict(reference.named_parameters()), trained, tolerance, "single-process training")


def metrics() -> list[str]:
    """Check on an uneven evaluation set that each sample is gathered once, in order."""
    accelerator = Accelerator()
    length = 2 * _BATCH_SIZE * accelerator.num_processes + 3
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(length)), batch_size=_BATCH_SIZE, shuffle=False)
    )
    seen = [number for (batch,) in loader for number in accelerator.gather_for_metrics(batch).tolist()]
    if seen == list(range(length)):
        return []
    missing, extra = set(range(length)) - set(seen), len(seen) - len(set(seen))
    return [
        f"gather_for_metrics gave {len(seen)} of {length} samples: {extra} twice, missing {sorted(missing)}"
    ]


def checkpoint(folder: str, tolerance: float) -> list[str]:
    """Compare steps after save_state with the same steps after load_state, with dropout and a stateful optimizer."""
    accelerator = Accelerator()
    model = nn.Sequential(nn.Dropout(0.3), *build_model())
    data = _dataset(_NUM_STEPS * _BATCH_SIZE * accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.05), DataLoader(data, batch_size=_BATCH_SIZE)
    )
    batches = list(loader)

    def steps(chosen: Sequence[list[torch.Tensor]]) -> None:
        for features, targets in chosen:
            accelerator.backward(nn.functional.mse_loss(model(features), targets))
            optimizer.step()
            optimizer.zero_grad()

    half = len(batches) // 2
    steps(batches[:half])
    accelerator.save_state(folder)
    steps(batches[half:])
    first = {name: weights.clone() for name, weights in accelerator.get_state_dict(model).items()}
    accelerator.load_state(folder)
    steps(batches[half:])
    return _differences(first, accelerator.get_state_dict(model), tolerance, "the steps before load_state")


def train_passed_model(model: nn.Module) -> list[float]:
    """Train the model that was passed and return its first weights, for comparison with those in the kernel."""
    accelerator = Accelerator()
    data = _dataset(_BATCH_SIZE * accelerator.num_processes)
    prepared = _train_prepared(accelerator, model, data)
    return first_weights(accelerator.unwrap_model(prepared))


def raise_in_last_rank() -> None:
    """Raise in the last rank while the others wait for it."""
    accelerator = Accelerator()
    if accelerator.is_last_process:
        raise ZeroDivisionError(f"raised on purpose in rank {accelerator.process_index}")
    accelerator.wait_for_everyone()


def wait_with_child(folder: str) -> None:
    """Start a child process, as data loaders do, print ``waits`` and wait for ever; ``finally`` writes a file."""
    accelerator = Accelerator()
    rank = accelerator.process_index
    child = subprocess.Popen(["sleep", "600"])
    Path(folder, f"{rank}.child").write_text(str(child.pid))
    accelerator.wait_for_everyone()
    print("waits", flush=True)
    try:
        while True:
            time.sleep(0.05)
    finally:
        Path(folder, f"{rank}.finally").touch()


# --- helpers ---------------------------------------------------------------------------------------------------------


def build_model() -> nn.Sequential:
    """Return a small network with the same weights at every call and on every rank."""
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(_NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def first_weights(model: nn.Module) -> list[float]:
    """Return the first weights of a model as numbers."""
    return [float(number) for number in next(model.parameters()).detach().flatten()[:8].cpu()]


def _dataset(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    features = torch.randn(length, _NUM_FEATURES, generator=generator)
    return TensorDataset(features, features.sum(dim=1, keepdim=True).sin())


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _train_prepared(accelerator: Accelerator, model: nn.Module, data: TensorDataset) -> nn.Module:
    """Train on all ranks and return the prepared model."""
    prepared, optimizer, loader = accelerator.prepare(
        model, _optimizer(model), DataLoader(data, batch_size=_BATCH_SIZE)
    )
    for features, targets in loader:
        accelerator.backward(nn.functional.mse_loss(prepared(features), targets))
        optimizer.step()
        optimizer.zero_grad()
    return prepared


def _train(model: nn.Module, data: TensorDataset, batch_size: int, device: torch.device) -> None:
    optimizer = _optimizer(model)
    for features, targets in islice(DataLoader(data, batch_size=batch_size), _NUM_STEPS):
        loss = nn.functional.mse_loss(model(features.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _differences(
    expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], tolerance: float, what: str
) -> list[str]:
    """Return a sentence for each tensor of ``got`` with a difference over ``tolerance``, relative to its maximum."""
    wrong = []
    for name, weights in got.items():
        wanted = expected[name].detach().cpu()
        difference = float((wanted - weights.detach().cpu()).abs().max())
        allowed = tolerance * max(1e-3, float(wanted.abs().max()))
        if not difference <= allowed:  # also true for NaN
            wrong.append(f"{name} differs from {what} by {difference:.3g} (allowed: {allowed:.3g})")
    return wrong
