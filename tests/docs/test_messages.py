"""Messages that pages and notebooks quote exist in the code.

A quote in prose has double quotes and at least three words: "this process has taken ...". Three dots mark omitted text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch import errors
from tests.architecture.source import ROOT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
# Quotes that are not messages of nblaunch: from Kaggle's menu, an explained word, and from JupyterLab.
NO_MESSAGES = {"Save & Run All", "Not yet run", "Error displaying widget"}
_LEFT_OUT = "\0"


def prose(path: Path) -> str:
    """Return the text of a page or a notebook without its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`", "code", text)


def quotes(text: str) -> list[str]:
    """Return the quotes in prose with at least three words."""
    found = re.findall(r'["“](\w[^"“”\n]*(?:\n[^"“”\n]+)?)["”]', text)
    return [" ".join(quote.split()) for quote in found if len(quote.split()) > 2]


def literals(source: str) -> Iterator[str]:
    """Yield each string of a module except docstrings, with marks for the values in f-strings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else _LEFT_OUT for part in node.values]
            yield "".join(map(str, parts))


def is_in(quote: str, texts: list[str]) -> bool:
    """Return whether one of ``texts`` contains the parts of a quote in this order."""
    pattern = ".*".join(re.escape(part.strip(" ,.:;")) for part in re.split(r"\.\.\.|…", quote))
    return any(re.search(pattern, text, re.DOTALL) for text in texts)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    sources = (ROOT / "nblaunch").rglob("*.py")
    return [text for path in sources for text in literals(path.read_text(encoding="utf-8")) if " " in text]


def test_quoted_messages_exist(texts: list[str]) -> None:
    quoted = [(path.name, quote) for path in PAGES for quote in quotes(prose(path))]
    assert len(quoted) > 2, "nothing is quoted any more, or quotes are written in another way"
    missing = [one for one in quoted if one[1] not in NO_MESSAGES and not is_in(one[1], texts)]
    assert missing == []


def test_a_quote_that_no_code_has_is_found(texts: list[str]) -> None:
    """The search fails for a message that no longer exists, and for one with another ending."""
    page = 'See "this process has taken ... to the moon" and "this process has\ntaken the TPU chips itself", or "a b".'
    wrong, right = quotes(page)
    assert not is_in(wrong, texts)
    assert is_in(right, texts)


def test_errors_that_headings_name_exist() -> None:
    """Troubleshooting is sorted by symptom: its headings begin with the name of an error."""
    named = {
        name
        for path in PAGES
        for name in re.findall(r"^#+ (\w+(?:Error|Died|Failed))\b", prose(path), re.MULTILINE)
    }
    assert {"PayloadError", "WorkerDied", "ResultError"} <= named
    assert [name for name in named if not hasattr(errors, name)] == []
