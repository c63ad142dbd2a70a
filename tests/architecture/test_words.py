"""Words and phrases that PyTorch's vocabulary and plain English replace by better ones."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import PACKAGE, ROOT, listing

# User, process, caller or "no rank" instead; report, emit, send, receive or handle instead.
UNUSED = [
    "person",
    "persons",
    "people",
    "somebody",
    "someone",
    "anybody",
    "anyone",
    "nobody",
    "everybody",
    "whoever",
    "whom",
    "tell",
    "tells",
    "telling",
    "told",
    "hear",
    "hears",
    "hearing",
    "heard",
    "heed",
    "heeds",
    "heeded",
    "said",
    "deaf",
]
# `\b` alone would not find a word within a name such as `_tell_all`.
PATTERN = re.compile(rf"(?<![A-Za-z])({'|'.join(UNUSED)})(?![A-Za-z])", re.IGNORECASE)

ALLOWED = {
    "nblaunch/wire/pickling/payload.py": ("self.tell()",),  # a file's method
}


def test_words_that_are_not_used() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{number} {found[0]}"
        for path in _files()
        for number, line in enumerate(_text(path).splitlines(), 1)
        for found in [PATTERN.search(_without_allowed(path, line))]
        if found
    ]
    assert not offenders, f"use the words of PyTorch:{listing(offenders)}"


def test_files_are_plain_text() -> None:
    """A control character, which a failed edit can leave behind, hides a file from git diff and grep."""
    offenders = [
        f"{path.relative_to(ROOT)} {found[0]!r}"
        for path in _files()
        for found in [re.search(r"[^\n\t\x20-\x7e\x80-\U0010ffff]", path.read_text(encoding="utf-8"))]
        if found
    ]
    assert not offenders, listing(offenders)


def _files() -> Iterator[Path]:
    yield from sorted(PACKAGE.rglob("*.py"))
    yield from sorted((ROOT / "notebooks").glob("*.ipynb"))
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from sorted((ROOT / "docs" / "_extensions").glob("*.py"))
    yield from (file for file in sorted((ROOT / "tests").rglob("*.py")) if file != Path(__file__).resolve())
    yield from sorted((ROOT / "tests").rglob("*.md"))
    yield from sorted((ROOT / "binder").iterdir())
    yield from (
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml")
    )


def _text(path: Path) -> str:
    """Return the text of a file; for a notebook, the text of its cells without outputs."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def _without_allowed(path: Path, line: str) -> str:
    for use in ALLOWED.get(path.relative_to(ROOT).as_posix(), ()):
        line = line.replace(use, "")
    return line


# Turns that a native technical writer avoids: name the thing instead of "that of", and write "is not a file" instead of
# "is no file", "alternately" instead of "in turns", and "weight files" instead of "files of weights". A docstring is a
# sentence or names the thing; it does not begin with "Of".
TURNS = re.compile(
    r"(?<!sure )\b(?:that|those) of\b"
    r"|(?<!there )(?<!There )\bis no (?!longer\b)"
    r"|\b[Tt]ake it that\b"
    r"|\bin turns\b|\bfiles? of weights\b|\bforemost\b|\b(?:files|variables) stay\b"
    r'|"""Of (?!course)'
)

RIGHT_TURNS = {
    "nblaunch/launcher/requests.py": ("There is no ``close``",),
    "nblaunch/dashboard/widget_panel.py": ("There is no Output widget",),
}
"""File -> lines on which a phrase is right."""


def test_phrases_that_are_not_used() -> None:
    paths = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "docs").rglob("*.md"))]
    paths += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "notebooks").glob("*.ipynb"))]
    offenders = [
        f"{path.relative_to(ROOT)}:{number} {turn[0]}"
        for path in paths
        for number, line in enumerate(_text(path).splitlines(), 1)
        for turn in [TURNS.search(line)]
        if turn and not any(part in line for part in RIGHT_TURNS.get(path.relative_to(ROOT).as_posix(), ()))
    ]
    assert not offenders, f"name the thing:{listing(offenders)}"


# A name says what the value is: a match, a rank's calls, the pid. These say how the value came about.
VAGUE_NAMES = {"found", "one", "own", "known"}


def test_names_that_are_not_used() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name in _assigned(path)
        if name in VAGUE_NAMES
    ]
    assert not offenders, f"name the thing that the variable holds:{listing(offenders)}"


def _assigned(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of every variable and parameter."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
