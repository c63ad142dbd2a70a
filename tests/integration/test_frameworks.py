"""Other frameworks inside the function: the real packages, without special settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

METHODS = ("fork", thorough("forkserver"))


# PyTorch's own examples end this way: the model outlives the group that the function destroys.
PLAIN_TORCH = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
def train():
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
    dist.destroy_process_group()
    return model.module.weight.tolist()
def agree(**options):
    values = notebook_launcher(train, num_processes=2, return_all=True, **options)
    return values[0] == values[1], dist.is_initialized()
"""


@pytest.mark.parametrize("method", METHODS)
def test_plain_torch(shared: Kernel, method: str) -> None:
    assert shared.run(f"{PLAIN_TORCH}agree(start_method={method!r})").value == (True, False)


def test_models_may_outlive_their_process_group(shared: Kernel) -> None:
    """If ranks did not first import torch._dynamo, about one in five of these launches hung."""
    cell = shared.run(f"import torch._dynamo\n{PLAIN_TORCH}[agree() for _ in range(15)]")
    assert cell.value == [(True, False)] * 15


@pytest.mark.parametrize("method", METHODS)
def test_accelerate(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
from accelerate import Accelerator as TheirAccelerator
from torch.utils.data import DataLoader, TensorDataset
def train(model):
    accelerator = TheirAccelerator()
    data = TensorDataset(torch.arange(20.0).reshape(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=5))
    seen = []
    for (batch,) in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step(); optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(batch).flatten().int().tolist()
    return accelerator.num_processes, accelerator.device.type, sorted(seen), accelerator.distributed_type.value
notebook_launcher(train, (nn.Linear(1, 1),), 2, start_method={method!r}, return_all=True)
"""
    )
    one = (2, "cpu", list(range(20)), "MULTI_CPU")
    assert cell.value == [one, one]


TORCH_XLA = {
    "__init__.py": "",
    "runtime.py": "def device_type():\n    return 'TPU'\n",
    "core/xla_model.py": "def xla_device():\n    raise RuntimeError('no TPU')\n",
    "distributed/parallel_loader.py": "class MpDeviceLoader:\n    pass\n",
    "distributed/xla_multiprocessing.py": "",
}


@pytest.mark.thorough
def test_accelerate_uses_the_cpu_beside_an_installed_torch_xla(tmp_path: Path) -> None:
    """It does so whether the function or the kernel imports it first."""
    for name, text in TORCH_XLA.items():
        file = tmp_path / "torch_xla" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    with Kernel.start(env={"NBLAUNCH_LOG_DIR": str(tmp_path)}) as kernel:
        kernel.run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})")
        cell = kernel.run(
            """
from nblaunch import notebook_launcher
def train():
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator()
    total = accelerator.reduce(torch.tensor(accelerator.process_index + 1), "sum")
    return accelerator.num_processes, accelerator.device.type, total.item()
inside, is_imported = notebook_launcher(train, (), 2, backend="cpu", return_all=True), "accelerate" in sys.modules
import accelerate
inside, is_imported, notebook_launcher(train, (), 2, backend="cpu", return_all=True)
""",
        )
    ranks = [(2, "cpu", 3)] * 2
    assert cell.value == (ranks, False, ranks)


def test_accelerate_computes_with_the_precision_of_the_launch(shared: Kernel) -> None:
    cell = shared.run(
        """
from accelerate import Accelerator as TheirAccelerator
from accelerate.state import AcceleratorState, PartialState
def train():
    return TheirAccelerator().mixed_precision
asked = [notebook_launcher(train, (), 2, precision, start_method=method)
         for method, precision in (("fork", "bf16"), ("fork", "no"), ("forkserver", "bf16"))]
asked.append(notebook_launcher(train, (), 1, "bf16", engine="inline"))
AcceleratorState._reset_state(); PartialState._reset_state()
asked, "ACCELERATE_MIXED_PRECISION" in os.environ
"""
    )
    assert cell.value == (["bf16", "no", "bf16", "bf16"], False)


@pytest.mark.parametrize("methods", [("fork",), ("forkserver",)])
@pytest.mark.thorough
def test_lightning_fabric(fresh: Kernel, methods: tuple[str, ...]) -> None:
    """It does so whether the function or the kernel imports it first."""
    fresh.run(
        f"methods = {methods!r}\n"
        """
def train():
    from lightning_fabric import Fabric
    fabric = Fabric(strategy="ddp", devices=2, accelerator="cpu")
    fabric.launch()
    model = nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.full((4, 2), fabric.global_rank + 1.0)).mean())
    optimizer.step()
    return fabric.world_size, fabric.global_rank, fabric.all_reduce(torch.tensor(1.0), reduce_op="sum").item()
def launched():
    return [notebook_launcher(train, (), 2, return_all=True, start_method=method) for method in methods]
"""
    )
    ranks = [[(2, 0, 2.0), (2, 1, 2.0)]]
    cell = fresh.run("launched(), 'lightning_fabric' in sys.modules")
    assert cell.value == (ranks, False)
    assert fresh.run("import lightning_fabric; launched()").value == ranks


@pytest.mark.parametrize("method", METHODS)
def test_data_loaders_with_worker_processes(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
from torch.utils.data import DataLoader
def train():
    sums, kept = [], globals().setdefault("kept", [])
    for is_persistent in (False, True):
        loader = DataLoader(range(40), batch_size=4, num_workers=2, persistent_workers=is_persistent,
                            multiprocessing_context="fork")
        sums += [sum(batch.sum().item() for batch in loader) for _ in range(2)]
        kept.append(iter(loader))
        next(kept[-1])              # left in the middle
    return sums
notebook_launcher(train, num_processes=2, start_method={method!r}, return_all=True)
"""
    )
    assert cell.value == [[780] * 4] * 2
    assert "Exception" not in cell.stdout
    shared.wait_for_no_processes()


def test_a_launcher_inside_the_function_is_rejected_at_once(fresh: Kernel, tmp_path: Path) -> None:
    """As in Lightning's ``Trainer(strategy="ddp_notebook")``."""
    launchers = tmp_path / "lightning" / "fabric" / "strategies" / "launchers"
    launchers.mkdir(parents=True)
    (launchers / "multiprocessing.py").write_text(
        "class _MultiProcessingLauncher:\n    def launch(self, function): return function()\n"
    )
    fresh.run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})")
    program = """
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
def train():
    return _MultiProcessingLauncher().launch(lambda: 1)
notebook_launcher(train, num_processes={})
"""
    error = fresh.run(program.format(2), raises="RuntimeError").raised
    assert "Use strategy='ddp', with devices=2" in error.value
    assert fresh.run(program.format(1)).value == 1


def test_errors_of_processes_that_the_function_starts_say_so(shared: Kernel) -> None:
    error = shared.run(
        """
import torch.multiprocessing
def fail(rank):
    raise ConnectionError("reset by peer")
def train():
    torch.multiprocessing.start_processes(fail, nprocs=1, start_method="fork")
notebook_launcher(train, num_processes=2)
""",
        raises="ProcessRaisedException",
    ).raised
    assert "nblaunch has already started one process per rank" in error.text
