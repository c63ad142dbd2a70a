"""Code that uses torch_xla directly in a worker: its own ranks, and the variables that its import sets (PJRT CPU)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

pytestmark = [pytest.mark.usefixtures("compile_quickly")]

IMPORTS = """
    import torch.distributed as dist, torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr
    import torch_xla.distributed.xla_multiprocessing as xmp
    ones = lambda: torch.ones(2, device=torch_xla.device())
"""
WORLDS = {
    "its ranks": "return xr.world_size(), ones().sum().item()",
    "its optimizer step": """
    model = nn.Linear(2, 1).to("xla")
    model(ones()).sum().backward()
    xm.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1))
""",
    "its launcher": "torch_xla.launch(lambda rank: ones().sum().item())",
    "its process group": "dist.init_process_group('xla'); dist.all_reduce(ones())",
    "its process group and rendezvous": "dist.init_process_group('xla', init_method='xla://'); ones().tolist()",
    "Accelerate": """
    from accelerate import Accelerator as TheirAccelerator
    accelerator = TheirAccelerator()
    model, optimizer = torch.nn.Linear(2, 1), None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, device=accelerator.device)).sum())
    optimizer.step()
    return accelerator.num_processes
""",
    "nothing": "pass",
    "an Accelerator": "assert Accelerator().reduce(ones()).tolist() == [2, 2]",
    "an Accelerator whose training has ended": """
    accelerator = Accelerator()
    assert accelerator.reduce(ones()).tolist() == [2, 2]
    accelerator.end_training()
""",
    "gloo": """
    dist.init_process_group()
    total = ones().cpu()
    dist.all_reduce(total)
    dist.destroy_process_group()
    assert total.tolist() == [2, 2]
""",
    "Lightning Fabric on the CPU": """
    from lightning_fabric import Fabric
    fabric = Fabric(strategy="ddp", devices=2, accelerator="cpu")
    fabric.launch()
    assert fabric.all_reduce(torch.ones(2), reduce_op="sum").tolist() == [2, 2]
""",
}


@pytest.mark.parametrize("used", WORLDS)
def test_world_variables_work(shared: Kernel, used: str) -> None:
    """On the CPU, torch_xla has no collectives across processes, so each worker is a world of one process."""
    shared.run(f"def work():{IMPORTS}    {WORLDS[used].strip()}\n")
    cell = shared.run("notebook_launcher(work, (), 2, dashboard='text')")
    assert "tensors on the XLA device" not in cell.stdout


def test_single_process_worlds_have_own_stores(shared: Kernel) -> None:
    """In a shared store, torch's barrier would count the other worlds' ranks, and might wait forever for its number."""
    shared.run(
        f"""
def work():{IMPORTS}
    import torch_xla.distributed.xla_backend
    store, rank, world_size = next(dist.rendezvous("xla://"))
    store.add("present", 1)
    Accelerator().wait_for_everyone()
    return rank, world_size, store.add("present", 0)
"""
    )
    cell = shared.run("notebook_launcher(work, (), 2, return_all=True)")
    assert cell.value == [(0, 1, 1), (0, 1, 1)]


@pytest.mark.parametrize("end", ["", "; dist.destroy_process_group()"])
def test_gloo_calls_on_xla_tensors_are_reported(shared: Kernel, end: str) -> None:
    """torch silently reduces copies of them on the host."""
    collective = "dist.init_process_group(); total = ones(); dist.all_reduce(total)"
    shared.run(f"def work():{IMPORTS}    {collective}{end}; return total.tolist()\n")
    cell = shared.run("notebook_launcher(work, (), 2, dashboard='text')")
    assert cell.value == [1, 1], "it is reduced now: the note may go"
    assert cell.stdout.count("was called with XLA tensors in a gloo group") == 1


def test_no_processes_are_started_in_a_worker(shared: Kernel) -> None:
    """xmp.spawn, which Lightning Fabric calls on a TPU, would start them: each would be another world."""
    shared.run(f"def work():{IMPORTS}    xmp.spawn(print, nprocs=1)\n")
    cell = shared.run("notebook_launcher(work, (), 2)", raises="RuntimeError")
    assert "xmp.spawn was called in a worker (rank" in cell.raised.value
    shared.run("notebook_launcher(work, (), 1)")


@pytest.mark.parametrize(
    "question",
    [
        "xr.world_size()",
        "torch_xla.device()",
        "xr.process_index()",
        "xr.global_ordinal()",
        "xm.all_reduce('sum', torch.ones(2, device='xla'))",
        "dist.is_initialized() or dist.init_process_group('xla'), dist.all_reduce(torch.ones(2, device='xla'))",
    ],
)
def test_plain_code_joins_as_torch_xlas_launcher_does(shared: Kernel, question: str) -> None:
    """The test joins as on a TPU, but on the CPU, where the world is one process: it joins once, before the first
    answer.
    """
    shared.run(
        """
def ask(question):
    import torch_xla, torch_xla.runtime as xr, torch_xla.core.xla_model as xm
    import torch.distributed as dist, torch_xla.distributed.xla_backend
    from torch_xla._internal import pjrt
    from nblaunch.backends import xla_runtime
    from nblaunch.topology import Topology
    before, joined = torch_xla._XLAC._xla_get_default_device, []
    initialize = pjrt.initialize_multiprocess
    pjrt.initialize_multiprocess = lambda *ranks: (joined.append(ranks), initialize(*ranks))
    xla_runtime.join_at_first_use(Topology(3, 3, 0, 4, 4))
    early = list(joined), torch_xla._XLAC._xla_runtime_is_initialized()
    for _ in range(2):
        eval(question)
    replicas = torch_xla._XLAC._xla_get_replication_devices_count()
    is_restored = torch_xla._XLAC._xla_get_default_device is before
    return early, joined, replicas, is_restored, torch.ones(2, device="xla").sum().item()
"""
    )
    cell = shared.run(f"notebook_launcher(ask, ({question!r},), 1)")
    assert cell.value == (([], False), [(3, 4)], 1, True, 2.0)


@pytest.mark.parametrize("order", ["import nblaunch, accelerate", thorough("import accelerate, nblaunch")])
def test_importing_torch_xla_does_not_select_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: str
) -> None:
    """Without a TPU, torch_xla's import sets PJRT_DEVICE to CPU; transformers and Accelerate import it."""
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    with Kernel.start(env={"NBLAUNCH_LOG_DIR": str(tmp_path)}) as kernel:
        cell = kernel.run(
            f"""
import os
{order}
from nblaunch import Accelerator, notebook_launcher
def device():
    return str(Accelerator().device)
os.environ["PJRT_DEVICE"], notebook_launcher(device, num_processes=1)
""",
        )
        assert cell.value == ("CPU", "cpu")
