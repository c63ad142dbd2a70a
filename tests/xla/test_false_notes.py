"""Loops that are written as they should be: nothing is found fault with (PJRT CPU). What is at fault is named."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel

pytestmark = pytest.mark.timeout(240)

LOOPS = """
torch.manual_seed(0)
x, y = torch.randn(90, 8), torch.randint(0, 4, (90,))

class Loops:
    '''Everything that a loop of these tests is built of, in one worker.'''
    def __init__(self, num_micro=1, **options):
        self.accelerator = Accelerator(gradient_accumulation_steps=num_micro, **options)
        self.model, self.optimizer, self.loader, self.test_loader = self.accelerator.prepare(*self.parts())
    def parts(self):
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = TensorDataset(x, y)
        return model, optimizer, DataLoader(data, 16, shuffle=True), DataLoader(data, 16)
    def train(self, after_step=lambda number, loss: None, before_step=lambda number, loss: None):
        self.model.train()
        for number, (inputs, targets) in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(inputs), targets)
                self.accelerator.backward(loss)
                before_step(number, loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            after_step(number, loss)
        return loss
    def evaluate(self, num_batches=99):
        self.model.eval()
        num_correct = torch.zeros((), device=self.accelerator.device)
        for number, (inputs, targets) in enumerate(self.test_loader):
            if number == num_batches:
                break
            with torch.no_grad():
                predicted = self.model(inputs).argmax(-1)
            predicted, targets = self.accelerator.gather_for_metrics((predicted, targets))
            num_correct += (predicted == targets).sum()
        return num_correct.item()
"""

FAULTLESS = {
    "item after the loop": "loops = Loops(); [loops.train().item() for _ in range(3)]",
    "remainder": "loops = Loops(); [(loops.train(), loops.evaluate()) for _ in range(3)]",
    "evaluation first": "loops = Loops(); [(loops.evaluate(), loops.train().item()) for _ in range(3)]",
    "break": "loops = Loops(); [(loops.train().item(), loops.evaluate(3)) for _ in range(3)]",
    "accumulation": "loops = Loops(num_micro=2); [(loops.train(), loops.evaluate()) for _ in range(3)]",
    "accumulation over four": "loops = Loops(num_micro=4); [(loops.train(), loops.evaluate()) for _ in range(4)]",
    "now and then": "loops = Loops(); [loops.train(lambda n, loss: n == 3 and print(loss.item())) for _ in range(3)]",
    "print after the step": "loops = Loops(); [loops.train(lambda n, loss: n == 3 and print(loss)) for _ in range(3)]",
}
NAMED = {
    "item": ("Loops().train(before_step=lambda n, loss: loss.item())", "read from the device in every step"),
    "print": ("Loops().train(before_step=lambda n, loss: print(loss))", "read from the device in every step"),
    "branch": (
        "Loops().train(before_step=lambda n, loss: n == 4 and bool(loss * 3 > 2))",
        "s: a value is read from the device in it",
    ),
}


@pytest.fixture(scope="module")
def loops(shared: Kernel) -> Kernel:
    shared.run(LOOPS)
    return shared


def notes(kernel: Kernel, body: str, num_processes: int = 1) -> list[str]:
    """What is reported about the loops of ``body``, but for what their first steps compiled."""
    cell = kernel.run(
        f"def run():\n    {body}\nnotebook_launcher(run, (), {num_processes}, dashboard='text')",
        timeout_s=120,
    )
    notes = [line for line in cell.stdout.splitlines() if line.startswith("nblaunch: ")]
    return [line for line in notes if "a value" in line or "new graph" in line or "runs on the CPU" in line]


@pytest.mark.parametrize("variant", FAULTLESS)
def test_nothing_is_found_fault_with_in_a_loop_as_it_should_be(loops: Kernel, variant: str) -> None:
    assert notes(loops, FAULTLESS[variant]) == []


def test_nothing_is_found_fault_with_in_several_processes(loops: Kernel) -> None:
    body = "loops = Loops(num_micro=2); [(loops.train().item(), loops.evaluate()) for _ in range(3)]"
    assert notes(loops, body, 2) == []


@pytest.mark.parametrize("variant", NAMED)
def test_what_is_at_fault_is_named(loops: Kernel, variant: str) -> None:
    body, text = NAMED[variant]
    (note,) = notes(loops, body)
    assert text in note
