"""Store the public names and signatures of the installed ``accelerate``, as data for tests/hf_surface.

    python -m tests.tools.snapshot_surface

Run it to update the snapshot for a new release; the tests read only its output. It stores names, parameter names and
defaults, which are facts about an interface, and nothing else of the package.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate

TARGET = Path(__file__).parents[1] / "hf_surface" / "accelerate.json"
MODULES = (
    "", "data_loader", "launchers", "local_sgd", "logging", "optimizer", "scheduler", "state", "tracking", "utils",
    "big_modeling", "checkpointing", "hooks", "inference", "memory_utils", "parallelism_config",
    *(f"utils.{name}" for name in (
        "ao", "bnb", "constants", "dataclasses", "deepspeed", "environment", "fsdp_utils", "imports", "launch",
        "megatron_lm", "memory", "modeling", "offload", "operations", "other", "random", "torch_xla", "tqdm",
        "transformer_engine", "versions",
    )),
)  # fmt: skip


def parameters_of(function: Any) -> dict[str, str] | None:
    """Return parameter names in order, each with its kind and default as text; None if Python does not know them."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return {
        name: f"{parameter.kind.name} {default_of(parameter.default)}".strip()
        for name, parameter in signature.parameters.items()
        if name != "self"
    }


def default_of(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return ""
    if default is None or (
        isinstance(default, (bool, int, float, str)) and not isinstance(default, enum.Enum)
    ):
        return f"= {default!r}"
    return "= ..."


def describe(value: Any) -> dict[str, Any]:
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return {"kind": "enum", "members": sorted(value.__members__)}
    if inspect.isclass(value):
        members = {
            name: describe_member(member)
            for name in sorted(dir(value))
            if not name.startswith("_")
            and (member := inspect.getattr_static(value, name, None)) is not None
            and name in own_names(value)
        }
        described = {"kind": "class", "parameters": parameters_of(value), "members": members}
        attributes = sorted(set(attributes_of(value)) - members.keys())
        return described | ({"attributes": attributes} if attributes else {})
    if callable(value):
        return {"kind": "function", "parameters": parameters_of(value)}
    return {"kind": "value"}


def attributes_of(cls: type) -> Iterator[str]:
    """Return public names that the package's own code sets on ``self``."""
    for base in cls.__mro__:
        if base.__module__.startswith("accelerate"):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if is_set and ast.unparse(node.value) == "self" and not node.attr.startswith("_"):
                    yield node.attr


def own_names(cls: type) -> set[str]:
    """Return the names that the package itself defines on a class, rather than torch or Python."""
    return {name for base in cls.__mro__ if base.__module__.startswith("accelerate") for name in vars(base)}


def describe_member(member: Any) -> Any:
    if isinstance(member, property):
        return "property"
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    return parameters_of(member) if callable(member) else "value"


def is_theirs(value: Any) -> bool:
    return getattr(value, "__module__", "").startswith("accelerate")


def is_constant(name: str, value: Any) -> bool:
    return name.isupper() and isinstance(value, (str, int, tuple, list, dict)) and name != "TYPE_CHECKING"


def names_of(module: Any, path: str) -> list[str]:
    """Return public names: those that a module defines, and for a package also those that it re-exports."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    constants = [name for name, value in public.items() if is_constant(name, value)]
    names = [name for name, value in public.items() if is_theirs(value)]
    if path not in ("", "utils"):
        names = [name for name in names if public[name].__module__ == module.__name__]
    return sorted({*names, *constants})


def main() -> None:
    surface: dict[str, Any] = {}
    for path in MODULES:
        module = importlib.import_module(f"accelerate.{path}".rstrip("."))
        above = surface.get(path.rpartition(".")[0], {})
        surface[path] = {
            name: {"kind": "value"} if name in above else describe(getattr(module, name))
            for name in names_of(module, path)
        }
    text = json.dumps({"version": accelerate.__version__, "modules": surface}, indent=1)
    TARGET.write_text(text + "\n", encoding="utf-8")
    print(f"{TARGET}: {sum(map(len, surface.values()))} names of accelerate {accelerate.__version__}")


if __name__ == "__main__":
    main()
