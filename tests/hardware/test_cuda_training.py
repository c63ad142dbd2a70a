"""An Accelerator on a GPU beyond a plain loop: compiled models, checkpoints, fp8, collectives on GPU tensors.

Skipped without a GPU. Two ranks share a single GPU over gloo.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs, ProfileKwargs
from nblaunch import DDPCommunicationHookType as Hook
from nblaunch.backends.gpu import CUDA
from nblaunch.utils import AORecipeKwargs, broadcast_object_list, find_executable_batch_size, gather_object
from tests.training import ranks
from tests.training.ranks import rank_server  # noqa: F401  a fixture

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(CUDA.affinity() == 0, reason="no CUDA GPU here"),
    pytest.mark.timeout(240),
]


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.2), nn.Linear(128, 128), nn.Linear(128, 10)
    )


def _prepared(**settings: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(**settings)
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), 64 // accelerator.num_processes)
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def _epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> list[float]:
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    return losses


def _train(num_epochs: int, settings: dict[str, Any]) -> list[float]:
    if "dynamo_backend" in settings:
        warnings.simplefilter("ignore")  # the compiler's imports and advice
    accelerator, *rest = _prepared(**settings)
    rest[0].eval()  # without dropout, for which compiled code draws other numbers
    return [loss for _ in range(num_epochs) for loss in _epoch(accelerator, *rest)]


@pytest.mark.parametrize("compiler", ["inductor", "cudagraphs"])
def test_compiled_models_learn_the_same(compiler: str) -> None:
    (expected,) = ranks.run(_train, 1, 2, {}, backend="cuda")
    (found,) = ranks.run(_train, 1, 2, {"dynamo_backend": compiler}, backend="cuda", timeout_s=200)
    assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("hook", [Hook.FP16, Hook.BF16, Hook.POWER_SGD])
def test_gradients_travel_compressed(hook: Hook) -> None:
    settings = {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook=hook)]}
    for losses in ranks.run(_train, 2, 4, settings, backend="cuda"):
        assert losses[-1] < losses[0] / 2


def _resume(folder: str, precision: str) -> tuple[list[float], list[float]]:
    accelerator, *rest = _prepared(mixed_precision=precision)
    _epoch(accelerator, *rest)
    accelerator.save_state(folder)
    expected = _epoch(accelerator, *rest)
    accelerator.load_state(folder)
    return expected, _epoch(accelerator, *rest)


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_brings_back_the_random_numbers_of_the_gpu(
    world_size: int, precision: str, tmp_path: Path
) -> None:
    for expected, again in ranks.run(_resume, world_size, str(tmp_path / "state"), precision, backend="cuda"):
        assert again == pytest.approx(expected, rel=1e-4), "dropout leaves out the same"


def _train_in_fp8() -> tuple[list[float], list[str]]:
    warnings.simplefilter("ignore")  # the import of torchao
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    model, optimizer = accelerator.prepare(model, optimizer)
    kinds = [type(layer).__name__ for layer in accelerator.unwrap_model(model)]
    x = torch.randn(128, 64, device=accelerator.device)
    losses = []
    for _ in range(30):
        loss = (model(x) - x.roll(1, 1)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, kinds


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_fp8() -> None:
    problem = CUDA.precision_problem("fp8")
    if problem is not None:
        pytest.skip(problem)
    ((losses, kinds),) = ranks.run(_train_in_fp8, 1, backend="cuda", timeout_s=120)
    assert kinds == ["Linear", "Float8Linear", "Float8Linear", "Linear"]
    assert losses[-1] < losses[0] / 2


def _collect() -> dict[str, Any]:
    accelerator = Accelerator()
    rank, device = accelerator.process_index, accelerator.device
    uneven = torch.full((rank + 1, 2), rank, device=device)
    padded = accelerator.gather(accelerator.pad_across_processes(uneven, pad_index=-1))
    reduced = accelerator.reduce({"a": torch.ones(2, device=device) * (rank + 1)}, "mean")
    data = TensorDataset(torch.arange(21, dtype=torch.float32))
    rows = []
    for (x,) in accelerator.prepare(DataLoader(data, 4)):
        assert x.device == device
        rows += accelerator.gather_for_metrics(x).tolist()
    dispatched = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    sent = [dispatched.gather_for_metrics(x).cpu() for (x,) in dispatched.prepare(DataLoader(data, 4))]
    words = broadcast_object_list([rank, torch.tensor(rank, device=device)])
    return {
        "padded": (padded.device == device, padded.tolist()),
        "reduced": (reduced["a"].device == device, reduced["a"].tolist()),
        "rows": rows,
        "sent": torch.cat(sent).tolist(),
        "objects": gather_object([rank]),
        "words": [int(word) for word in words],
        "flags": accelerator.gather(torch.tensor([rank == 0], device=device)).tolist(),
        "halves": accelerator.gather(torch.full((1,), rank, device=device, dtype=torch.bfloat16)).tolist(),
    }


def test_gpu_tensors_are_collected() -> None:
    for found in ranks.run(_collect, 2, backend="cuda"):
        assert found == {
            "padded": (True, [[0, 0], [-1, -1], [1, 1], [1, 1]]),
            "reduced": (True, [1.5, 1.5]),
            "rows": list(range(21)),
            "sent": list(range(21)),
            "objects": [0, 1],
            "words": [0, 0],
            "flags": [True, False],
            "halves": [0.0, 1.0],
        }


def _find_size() -> tuple[list[int], int]:
    accelerator = Accelerator()
    total = torch.cuda.get_device_properties(accelerator.device).total_memory
    tried = []

    @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        torch.empty(total // 32 * batch_size, dtype=torch.uint8, device=accelerator.device)
        return batch_size

    return tried, train()


def test_a_batch_size_that_fits_is_found() -> None:
    ((tried, found),) = ranks.run(_find_size, 1, backend="cuda")
    assert tried == [64, 32, 16][: len(tried)]
    assert found == tried[-1] <= 32


def _profile(folder: str) -> tuple[set[str], float]:
    # torch 2.11 always gives this warning
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")
    accelerator, *rest = _prepared()
    options = ProfileKwargs(activities=["cpu", "cuda"], output_trace_dir=folder, profile_memory=True)
    with accelerator.profile(options) as profiler:
        _epoch(accelerator, *rest)
    return {event.device_type.name for event in profiler.events()}, sum(
        event.self_device_time_total for event in profiler.key_averages()
    )


def test_the_profiler_sees_the_gpu(tmp_path: Path) -> None:
    ((kinds, busy_us),) = ranks.run(_profile, 1, str(tmp_path), backend="cuda")
    assert kinds == {"CPU", "CUDA"}
    assert busy_us > 0
    assert "cat" in (tmp_path / "profile_0.json").read_text()
