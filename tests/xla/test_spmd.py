"""One process that drives several XLA devices (PJRT CPU)."""

from __future__ import annotations

import pytest

from tests.kernels import Cell, Kernel
from tests.xla.conftest import StartKernel

pytestmark = [pytest.mark.usefixtures("compile_quickly")]

TRAIN = """
def train(model, strategy=None, batch_size=32):
    accelerator = Accelerator(strategy=strategy)
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    shardings = set()
    for inputs, targets in loader:
        if str(accelerator.device).startswith("xla"):
            import torch_xla
            shardings.add(torch_xla._XLAC._get_xla_sharding_spec(inputs))
        loss = F.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.num_processes, sorted(shardings), loss.item(), model.weight.flatten().tolist()
def build():
    torch.manual_seed(1)
    return nn.Linear(8, 1)
"""


@pytest.fixture(scope="module")
def training(shared: Kernel) -> Kernel:
    shared.run(TRAIN)
    return shared


def run(kernel: Kernel, num_devices: int, source: str) -> Cell:
    """Run a cell in a kernel whose workers see this many devices."""
    kernel.run(f"os.environ['CPU_NUM_DEVICES'] = '{num_devices}'")
    try:
        return kernel.run(source)
    finally:
        kernel.run("del os.environ['CPU_NUM_DEVICES']")


@pytest.mark.parametrize("num_devices", [2, 4])
def test_one_process_trains_on_all_devices(training: Kernel, num_devices: int) -> None:
    cell = run(
        training,
        num_devices,
        """
spmd = notebook_launcher(train, (build(),), strategy="spmd", threads_per_process=4)
plain = notebook_launcher(train, (build(),), num_processes=1, backend="cpu")
assert torch.allclose(torch.tensor(spmd[3]), torch.tensor(plain[3]), atol=1e-5), (spmd, plain)
spmd[:2], is_initialised()
""",
    )
    (num_processes, (sharding,)), is_initialised = cell.value
    assert num_processes == 1
    devices = ",".join(map(str, range(num_devices)))
    assert sharding == f"{{devices=[{num_devices},1]{devices}}}", "every device has its own rows"
    assert not is_initialised


def test_inline_kernel_drives_all_devices(start_xla: StartKernel) -> None:
    kernel = start_xla(CPU_NUM_DEVICES="2")
    kernel.run(TRAIN)
    call = "notebook_launcher(train, (build(),), engine='inline', strategy='spmd')[:2]"
    assert kernel.run(call).value == (1, ["{devices=[2,1]0,1}"])


def test_unsupported_spmd_launches_are_rejected(training: Kernel) -> None:
    for arguments, text in (
        ("backend='cpu', strategy='spmd'", "strategy='spmd' needs XLA devices"),
        ("strategy='spmd', num_processes=2", "one process drives all devices"),
    ):
        cell = training.run(f"notebook_launcher(train, (build(),), {arguments})", raises="ValueError")
        assert text in cell.raised.value
    cell = training.run(
        """
def late(model):
    PartialState()
    return train(model, "spmd")
from nblaunch import PartialState
notebook_launcher(late, (build(),), num_processes=1)
""",
        raises="RuntimeError",
    )
    assert "before the process first uses the device" in cell.raised.value


def test_bf16_models_compute_in_bf16(training: Kernel) -> None:
    """Values that were only sent come back unchanged there, so the types in the program count."""
    training.run(
        """
def types():
    import torch_xla
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(8, 4))
    output = model(torch.ones(4, 8).to(accelerator.device))
    return torch_xla._XLAC._get_xla_tensors_hlo([output]), type(accelerator._preparer.precision).__name__
"""
    )
    cell = run(training, 2, "notebook_launcher(types, strategy='spmd', dashboard='text')")
    program, precision = cell.value
    assert "bf16[4,8]" in program
    assert precision == "DeviceBf16Precision"
    assert "bf16: on the device, float and double are bfloat16" in cell.stdout


def test_a_batch_that_the_devices_do_not_divide_is_mentioned_once(training: Kernel) -> None:
    launch = "notebook_launcher(train, (build(), None, 6), strategy='spmd', dashboard='text')[1]"
    cell = run(training, 4, launch)
    assert cell.value == [""]
    assert cell.stdout.count("a batch of 6 rows can't be divided among 4 devices") == 1
