"""Correct loops get no notes (PJRT CPU)."""

from __future__ import annotations

import re

import pytest

from tests.kernels import Kernel

pytestmark = [pytest.mark.usefixtures("compile_quickly")]

LOOPS = """
torch.manual_seed(0)
x, y = torch.randn(90, 8), torch.randint(0, 4, (90,))

class Loops:
    '''Everything that a loop of these tests is built of, in one worker.'''
    def __init__(self, num_micro=1, **options):
        self.accelerator = Accelerator(gradient_accumulation_steps=num_micro, **options)
        self.model, self.optimizer, self.loader, self.test_loader = self.accelerator.prepare(*self.parts())
        self.schedule = self.accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9))
    def parts(self, **loading):
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = TensorDataset(x, y)
        return model, optimizer, DataLoader(data, 16, shuffle=True, **loading), DataLoader(data, 16)
    def train(self, after_step=lambda number, loss: None, before_step=lambda number, loss: None):
        self.model.train()
        for number, (inputs, targets) in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(inputs), targets)
                self.accelerator.backward(loss)
                before_step(number, loss)
                self.optimizer.step()
                self.schedule.step()
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
    "evaluation first": "loops = Loops(); [(loops.evaluate(), loops.train().item()) for _ in range(3)]",
    "break": "loops = Loops(); [(loops.train().item(), loops.evaluate(3)) for _ in range(3)]",
    "accumulation": "loops = Loops(num_micro=2); [(loops.train(), loops.evaluate()) for _ in range(3)]",
    "accumulation over four": "loops = Loops(num_micro=4); [(loops.train(), loops.evaluate()) for _ in range(4)]",
    "now and then": "loops = Loops(); [loops.train(lambda n, loss: n == 3 and print(loss.item())) for _ in range(3)]",
    "a metric, at times": """
    loops = Loops()
    [loops.train(lambda n, loss: n == 3 and print((loss.detach() * 2).exp().item())) for _ in range(3)]
""",
    "warm-up from zero": """
    loops = Loops()
    rise = lambda step: min(1.0, step / 4)
    loops.schedule = loops.accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(loops.optimizer, rise))
    [(loops.train().item(), loops.evaluate()) for _ in range(3)]
""",
    "print after the step": "loops = Loops(); [loops.train(lambda n, loss: n == 3 and print(loss)) for _ in range(3)]",
    "bf16": "loops = Loops(mixed_precision='bf16'); [(loops.train().item(), loops.evaluate()) for _ in range(3)]",
    "clipping": """
    loops = Loops()
    clip = lambda number, loss: loops.accelerator.clip_grad_norm_(loops.model.parameters(), 1.0)
    [(loops.train(before_step=clip), loops.evaluate()) for _ in range(3)]
""",
    "the norm of gradients, at times": """
    loops, norms = Loops(), []
    def clip(number, loss):
        norms.append(loops.accelerator.clip_grad_norm_(loops.model.parameters(), 1.0))
    def log(number, loss):
        if number % 4 == 3:
            print(norms[-1].item(), loops.schedule.get_last_lr())
    [loops.train(log, clip) for _ in range(3)]
""",
    "saving in the loop": """
    import tempfile
    loops, folder = Loops(), tempfile.mkdtemp()
    [loops.train(lambda number, loss: number == 2 and loops.accelerator.save_state(folder)) for _ in range(3)]
""",
    "going on from a checkpoint": """
    import tempfile
    loops, folder = Loops(), tempfile.mkdtemp()
    loops.train()
    loops.accelerator.save_state(folder)
    loops.accelerator.load_state(folder)
    [(loops.train().item(), loops.evaluate()) for _ in range(2)]
""",
    "a bar with the loss": """
    from tqdm.auto import tqdm
    loops = Loops()
    for _ in range(3):
        with tqdm(total=6) as bar:
            def show(number, loss):
                bar.update()
                if number % 4 == 3:
                    bar.set_postfix(loss=loss.item())
            loops.train(show)
""",
    "a sum on the device": """
    loops = Loops()
    for _ in range(3):
        total = 0
        def add(number, loss):
            nonlocal total
            total += loss.detach()
        loops.train(add)
        print(total.item() / 6)
""",
    "evaluation within an epoch": """
    loops = Loops()
    def evaluate(number, loss):
        if number == 3:
            loops.evaluate()
            loops.model.train()
    [loops.train(evaluate) for _ in range(3)]
""",
    "two models": """
    loops = Loops()
    critic = nn.Linear(4, 1)
    critic, other = loops.accelerator.prepare(critic, torch.optim.Adam(critic.parameters()))
    for _ in range(3):
        loops.model.train()
        for inputs, targets in loops.loader:
            made = loops.model(inputs)
            loops.accelerator.backward(critic(made.detach()).mean())
            other.step()
            other.zero_grad()
            loops.accelerator.backward(-critic(made).mean())
            loops.optimizer.step()
            loops.optimizer.zero_grad()
        loops.evaluate()
""",
    "drop_last": """
    loops = Loops()
    loops.loader = loops.accelerator.prepare(loops.parts(drop_last=True)[2])
    [(loops.train().item(), loops.evaluate()) for _ in range(3)]
""",
    "a loader per epoch": """
    loops = Loops()
    for _ in range(3):
        loops.loader, loops.test_loader = loops.accelerator.prepare(*loops.parts()[2:])
        loops.train().item(), loops.evaluate()
""",
    "skipped batches": """
    loops = Loops()
    whole = loops.loader
    loops.loader = loops.accelerator.skip_first_batches(whole, 3)
    loops.train().item()
    loops.loader = whole
    [(loops.train().item(), loops.evaluate()) for _ in range(2)]
""",
    "all predictions": """
    loops = Loops()
    for _ in range(3):
        loops.train()
        loops.model.eval()
        found = []
        for inputs, targets in loops.test_loader:
            with torch.no_grad():
                found.append(loops.accelerator.gather_for_metrics((loops.model(inputs).argmax(-1), targets)))
        predicted, targets = (torch.cat(one).cpu() for one in zip(*found))
        assert len(predicted) == 90
""",
}
SPMD = {
    "bf16": "loops = Loops(mixed_precision='bf16'); [(loops.train().item(), loops.evaluate()) for _ in range(3)]",
    "sharded weights": """
    from nblaunch import FullyShardedDataParallelPlugin
    loops = Loops(num_micro=2, fsdp_plugin=FullyShardedDataParallelPlugin())
    clip = lambda number, loss: loops.accelerator.clip_grad_norm_(loops.model.parameters(), 1.0)
    [(loops.train(before_step=clip).item(), loops.evaluate()) for _ in range(3)]
""",
}


@pytest.fixture(scope="module")
def loops(shared: Kernel) -> Kernel:
    shared.run(LOOPS)
    return shared


def notes(kernel: Kernel, body: str, num_processes: int = 1, **options: str) -> list[str]:
    """Return the notes about the loops of ``body``, except about compilations of the first steps."""
    arguments = "".join(f", {name}={value!r}" for name, value in options.items())
    cell = kernel.run(
        f"def run():\n    {body}\nnotebook_launcher(run, (), {num_processes}, dashboard='text'{arguments})",
    )
    lines = [line for line in cell.stdout.splitlines() if line.startswith("nblaunch: ")]
    return [line for line in lines if re.search("a value|new graph|runs on the CPU|can't be cut", line)]


@pytest.mark.parametrize("variant", FAULTLESS)
def test_a_correct_loop_gets_no_notes(loops: Kernel, variant: str) -> None:
    assert notes(loops, FAULTLESS[variant]) == []


def test_correct_loops_on_several_ranks_get_no_notes(loops: Kernel) -> None:
    body = "loops = Loops(num_micro=2); [(loops.train().item(), loops.evaluate()) for _ in range(3)]"
    assert notes(loops, body, 2) == []


@pytest.mark.parametrize("variant", SPMD)
def test_spmd_process_has_no_findings(loops: Kernel, variant: str) -> None:
    loops.run("os.environ['CPU_NUM_DEVICES'] = '4'")
    try:
        assert notes(loops, SPMD[variant], strategy="spmd") == []
    finally:
        loops.run("del os.environ['CPU_NUM_DEVICES']")
