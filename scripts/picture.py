"""Take the picture of the dashboard that the README shows: a real launch, caught while it runs.

Needs Chromium (Debian: ``apt-get install chromium``). Called by ``make picture``; writes
``notebooks/images/dashboard.png``.
"""

from __future__ import annotations

import html
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.kernels import Cell, Kernel  # noqa: E402  (the repository's root is not installed)

TARGET = ROOT / "notebooks" / "images" / "dashboard.png"
SIZE = "640,265"
NUM_RANKS = 4
SETUP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from nblaunch import Accelerator, notebook_launcher

def train(model):
    accelerator = Accelerator()
    images = torch.randn(20000, 1, 8, 8)
    data = TensorDataset(images, (images.mean(dim=(1, 2, 3)) > 0).long())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    for epoch in range(3):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Linear(512, 2),
)
"""
CALL = "result = notebook_launcher(train, (model,), num_processes=4)"
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 18px; background: white; font: 14px system-ui, sans-serif }}
pre {{ background: #f6f7f9; border: 1px solid #e3e6ea; border-radius: 4px; padding: 10px 12px; margin: 0 0 12px;
      font: 13px ui-monospace, "DejaVu Sans Mono", monospace }}
</style><pre>{code}</pre>{output}"""


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium found: install it first (Debian: apt-get install chromium)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(PAGE.format(code=html.escape(CALL), output=dashboard_in_mid_run()), encoding="utf-8")
        photograph(browser, page)
    print(f"written: {TARGET.relative_to(ROOT)}")
    return 0


def dashboard_in_mid_run() -> str:
    """The HTML that the cell shows in the second epoch of a real launch."""
    with Kernel.start(cwd=ROOT) as kernel:
        kernel.run(SETUP)
        cell = kernel.submit(CALL)
        cell.wait_for(_is_in_second_epoch, what="the second epoch")
        shown = cell.displays[0].data["text/html"]
        cell.wait()
        return str(shown)


def _is_in_second_epoch(cell: Cell) -> bool:
    text = cell.displays[0].data["text/plain"] if cell.displays else ""
    rows = [line.split() for line in text.splitlines() if " training " in line]
    steps = [int(row[3].partition("/")[0]) for row in rows if row[2] == "1"]
    return len(steps) == NUM_RANKS and min(steps) > 300


def photograph(browser: str, page: Path) -> None:
    TARGET.parent.mkdir(exist_ok=True)
    subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-device-scale-factor=2",
            f"--window-size={SIZE}",
            f"--screenshot={TARGET}",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )


if __name__ == "__main__":
    sys.exit(main())
