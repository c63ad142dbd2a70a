"""Code of torch_xla itself inside a worker: its loaders, its own idea of ranks, and what its import sets (PJRT CPU)."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel
from tests.xla.conftest import StartKernel

pytestmark = pytest.mark.timeout(120)

READ = """
def read(around):
    from torch_xla.distributed.parallel_loader import MpDeviceLoader
    accelerator = Accelerator()
    loader = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=4)
    if around:
        loader = MpDeviceLoader(accelerator.prepare(loader), accelerator.device)
    else:
        loader = accelerator.prepare(MpDeviceLoader(loader, accelerator.device))
    epochs = [[x.cpu().tolist() for (x,) in loader] for _ in range(2)]
    return epochs, len(loader), [str(x.device) for (x,) in loader][0]
"""


@pytest.mark.parametrize("around", [True, False])
def test_a_loader_of_torch_xla_is_sharded(shared: Kernel, around: bool) -> None:
    shared.run(READ)
    cell = shared.run(f"notebook_launcher(read, ({around},), 2, return_all=True)", timeout_s=60)
    for rank, (epochs, length, device) in enumerate(cell.value):
        share = [list(range(4 * start, 4 * start + 4)) for start in (rank, rank + 2)]
        assert epochs == [share, share]
        assert length == 2
        assert device == "xla:0"


def test_worlds_of_one_process_are_reported(shared: Kernel) -> None:
    shared.run(
        """
def alone():
    import torch_xla, torch_xla.runtime as xr
    torch.ones(2, device=torch_xla.device()).sum().item()
    return xr.world_size()
def joined():
    return Accelerator().num_processes
def idle():
    return 0
"""
    )
    cell = shared.run("notebook_launcher(alone, (), 2, dashboard='text')", timeout_s=60)
    assert cell.value == 1
    assert cell.stdout.count("2 workers were as many worlds of one process") == 1
    for function in ("joined", "idle"):
        cell = shared.run(f"notebook_launcher({function}, (), 2, dashboard='text')", timeout_s=60)
        assert "worlds of one process" not in cell.stdout


@pytest.mark.parametrize("question", ["xr.world_size()", "torch_xla.device()", "xr.global_ordinal()"])
def test_plain_code_joins_as_torch_xlas_launcher_does(shared: Kernel, question: str) -> None:
    """The TPU's way in, on the CPU, where the world is then one process: it is joined once, before the first answer."""
    shared.run(
        """
def ask(question):
    import torch_xla, torch_xla.runtime as xr, torch_xla.core.xla_model as xm
    from torch_xla._internal import pjrt
    from nblaunch.backends import xla_world
    from nblaunch.topology import Topology
    before, joined = torch_xla._XLAC._xla_get_default_device, []
    initialize = pjrt.initialize_multiprocess
    pjrt.initialize_multiprocess = lambda *ranks: (joined.append(ranks), initialize(*ranks))
    xla_world.join_at_first_use(Topology(3, 3, 0, 4, 4))
    early = list(joined), torch_xla._XLAC._xla_runtime_is_initialized()
    for _ in range(2):
        eval(question)
    replicas = torch_xla._XLAC._xla_get_replication_devices_count()
    is_restored = torch_xla._XLAC._xla_get_default_device is before
    return early, joined, replicas, is_restored, torch.ones(2, device="xla").sum().item()
"""
    )
    cell = shared.run(f"notebook_launcher(ask, ({question!r},), 1)", timeout_s=60)
    assert cell.value == (([], False), [(3, 4)], 1, True, 2.0)


def test_an_import_is_no_wish(start_xla: StartKernel) -> None:
    """Where it sees no TPU, torch_xla's import sets PJRT_DEVICE to CPU; transformers and accelerate import it."""
    kernel = start_xla()
    cell = kernel.run(
        """
os.environ.pop("PJRT_" + "DEVICE")
import torch_xla
def device():
    return str(Accelerator().device)
os.environ["PJRT_" + "DEVICE"], notebook_launcher(device, num_processes=1)
""",
        timeout_s=60,
    )
    assert cell.value == ("CPU", "cpu")
    kernel.run('os.environ["PJRT_DEVICE"] = "CPU"')
    assert kernel.run("notebook_launcher(device, num_processes=1)", timeout_s=60).value == "xla:0"
