"""Every path through the questions of ``nblaunch config`` that this machine supports, and launches with the resulting
files.

The tests walk the whole tree, and launch enough paths for each pair of answers to occur in a launch. Two sets of
answers are independent of all others, and are launched with some of these instead of all: how models are compiled
(seconds each), and how machines meet (two launches each). The tests also check this independence.
"""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nblaunch.cli.config import QUESTIONS, Asker, Convert, Machine, ask_all
from nblaunch.config import files
from nblaunch.config.settings import SETTINGS
from tests.benchmarks.bench import free_port
from tests.cli.conftest import PROGRAM, script

Answers = dict[str, Any]

PROGRAM_FOR_MANY = Path(__file__).with_name("launch_files.py")
TYPED = {
    "gradient_accumulation_steps": "2", "fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_min_num_params": "10",
    "deepspeed_config_file": "zero.json", "main_process_ip": "127.0.0.1",
}  # fmt: skip

TRAIN = """
import torch
import torch._dynamo.utils
from torch import nn
from nblaunch import Accelerator

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs):
        return inputs + torch.relu(self.inner(inputs))

torch.manual_seed(0)
accelerator = Accelerator()
model = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
model._no_split_modules = ["Block"]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
n = accelerator.num_processes
data = torch.utils.data.TensorDataset(torch.randn(4 * n, 4), torch.randn(4 * n, 1))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    print({
        "num_processes": n,
        "mixed_precision": accelerator.mixed_precision,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "strategy": accelerator.distributed_type.value,
        "is_compiled": bool(torch._dynamo.utils.counters["stats"]),
        "is_finite": bool(loss.isfinite()),
    })
"""

LABELS = {None: "NO", "ddp": "MULTI_CPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}


class OnePath(Asker):
    """Takes the choices in ``prefix``, given as indices of allowed choices, and then always the first choice."""

    def __init__(
        self, prefix: Sequence[int], allowed: Callable[[str, str], bool], typed: dict[str, str]
    ) -> None:
        self._prefix = prefix
        self._allowed = allowed
        self._typed = typed
        self.taken: list[int] = []
        self.widths: list[int] = []

    def choose(self, question: str, labels: Sequence[str], default: int) -> int:
        places = [place for place, label in enumerate(labels) if self._allowed(question, label)]
        at = len(self.taken)
        self.taken.append(self._prefix[at] if at < len(self._prefix) else 0)
        self.widths.append(len(places))
        return places[self.taken[-1]]

    def enter(self, question: str, default: str, convert: Convert) -> object:
        setting = next(one.setting for one in QUESTIONS if one.text == question)
        return convert(self._typed.get(setting, default))


def walk(where: str, num_cpus: int, **typed: str) -> Iterator[Answers]:
    """Yield the answers of every path on a machine with only CPUs, each list of settings once."""

    def allowed(question: str, label: str) -> bool:
        start = {"Where will the script run?": where, "Which devices should the job use?": "CPU"}.get(
            question, ""
        )
        return label.startswith(start)

    seen = set()
    prefix: list[int] = []
    while True:
        path = OnePath(prefix, allowed, TYPED | typed)
        answers = ask_all(path, Machine({"cpu": num_cpus}, "cpu"))
        if str(answers) not in seen:
            seen.add(str(answers))
            yield answers
        prefix = path.taken
        while prefix and prefix[-1] + 1 >= path.widths[len(prefix) - 1]:
            prefix.pop()
        if not prefix:
            return
        prefix[-1] += 1


def without(answers: Answers, group: str) -> Answers:
    return {name: value for name, value in answers.items() if SETTINGS[name].group != group}


def compiled_by(answers: Answers) -> tuple[Any, ...]:
    return tuple(value for name, value in answers.items() if SETTINGS[name].group == "dynamo_config")


def pairs(answers: Answers) -> set[tuple[tuple[str, str], ...]]:
    """Return all pairs of answers of a path; having no strategy is an answer, too."""
    settings = {"strategy": None, **answers}
    return set(itertools.combinations(sorted((name, str(value)) for name, value in settings.items()), 2))


def worth_launching(plans: Sequence[Answers]) -> list[Answers]:
    """Return enough paths without compilation for each pair of answers, and one path per way of compiling and per
    strategy.
    """
    pairs_of = [(plan, pairs(plan)) for plan in plans if plan["dynamo_backend"] == "no"]
    missing = set().union(*(of_plan for _, of_plan in pairs_of))
    chosen, ways, strategies = [], set(), set()
    while missing:
        plan, covered = max(pairs_of, key=lambda one: len(one[1] & missing))
        missing -= covered
        chosen.append(plan)
    for plan in plans:
        if plan["dynamo_backend"] != "no" and (
            compiled_by(plan) not in ways or plan.get("strategy") not in strategies
        ):
            ways.add(compiled_by(plan))
            strategies.add(plan.get("strategy"))
            chosen.append(plan)
    return chosen


def expected(answers: Answers) -> Answers:
    return {
        "num_processes": answers["num_processes"],
        "mixed_precision": answers["mixed_precision"],
        "gradient_accumulation_steps": 2,
        "strategy": LABELS[answers.get("strategy")],
        "is_compiled": answers["dynamo_backend"] != "no",
        "is_finite": True,
    }


@pytest.fixture(autouse=True)
def settings_of_deepspeed() -> None:
    Path("zero.json").write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}')


@pytest.mark.thorough
def test_every_pair_of_answers_on_this_machine_is_launched() -> None:
    plans = [*walk("here", 1), *walk("here", 2)]
    chosen = worth_launching(plans)
    # The question about compiling comes last, and changes no other answer.
    uncompiled = [without(plan, "dynamo_config") for plan in plans if plan["dynamo_backend"] == "no"]
    assert all(without(plan, "dynamo_config") in uncompiled for plan in plans)
    launched = set().union(*(pairs(without(plan, "dynamo_config")) for plan in chosen))
    assert all(pairs(plan) <= launched for plan in uncompiled)
    assert {compiled_by(plan) for plan in plans} == {compiled_by(plan) for plan in chosen}
    paths = [Path(f"{number}.yaml") for number in range(len(chosen))]
    for path, plan in zip(paths, chosen, strict=True):
        files.write(path, plan)
    ended = subprocess.run(
        [sys.executable, str(PROGRAM_FOR_MANY), script(TRAIN), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=590,
    )
    shown = dict(part.partition("\n")[::2] for part in ended.stdout.split("=== ") if ".yaml\n" in part)
    assert ended.stdout.count("=== code 0\n") == len(chosen) > 20, ended.stderr[-4000:]
    for path, plan in zip(paths, chosen, strict=True):
        # A single process's lines have no label.
        lines = [line.removeprefix("[0] ") for line in shown[str(path)].splitlines()]
        (facts,) = [ast.literal_eval(line) for line in lines if line.startswith("{")]
        assert facts == expected(plan), plan


def test_machine_questions_do_not_change_training_questions() -> None:
    here = [without(plan, "machines") for plan in walk("here", 2)]
    several = list(walk("several", 1, rdzv_endpoint="127.0.0.1:29400"))
    assert {plan["rdzv_backend"] for plan in several} == {"static", "c10d"}
    for backend in ("static", "c10d"):
        assert [without(plan, "machines") for plan in several if plan["rdzv_backend"] == backend] == here


@pytest.mark.thorough
@pytest.mark.parametrize("num_machines", ["2", "1:2"])
def test_every_rendezvous_is_launched(num_machines: str) -> None:
    name = script("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    met = set()
    for plan in walk("several", 1, num_machines=num_machines, rdzv_endpoint="{}", main_process_port="1"):
        if plan["rdzv_backend"] in met:
            continue
        met.add(plan["rdzv_backend"])
        port = free_port()
        if "main_process_port" in plan:
            plan["main_process_port"] = port
        else:
            plan["rdzv_endpoint"] = f"127.0.0.1:{port}"
        files.write(Path("several.yaml"), plan)
        words = [*PROGRAM, "launch", "--config_file", "several.yaml", "--dashboard", "none"]
        nodes = [
            subprocess.Popen(
                [*words, "--machine_rank", str(rank), name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for rank in range(2)
        ]  # fmt: skip
        outs = [node.communicate(timeout=300)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], outs
        assert all(f"rank {rank} of 2" in outs[rank] for rank in range(2)), outs
    assert met == ({"static", "c10d"} if num_machines == "2" else {"c10d"})
