"""The table of a real job: the slow rank in lockstep training, memory, workers' bars, losses."""

from __future__ import annotations

import re

from tests.kernels import Kernel

TRAIN = """
from torch.utils.data import DataLoader, TensorDataset
from nblaunch import Accelerator

def train(model):
    accelerator = Accelerator()
    loader = DataLoader(TensorDataset(torch.randn(480, 4)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    begun = time.monotonic()
    for (batch,) in loader:
        time.sleep(0.15 if accelerator.process_index == 1 else 0.01)
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        # All leave at the same step: that of the rank whose clock they all read.
        if accelerator.gather(torch.tensor([time.monotonic() - begun]))[0] > 5:
            break
"""

BARS = """
def bars():
    from tqdm import tqdm
    for _ in tqdm(range(20), desc="fold 3", mininterval=0):
        time.sleep(0.1)
"""


def test_the_slow_rank_is_named_and_memory_is_reported(shared: Kernel) -> None:
    shared.run(TRAIN)
    cell = shared.run(
        "notebook_launcher(train, (torch.nn.Linear(4, 1),), num_processes=3, backend='cpu', dashboard='html')",
    )
    text = cell.displays[0].data["text/plain"]
    assert re.search(r"^rank 1: \d\.\d times slower than the others", text, re.MULTILINE), text
    assert re.search(r"^rank +state .*samples/s .*loss +peak memory", text, re.MULTILINE), text
    assert 'role="img" aria-label="loss' in cell.displays[0].data["text/html"]


def test_a_bar_of_a_worker_stands_in_its_row(shared: Kernel) -> None:
    shared.run(BARS)
    cell = shared.run("notebook_launcher(bars, num_processes=2, backend='cpu', dashboard='html')")
    updates = [content["data"]["text/plain"] for content in cell.contents("update_display_data")]
    rows = [line for text in updates for line in text.splitlines() if re.match(r" +1 +running", line)]
    counts = [int(found[1]) for row in rows if (found := re.search(r"fold 3 (\d+)/20 \[", row))]
    assert len(set(counts)) >= 2, rows
    assert counts == sorted(counts)
    assert (
        "fold 3" not in cell.displays[0].data["text/plain"]
    )  # the bar is closed, and its last state is in the log


STEPS, EPOCHS = 11, 12
CURVE = f"""
from torch.utils.data import DataLoader, TensorDataset
from nblaunch import Accelerator

def learn():
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn({STEPS} * 8, 3)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range({EPOCHS}):
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


def test_loss_curve_is_reproducible_and_complete(shared: Kernel) -> None:
    shared.run(CURVE)
    charts = []
    for dashboard in ("html", "widgets", "html"):
        cell = shared.run(f"notebook_launcher(learn, (), 1, dashboard={dashboard!r}, backend='cpu')")
        html = cell.displays[0].data["text/html"]
        charts.append(re.search(r'<svg [^>]*aria-label="loss: .*?</svg>', html)[0])  # type: ignore[index]
    assert f" in {EPOCHS * STEPS} steps" in charts[0]
    assert charts[0] == charts[1] == charts[2]
