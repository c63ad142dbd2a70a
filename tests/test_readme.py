"""README and CONTRIBUTING.md are correct: code runs, commands and files exist, and the map shows the tree."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from nblaunch import cli
from tests.kernels import Kernel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
TEXTS = {"README.md": README, "CONTRIBUTING.md": CONTRIBUTING}


def blocks(path: Path) -> list[tuple[str, str]]:
    """Return language and text of each code block."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"^( *)```([\w{}.-]*)[^\n]*\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    return [
        (language, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)) for indent, language, code in found
    ]


def check_commands(lines: Iterable[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Fail for an ``nblaunch`` command with an unknown option; return the number of commands."""
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("nblaunch ")]
    for command, *words in commands:
        with pytest.raises(SystemExit) as leaving:
            cli.main([command, "--help"])
        assert leaving.value.code == 0
        shown = capsys.readouterr().out
        # Arguments after the script belong to the script.
        of_ours = itertools.takewhile(lambda word: not word.endswith(".py"), words)
        for option in (word.partition("=")[0] for word in of_ours if word.startswith("--")):
            assert option in shown, f"{option} of `nblaunch {command}`"
    return len(commands)


PYTHON = [code for language, code in blocks(ROOT / "README.md") if language == "python"]
LINKS = [
    (name, link)
    for name, text in TEXTS.items()
    for link in re.findall(r"\]\(([^)\s]+)\)", text)
    if "://" not in link and link[0] != "#"
]


def test_the_example_runs_in_a_fresh_notebook(kernel: Kernel) -> None:
    example, *others = PYTHON
    shown = kernel.run(example).stdout
    loss = re.search(r"^loss (\d\.\d+)$", shown, re.MULTILINE)
    assert loss is not None
    assert float(loss[1]) < 0.6  # a coin toss has 0.69
    kernel.run(
        "trained = cross_entropy(model(inputs), dataset.tensors[1]).item(); print(f'trained {trained:.3f}')"
    )
    kernel.run("assert trained < 0.6, 'the trained weights are in model'")
    for code in others:
        kernel.run(code)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*  ## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for text in TEXTS.values():
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE))
        assert named <= targets
    assert {"demo", "test", "wheel", "docs"} <= set(
        re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.MULTILINE)
    )


def test_commands_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    spans = re.findall(r"`(nblaunch [^`]+)`", README)
    assert check_commands(spans, capsys) >= 2


@pytest.mark.parametrize(("name", "link"), LINKS)
def test_links_lead_to_files(name: str, link: str) -> None:
    assert (ROOT / link.partition("#")[0]).exists()


def test_no_address_is_a_placeholder() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    assert len(pages) > 20
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"REPOSITORY_OWNER|<address|your-?name|example\.com", text), path


def test_the_map_shows_every_folder_and_module() -> None:
    (shown,) = [text for _, text in blocks(ROOT / "CONTRIBUTING.md") if text.startswith("nblaunch/\n")]
    package = ROOT / "nblaunch"
    folders = re.findall(r"^  ([a-z_]+)/ ", shown, flags=re.MULTILINE)
    assert sorted(folders) == sorted(file.parent.name for file in package.glob("*/__init__.py"))
    modules = re.findall(r"^  ([a-z_]+)\.py ", shown, flags=re.MULTILINE)
    assert sorted(modules) == sorted(file.stem for file in package.glob("[a-z]*.py"))
    parts = re.findall(r"([a-z]+)/[,;]? ?", re.search(r"^  training/ (.*)$", shown, flags=re.MULTILINE)[1])  # type: ignore[index]
    assert sorted(parts) == sorted(file.parent.name for file in (package / "training").glob("*/__init__.py"))
    others = re.findall(r"^([a-z]+)/", shown, flags=re.MULTILINE)
    assert {"nblaunch", "tests", "docs"} <= set(others)
    assert all((ROOT / name).is_dir() for name in others), others


def test_the_list_of_test_folders_is_complete() -> None:
    (shown,) = [text for _, text in blocks(ROOT / "CONTRIBUTING.md") if text.startswith("architecture/ ")]
    listed = re.findall(r"^([a-z_]+)/ ", shown, flags=re.MULTILINE)
    # A folder with only Python's cache was removed.
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("[!_]*"))}
    package = {path.parent.name for path in (ROOT / "nblaunch").glob("*/__init__.py")}
    assert sorted(listed) == sorted(folders - package - {"__pycache__"})


def test_named_files_exist() -> None:
    page = (ROOT / "docs" / "how-a-launch-works.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_/]+/(?:[a-zA-Z_]+\.(?:py|md|toml))?)`", CONTRIBUTING + page)
    assert {"launcher/runner.py", "tests/architecture/test_words.py"} <= set(named)
    assert all((ROOT / name).exists() or (ROOT / "nblaunch" / name).exists() for name in named), named
