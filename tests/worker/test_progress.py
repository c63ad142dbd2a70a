"""Signs of progress from code that does not use nblaunch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.programs import output_of

# In a separate process, because the hooks are permanent.
SCRIPT = """
import io, sys
from nblaunch.wire.board import private_slot
from nblaunch.progress import signs
from nblaunch.worker.optimizer_steps import steps
if {is_before}:
    import torch, tqdm
slot = private_slot()
steps.count_on(slot)
signs.count_progress(slot)
import torch, tqdm

def shown():
    sample = slot.read(0)
    return sample.num_updates, sample.num_progress_signs

weight = torch.nn.Parameter(torch.zeros(2))
weight.grad = torch.ones(2)
optimizers = torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([weight])
for optimizer in optimizers:
    optimizer.step()
assert shown() == (2, 0), shown()

with tqdm.tqdm(total=2, file=io.StringIO()) as bar:
    bar.update(0)
    bar.refresh()
    assert shown() == (2, 0), shown()
    bar.update()
    bar.update(1)
assert shown() == (2, 2), shown()
for _ in tqdm.tqdm(range(3), mininterval=0, file=io.StringIO()):
    pass
assert shown()[1] > 2, shown()

assert slot.built_bytes == 0
torch.nn.Linear(16, 16)
with torch.device("meta"):
    torch.nn.Linear(1 << 14, 1 << 14)
torch.nn.LazyLinear(1, bias=False)
assert slot.built_bytes == (16 * 16 + 16) * 4, slot.built_bytes

if {is_before}:
    torch.compile(optimizers[0].step, backend="eager")()
print(weight.tolist())
"""


@pytest.mark.parametrize("is_before", [True, False], ids=["imported before", "imported later"])
def test_optimizers_bars_and_modules_are_counted(is_before: bool) -> None:
    script = SCRIPT.format(is_before=is_before)
    if is_before:
        output_of(script)
        return
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
