"""Write the stubs of ``nblaunch``, which imports its names lazily, and of Accelerate's module names: ``make stubs``.

Type checkers and editors read them; Python itself does not. The stub of ``nblaunch`` also has the overloads of the
functions in :data:`OVERLOADED`: they give the return type of the user's function, and repeat all arguments, which
``nblaunch/notebook.py`` lists only once.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path

from nblaunch.compat import FILES, HOMES, PUBLIC

ROOT = Path(__file__).parents[2]
MODULES = ("nblaunch", *FILES)

SOURCE = ROOT / "nblaunch" / "notebook.py"

OVERLOADED = ("notebook_launcher", "launch")
"""Functions of :data:`SOURCE` whose flags ``background`` and ``return_all`` determine their return type."""

_NO, _YES = "Literal[False]", "Literal[True]"
_RESULTS = (
    ({"background": _NO, "return_all": _NO}, "_T"),
    ({"background": _NO, "return_all": _YES}, "list[_T]"),
    ({"background": _YES, "return_all": _NO}, "Job[_T]"),
    ({"background": _YES, "return_all": _YES}, "Job[list[_T]]"),
    ({"background": "bool", "return_all": "bool"}, "Any"),
)
"""The types of both flags, and the return type."""

_OVERLOAD_IMPORTS = """\
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload
from nblaunch.spec import (
    BackendName,
    DashboardKind,
    EngineName,
    HangPolicy,
    LaunchStrategy,
    MixedPrecision,
    RendezvousBackend,
    StartMethod,
)
""".splitlines()

_ALSO_IN_ROOT = """
__version__: str

def load_ipython_extension(shell: object) -> None: ...

_T = TypeVar("_T")
"""


def path_of(module: str) -> Path:
    """Return the stub file of a module such as ``nblaunch.utils``."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.pyi" if module == "nblaunch" else path.with_suffix(".pyi")


def stub_of(module: str) -> str:
    """Return the text of a module's stub."""
    homes: dict[str, list[str]] = {}
    is_root = module == "nblaunch"
    for name, home in (PUBLIC if is_root else HOMES[module]).items():
        if name not in OVERLOADED:
            homes.setdefault(home, []).append(name)
        elif not is_root:
            homes.setdefault("nblaunch", []).append(name)
    lines = ["# Written by `make stubs` from nblaunch/compat.py."]
    if is_root:
        lines += _OVERLOAD_IMPORTS
    for home, names in sorted(homes.items()):
        lines.append(f"from {home} import (")
        lines += [f"    {name} as {name}," for name in sorted(names)]
        lines.append(")")
    if is_root:
        lines += [_ALSO_IN_ROOT, *_overloads()]
    return "\n".join(lines) + "\n"


def _overloads() -> Iterator[str]:
    """Yield the overloads of each function in :data:`OVERLOADED`; the first has the docstring."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name in OVERLOADED:
        docstring = functions[name].body[:1]
        for flags, result in _RESULTS:
            overload = copy.deepcopy(functions[name])
            overload.decorator_list = [ast.Name("overload")]
            overload.body = [*docstring, ast.Expr(ast.Constant(...))]
            overload.returns = _annotation(result)
            overload.args.args[0].annotation = _annotation("Callable[..., _T]")
            _annotate_flags(overload.args, flags)
            yield ast.unparse(ast.fix_missing_locations(overload)) + "\n"
            docstring = []


def _annotate_flags(arguments: ast.arguments, flags: dict[str, str]) -> None:
    """Set the flags' types; a flag that must be True in an overload has no default there."""
    for position, argument in enumerate(arguments.kwonlyargs):
        if argument.arg in flags:
            annotation = flags[argument.arg]
            argument.annotation = _annotation(annotation)
            if annotation == _YES:
                arguments.kw_defaults[position] = None


def _annotation(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def main() -> None:
    """Write all stubs."""
    for module in MODULES:
        path_of(module).write_text(stub_of(module), encoding="utf-8")


if __name__ == "__main__":
    main()
