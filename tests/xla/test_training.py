"""Workers that train on XLA devices (PJRT CPU), compared with the same training in one plain process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Kernel

pytestmark = [pytest.mark.usefixtures("compile_quickly")]

DIGITS = """
from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_set, test_set = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])

def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )

def train(model, epochs=2, global_batch=64):
    accelerator = Accelerator()
    share = global_batch // accelerator.num_processes
    order = torch.Generator().manual_seed(7)
    loader = DataLoader(train_set, batch_size=share, shuffle=True, generator=order, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=share)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    correct = seen = 0
    for x, y in test_loader:
        with torch.no_grad():
            predicted = model(x).argmax(dim=1)
        predicted, y = accelerator.gather_for_metrics((predicted, y))
        correct += (predicted == y).sum().item()
        seen += len(y)
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return str(accelerator.device), accelerator.num_processes, seen, correct, weights

def reference():
    '''The same global batches in this process, with plain PyTorch: no Accelerator, no launcher.'''
    model = build()
    order = torch.Generator().manual_seed(7)
    loader = DataLoader(train_set, batch_size=64, shuffle=True, generator=order, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.state_dict()

def difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)
"""


@pytest.fixture(scope="module")
def digits(shared: Kernel) -> Iterator[Kernel]:
    shared.run(DIGITS)
    return shared


@pytest.fixture(scope="module")
def trained(digits: Kernel) -> Kernel:
    """Train on eight workers in the module's kernel, which then has all ``results``, and ``model`` with the weights."""
    digits.run(
        "model = build()\nresults = notebook_launcher(train, (model,), num_processes=8, return_all=True)",
    )
    return digits


def test_eight_workers_match_one_process(trained: Kernel) -> None:
    cell = trained.run(
        """
weights = [result[4] for result in results]
same = max(difference(weights[0], other) for other in weights[1:])
([result[:4] for result in results], same, difference(weights[0], model.state_dict()), is_initialised(),
 os.environ["PJRT_DEVICE"])
""",
    )
    results, same, returned, is_initialised, device = cell.value
    assert {result[0] for result in results} == {"xla:0"}
    assert {result[1] for result in results} == {8}
    assert {result[2] for result in results} == {360}, "metrics must count every test image once"
    assert len({result[3] for result in results}) == 1
    assert results[0][3] > 300
    assert same == 0.0, "all ranks must end with the same weights"
    assert returned == 0.0, "the kernel's model must have them"
    assert not is_initialised, "the kernel must not take the device"
    assert device == "CPU"


def test_weights_match_plain_pytorch(trained: Kernel) -> None:
    """Run Accelerate in a separate process, because its backward() would change how this kernel's workers start."""
    cell = trained.run(
        """
plain = notebook_launcher(reference, num_processes=1, backend="cpu")
untrained = build().state_dict()
difference(plain, model.state_dict()), difference(plain, untrained)
""",
    )
    error, distance = cell.value
    # 44 steps of AdamW in float32 with gradients summed in another order; the weights have changed by far more.
    assert error < 2e-3
    assert distance > 50 * error


@pytest.mark.thorough
def test_repeated_training_is_reproducible(digits: Kernel) -> None:
    cell = digits.run(
        """
runs = [notebook_launcher(train, (build(), 1), num_processes=2) for _ in range(2)]
difference(runs[0][4], runs[1][4]), is_initialised()
""",
    )
    assert cell.value == (0.0, False)


# Enough to check that workers can use their devices again.
COMPUTES = (
    "notebook_launcher(lambda: torch.ones(2, device=Accelerator().device).sum().item(), num_processes=2)"
)


def test_training_works_after_an_error(digits: Kernel) -> None:
    cell = digits.run(
        """
def fail(model):
    accelerator = Accelerator()
    model = accelerator.prepare(model)
    model(torch.zeros(2, 1, 10, 10, device=accelerator.device))
notebook_launcher(fail, (build(),), num_processes=2)
""",
        raises="RuntimeError",
    )
    assert len(cell.raised.lines) <= 30, cell.describe()
    assert digits.run(COMPUTES).value == 2.0


def test_training_works_after_an_interrupt(digits: Kernel, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    cell = digits.submit(
        f"""
def endless(model):
    accelerator = Accelerator()
    model = accelerator.prepare(model)
    x = torch.ones(4, 1, 8, 8, device=accelerator.device)
    while True:
        model(x).sum().item()
        print("computed", flush=True)
        open({str(begun)!r}, "w").close()
notebook_launcher(endless, (build(),), num_processes=2)
"""
    )
    digits.wait_until(begun.exists, 180, "the workers to compute", cell)
    digits.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert digits.processes() == []
    assert digits.run(COMPUTES).value == 2.0


def test_loaders_with_worker_processes(digits: Kernel) -> None:
    """They are forked from a worker whose runtime is running: they read and collate, and never touch the device."""
    cell = digits.run(
        """
def read(model):
    accelerator = Accelerator()
    loader = DataLoader(test_set, batch_size=60, num_workers=2)
    model, loader = accelerator.prepare(model, loader)
    seen = 0
    for _ in range(2):
        for x, y in loader:
            with torch.no_grad():
                seen += len(accelerator.gather_for_metrics(model(x).argmax(1)))
    return seen
notebook_launcher(read, (build(),), num_processes=2)
""",
    )
    assert cell.value == 720


def test_one_worker_still_runs(digits: Kernel) -> None:
    """A host with one chip does the same. The last batch is filled up, so that it has no new shape."""
    cell = digits.run("notebook_launcher(train, (build(), 1), num_processes=1)[:3]")
    assert cell.value == ("xla:0", 1, 360)


def test_workers_share_a_start_method_without_fork(digits: Kernel) -> None:
    cell = digits.run('notebook_launcher(train, (build(), 1), num_processes=2, start_method="spawn")[:3]')
    assert cell.value == ("xla:0", 2, 360)


def test_one_rank_can_prepare_a_model_for_evaluation(digits: Kernel) -> None:
    digits.run("""
def evaluate_on_one(model):
    accelerator = Accelerator()
    if not accelerator.is_main_process:
        return None
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    return prepared(images[:4].to(accelerator.device)).shape
""")
    launch = "notebook_launcher(evaluate_on_one, (build(),), num_processes=2, sync_weights=False)"
    assert digits.run(f"tuple({launch})").value == (4, 10)
