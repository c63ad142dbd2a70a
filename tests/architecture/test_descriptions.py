"""Docstrings of public names: every name has one, and it describes only existing parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.architecture.source import FunctionNode, Module, listing, modules

_ARGS = re.compile(r"^Args:\n((?:    .*\n?|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^    ((?:\*{0,2}\w+,\s+)*\*{0,2}\w+):", re.MULTILINE)


def test_every_public_name_has_a_description() -> None:
    offenders = [
        f"{module.at(node)} {node.name}"
        for module in modules()
        for owner, node in _definitions(module)
        if _is_public(owner, node) and ast.get_docstring(node) is None
    ]
    assert not offenders, f"say in a line what they are for:{listing(offenders)}"


def test_docstrings_describe_only_existing_parameters() -> None:
    offenders = [
        f"{module.at(node)} {node.name} has no {name}"
        for module in modules()
        for _, node in _definitions(module)
        for name in sorted(_described(node) - _parameters(node))
    ]
    assert not offenders, listing(offenders)


Definition = FunctionNode | ast.ClassDef


def _definitions(module: Module) -> Iterator[tuple[ast.ClassDef | None, Definition]]:
    """Yield functions, classes and methods of a module, each with the class that defines it."""
    for node in module.tree.body:
        if isinstance(node, Definition):
            yield None, node
        if isinstance(node, ast.ClassDef):
            yield from ((node, inner) for inner in node.body if isinstance(inner, Definition))


def _is_public(owner: ast.ClassDef | None, node: Definition) -> bool:
    """Return whether a name is public and needs a docstring of its own, unlike a setter or an override."""
    if node.name.startswith("_") or (owner is not None and owner.name.startswith("_")):
        return False
    if any(ast.unparse(one).endswith((".setter", "overload")) for one in node.decorator_list):
        return False
    return owner is None or not _overrides(owner, node.name)


def _overrides(owner: ast.ClassDef, name: str) -> bool:
    """Return whether a base class has the method; assume so if the base is outside this package."""
    bases = {ast.unparse(base).partition("[")[0].split(".")[-1] for base in owner.bases} - {"ABC", "Protocol"}
    return any(
        base not in _classes()
        or any(
            any(isinstance(one, FunctionNode) and one.name == name for one in found.body)
            or _overrides(found, name)
            for found in _classes()[base]
        )
        for base in bases
    )


@cache
def _classes() -> dict[str, list[ast.ClassDef]]:
    """Return classes by name; several modules may define the same name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def _described(node: Definition) -> set[str]:
    """Return the names under ``Args``; several names may share one entry."""
    section = _ARGS.search(ast.get_docstring(node) or "")
    entries = _ENTRY.findall(section[1]) if section else []
    return {name.strip().lstrip("*") for entry in entries for name in entry.split(",")}


def _parameters(node: Definition) -> set[str]:
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, FunctionNode) and one.name == "__init__"]
        fields = {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
        return set().union(fields, *map(_parameters, made))
    return {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
