"""The README says nothing that is not so: its code runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from nblaunch import cli
from tests.kernels import Kernel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    line.partition("#")[0].strip()
    for language, text in BLOCKS
    if language in ("", "bash", "sh")
    for line in text.splitlines()
]
LINKS = [link for link in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in link and link[0] != "#"]

# What a reader of the README has at hand before its first block.
GIVEN = """
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 3)
dataset = TensorDataset(torch.randn(48, 4), torch.randint(0, 3, (48,)))
before = model.weight.clone()
"""


def test_its_code_runs_in_a_notebook(kernel: Kernel) -> None:
    assert len(PYTHON) >= 2
    kernel.run(GIVEN)
    for code in PYTHON:
        kernel.run(code, timeout_s=60)
    kernel.run("assert not torch.equal(before, model.weight), 'the trained weights are back in model'")


def test_it_names_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*  ## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_its_commands_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [shlex.split(command)[1:] for command in COMMANDS if command.startswith("nblaunch ")]
    assert lines
    for command, *words in lines:
        with pytest.raises(SystemExit) as leaving:
            cli.main([command, "--help"])
        assert leaving.value.code == 0
        shown = capsys.readouterr().out
        of_ours = itertools.takewhile(
            lambda word: not word.endswith(".py"), words
        )  # the rest is the script's
        for option in (word.partition("=")[0] for word in of_ours if word.startswith("--")):
            assert option in shown, f"{option} of `nblaunch {command}`"


@pytest.mark.parametrize("link", LINKS)
def test_its_links_lead_to_files(link: str) -> None:
    assert (ROOT / link.partition("#")[0]).exists()


def test_its_map_shows_every_folder_and_module() -> None:
    (shown,) = [text for _, text in BLOCKS if text.startswith("nblaunch/\n")]
    package = ROOT / "nblaunch"
    folders = re.findall(r"^  ([a-z_]+)/ ", shown, flags=re.MULTILINE)
    assert sorted(folders) == sorted(file.parent.name for file in package.glob("*/__init__.py"))
    modules = re.findall(r"^  ([a-z_]+)\.py ", shown, flags=re.MULTILINE)
    assert sorted(modules) == sorted(file.stem for file in package.glob("[a-z]*.py"))
    parts = re.findall(r"([a-z]+)/[,;]? ?", re.search(r"^  training/ (.*)$", shown, flags=re.MULTILINE)[1])  # type: ignore[index]
    assert sorted(parts) == sorted(file.parent.name for file in (package / "training").glob("*/__init__.py"))
    others = re.findall(r"^([a-z]+)/", shown, flags=re.MULTILINE)
    assert {"nblaunch", "tests"} <= set(others)
    assert all((ROOT / name).is_dir() for name in others), others


def test_the_files_that_it_names_exist() -> None:
    named = re.findall(r"`([a-z_/]+/(?:[a-zA-Z_]+\.(?:py|md|toml))?)`", README)
    assert {"launcher/runner.py", "tests/architecture/test_words.py"} <= set(named)
    assert all((ROOT / name).exists() or (ROOT / "nblaunch" / name).exists() for name in named), named
