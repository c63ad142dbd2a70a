"""bf16 on XLA devices (PJRT CPU): the types of float and double on the device, and detecting a fallback."""

from __future__ import annotations

import pytest

from nblaunch.backends.xla import BACKEND
from tests.kernels import Kernel

PROBE = """
def probe(mixed_precision=None, downcast=False, first=False):
    if first:
        torch.ones(1, device="xla").cpu()            # a tensor before the Accelerator: the settings come too late
    accelerator = Accelerator(mixed_precision=mixed_precision, downcast_bf16=downcast)
    def there_and_back(number, dtype):
        return torch.tensor([number], dtype=dtype).to(accelerator.device).cpu().item()
    layer = accelerator.prepare(nn.Linear(2, 2))
    with torch.no_grad():
        output = layer(torch.ones(1, 2, device=accelerator.device))
    return (
        accelerator.mixed_precision,
        there_and_back(1 / 3, torch.float32),
        there_and_back(1 / 3, torch.float64),
        there_and_back(100000.123, torch.float64),
        str(output.dtype),
        type(accelerator._preparer.precision).__name__,
    )
"""

F32, F64, BF16 = 0.3333333432674408, 1 / 3, 0.333984375

TABLE = {
    "None": ("no", F32, F64, 100000.123),
    "'bf16'": ("bf16", BF16, BF16, 99840.0),
    "'bf16', True": ("bf16", BF16, F32, 100000.125),
}


@pytest.fixture(scope="module")
def probing(shared: Kernel) -> Kernel:
    shared.run(PROBE)
    return shared


@pytest.mark.parametrize("arguments", TABLE)
def test_the_device_uses_the_chosen_precision(probing: Kernel, arguments: str) -> None:
    cell = probing.run(f"notebook_launcher(lambda: probe({arguments}), num_processes=1, dashboard='text')")
    *numbers, dtype, kind = cell.value
    assert tuple(numbers) == TABLE[arguments]
    assert dtype == "torch.float32"
    says = {
        "None": None,
        "'bf16'": "bf16: on the device, float and double are bfloat16 (XLA_USE_BF16)",
        "'bf16', True": "bf16: on the device, float is bfloat16 and double is float32 (XLA_DOWNCAST_BF16)",
    }[arguments]
    assert says is None or says in cell.stdout
    assert kind == ("Precision" if says is None else "DeviceBf16Precision")


def test_the_head_of_the_table_says_which_bf16_is_active(probing: Kernel) -> None:
    cell = probing.run("notebook_launcher(lambda: probe('bf16', True), num_processes=1, dashboard='html')")
    head = cell.displays[0].data["text/plain"]
    assert "(xla, fork, bf16: float is bfloat16 and double is float32)" in head


def test_the_launchers_precision_is_the_default(probing: Kernel) -> None:
    cell = probing.run("notebook_launcher(probe, num_processes=1, mixed_precision='bf16')")
    assert cell.value[:4] == TABLE["'bf16'"]


def test_late_settings_are_reported(probing: Kernel) -> None:
    cell = probing.run(
        "notebook_launcher(lambda: probe('bf16', False, True), num_processes=1, dashboard='text')",
    )
    name, single, double, _, dtype, kind = cell.value
    assert (name, single, double, kind) == ("bf16", F32, F64, "Bf16Precision")
    assert dtype == "torch.float32", "outputs come back in full"
    assert "bf16: autocast, with weights in float32" in cell.stdout


def test_fp16_is_rejected(probing: Kernel) -> None:
    cell = probing.run(
        "notebook_launcher(probe, num_processes=1, mixed_precision='fp16')", raises="ValueError"
    )
    assert "use mixed_precision='bf16'" in cell.raised.value


def test_training_in_bf16_learns(shared: Kernel) -> None:
    cell = shared.run(
        """
def train(model):
    accelerator = Accelerator(mixed_precision="bf16", downcast_bf16=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).to(accelerator.device)
    y = (x.sum(1, keepdim=True) > 0).float()
    losses = []
    for _ in range(30):
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weight = next(model.parameters()).detach().cpu()
    return losses[0], losses[-1], bool((weight == weight.bfloat16().float()).all())
notebook_launcher(train, (nn.Linear(4, 1),), num_processes=2)
""",
    )
    first, last, is_bf16 = cell.value
    assert last < first / 2
    assert is_bf16, "weights are stored as bfloat16 too"


def test_torch_xla_itself_autocasts_to_bf16_only_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is why fp16 is rejected."""
    import torch
    import torch_xla.amp
    import torch_xla.core.xla_model as xm

    was_in_use = torch_xla._XLAC._xla_runtime_is_initialized()  # by another test of this process
    monkeypatch.setattr(xm, "xla_device_hw", lambda device: "TPU")
    with pytest.warns(UserWarning, match="only supports dtype of torch.bfloat16"):
        assert not torch_xla.amp.autocast("xla", dtype=torch.float16)._enabled
    assert torch_xla.amp.autocast("xla", dtype=torch.bfloat16)._enabled
    assert "only bf16" in (BACKEND.precision_problem("fp16") or "")
    assert torch_xla._XLAC._xla_runtime_is_initialized() is was_in_use
