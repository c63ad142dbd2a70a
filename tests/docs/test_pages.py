"""The pages under ``docs/``: their code runs, or at least parses, and the names in them exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from nblaunch import env
from tests.architecture.source import ROOT
from tests.kernels import Kernel
from tests.test_readme import blocks, check_commands

PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_the_tutorial_runs_unchanged(kernel: Kernel) -> None:
    shown = ""
    for language, code in blocks(ROOT / "docs" / "tutorial.md"):
        assert language == "python"
        shown += kernel.run(code).stdout
    assert re.search(r"^accuracy 9\d\.\d%$", shown, re.MULTILINE)
    assert "caught: label -7 is not a class" in shown


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_parses_and_imports_what_exists(path: Path) -> None:
    for language, code in blocks(path):
        if language != "python":
            continue
        if code.startswith("%%"):
            code = code.partition("\n")[2]  # a cell for another process
        code = re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE)  # valid only in IPython
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nblaunch"):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_are_valid(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for language, code in blocks(path) if language == "" for line in code.splitlines()]
    check_commands(lines, capsys)


def test_every_check_is_on_the_page_about_silent_errors() -> None:
    page = (ROOT / "docs" / "how-to" / "silent-errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    on_another_page = {"slow_imports", "slow_steps"}
    assert {name for row in rows for name in re.findall(r"\w+", row)} | on_another_page == set(env.CHECKS)
