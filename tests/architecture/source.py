"""The package's source for the tests of this folder: parsed, never imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nblaunch"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file.

    Args:
        name: dotted name, such as ``nblaunch.wire.board``; a package has the name of its folder.
        path: path of the file.
        text: contents of the file.
        tree: the parsed text.
    """

    name: str
    path: Path
    text: str
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        """Return the position of a node in the form that editors and terminals turn into a link."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"

    def functions(self) -> Iterator[FunctionNode]:
        """Return all functions and methods, including nested ones."""
        return (node for node in ast.walk(self.tree) if isinstance(node, FunctionNode))

    def imports(self) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
        """Yield every import statement with each module that it names. Relative imports are resolved."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node, alias.name
            elif isinstance(node, ast.ImportFrom):
                yield node, self._absolute(node)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = self.name.split(".")
        if self.path.name != "__init__.py":
            package = package[:-1]
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])


@cache
def modules() -> tuple[Module, ...]:
    """Return every module of the package by its name."""
    return tuple(_parse(path) for path in sorted(PACKAGE.rglob("*.py")))


def _parse(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text(encoding="utf-8")
    return Module(name, path, text, ast.parse(text, str(path)))


def listing(offenders: list[str]) -> str:
    """Return offenders as lines of a message."""
    return "".join(f"\n  {line}" for line in offenders)
