"""The package imports on the oldest supported Python: no class is subscripted that became subscriptable later.

Checkers miss this: mypy reads stubs, in which these classes are generic, and vermin checks only modules and functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.source import listing, modules

NOT_INDEXED = {
    "logging.StreamHandler": "3.11",
    "logging.LoggerAdapter": "3.11",
    "array.array": "3.12",
    "argparse._SubParsersAction": "never",
}
"""Class that is generic in the stubs -> the first Python that can subscript it at run time."""


def test_no_class_needs_indexing_newer_than_python_3_10() -> None:
    offenders = [
        f"{module.at(index)} {name} (indexed since: {NOT_INDEXED[name]})"
        for module in modules()
        for index in _indexed_at_run_time(module.tree)
        if (name := ast.unparse(index.value)) in NOT_INDEXED
    ]
    assert not offenders, f"write the class without an index:{listing(offenders)}"


def test_an_indexed_base_is_detected() -> None:
    code = "import logging\nclass Handler(logging.StreamHandler[int]):\n    x: logging.LoggerAdapter[int] = None\n"
    indices = [ast.unparse(index) for index in _indexed_at_run_time(ast.parse(code))]
    assert indices == ["logging.StreamHandler[int]"]


def _indexed_at_run_time(tree: ast.AST) -> Iterator[ast.Subscript]:
    """Yield every subscript of a name or attribute that Python evaluates; annotations are not evaluated."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.Subscript) and isinstance(node.value, (ast.Name, ast.Attribute)):
                yield node
            if isinstance(node, ast.AST):
                yield from _indexed_at_run_time(node)
