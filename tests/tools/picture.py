"""Take the pictures of the dashboard for the README and the documentation: a real launch in a real JupyterLab.

Needs Chromium (see ``browser.py``). ``make picture`` calls it. It writes ``notebooks/images/dashboard.png``, taken
while the job runs, and ``dashboard.gif``, which shows the whole job in a few seconds.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.browser.lab import Browser, Lab, Page, write_notebook

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "notebooks" / "images"
STILL, MOVING = IMAGES / "dashboard.png", IMAGES / "dashboard.gif"
MAX_BYTES = {STILL: 300_000, MOVING: 1_000_000}
FRAME_EVERY_S = 1.0
FRAME_SHOWN_S, LAST_FRAME_SHOWN_S = 0.25, 4.0
NUM_COLOURS = 32
FILM_HEIGHT = 860
"""Pixels; the cell is cut off below."""
NUM_RANKS = 4
SETUP = """
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from nblaunch import Accelerator, notebook_launcher

digits = load_digits()
data = TensorDataset(torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target))

def train(model, epochs=12):
    accelerator = Accelerator()
    loader = DataLoader(data, batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in accelerator.progress(range(epochs), desc="epochs"):
        num_correct = num_seen = 0
        for step, (images, labels) in enumerate(loader):
            scores = model(images)
            loss = F.cross_entropy(scores, labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            num_correct += (scores.argmax(1) == labels).sum().item()
            num_seen += len(labels)
            if step % 20 == 19:
                accelerator.log({"accuracy": num_correct / num_seen}, step=epoch * len(loader) + step)
                num_correct = num_seen = 0
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(),
    torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(512, 10),
)
"""
CALL = "notebook_launcher(train, (model,), num_processes=4)"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        write_notebook(Path(folder) / "train.ipynb", [SETUP, CALL])
        try:
            with Lab(Path(folder)) as lab:
                with Browser.start(scale=2, size=(1060, 1100)) as browser:
                    photograph(lab.open(browser, "train.ipynb"))
                with Browser.start(size=(1060, 2400)) as browser:
                    film(lab.open(browser, "train.ipynb"))
        except FileNotFoundError as error:  # no browser; the message says what to do
            print(error, file=sys.stderr)
            return 1
    for file in MAX_BYTES:
        print(f"written: {file.relative_to(ROOT)}, {file.stat().st_size / 1000:.0f} kB")
    return 0 if all(file.stat().st_size <= most for file, most in MAX_BYTES.items()) else 1


def photograph(page: Page) -> None:
    """Run the notebook and photograph the launching cell during training."""
    page.run(0)
    page.wait_until_idle(0, 60)
    page.run(1)
    page.wait_until(lambda: is_in_seventh_epoch(page), "the seventh epoch", 300)
    IMAGES.mkdir(exist_ok=True)
    STILL.write_bytes(page.cell(1).screenshot())


def film(page: Page) -> None:
    """Run the notebook and film the launching cell from its start to its end."""
    page.run(0)
    page.wait_until_idle(0, 60)
    page.run(1)
    frames = []
    while page.is_running(1):
        frames.append(page.cell(1).screenshot())
        time.sleep(FRAME_EVERY_S)
    page.wait_for_text(1, "done")
    frames.append(page.cell(1).screenshot())
    write_film([Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames])


def write_film(frames: list[Image.Image]) -> None:
    """Write frames as a GIF, each on a white page of the same size."""
    size = max(frame.width for frame in frames), FILM_HEIGHT
    pages = []
    for frame in frames:
        page = Image.new("RGB", size, "white")
        page.paste(frame)
        pages.append(page.quantize(NUM_COLOURS, dither=Image.Dither.NONE))
    times_ms = [round(FRAME_SHOWN_S * 1000)] * (len(pages) - 1) + [round(LAST_FRAME_SHOWN_S * 1000)]
    pages[0].save(MOVING, save_all=True, append_images=pages[1:], duration=times_ms, loop=0, optimize=True)


def is_in_seventh_epoch(page: Page) -> bool:
    steps = re.findall(r"(\d+)/113\b", page.text(1))
    has_charts = re.search(r"^accuracy", page.text(1), re.MULTILINE) is not None
    is_seventh = page.text(1).count("epoch 6: loss") == NUM_RANKS
    return has_charts and is_seventh and bool(steps) and all(20 < int(step) < 90 for step in steps)


if __name__ == "__main__":
    sys.exit(main())
