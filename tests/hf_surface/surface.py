"""Compares nblaunch's names with the stored snapshot of Hugging Face Accelerate's."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nblaunch import Accelerator, PartialState

SNAPSHOT = Path(__file__).with_name("accelerate.json")


_MISSING = object()


@cache
def snapshot() -> dict[str, dict[str, Any]]:
    """Return Accelerate's modules, each with its public names."""
    modules: dict[str, dict[str, Any]] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))["modules"]
    return modules


def differences() -> Iterator[tuple[str, str]]:
    """Yield all differences that a script could notice, as (name, difference)."""
    instances = _instances()
    for path, names in snapshot().items():
        module = our_module(path)
        above = snapshot().get(path.rpartition(".")[0], {}) if path else {}
        for name, theirs in names.items():
            full = f"{path}.{name}".lstrip(".")
            if not hasattr(module, name):
                if name not in above:  # otherwise that check reports it
                    yield full, "missing"
                continue
            yield from _compare(full, getattr(module, name), theirs)
            if name in instances:
                missing = (one for one in theirs.get("attributes", ()) if not hasattr(instances[name], one))
                yield from ((f"{full}.{one}", "missing") for one in missing)


def our_module(path: str) -> ModuleType | None:
    """Return our module with this name; None if there is none."""
    try:
        return importlib.import_module(f"nblaunch.{path}".rstrip("."))
    except ImportError:
        return None


def _instances() -> dict[str, Any]:
    """Yield instances, as a script has them, of the classes whose objects set attributes."""
    accelerator = Accelerator(cpu=True)
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(parameters)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = torch.utils.data.DataLoader([1, 2])  # type: ignore[arg-type]
    optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)
    objects = [
        accelerator,
        accelerator.state,
        accelerator.gradient_state,
        PartialState(),
        optimizer,
        scheduler,
    ]
    return {type(one).__name__: one for one in objects} | {"DataLoaderShard": loader}


def _compare(full: str, ours: Any, theirs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if theirs["kind"] == "enum":
        for member in theirs["members"]:
            if not (isinstance(ours, type) and issubclass(ours, enum.Enum) and member in ours.__members__):
                yield f"{full}.{member}", "missing"
        return
    if theirs["kind"] in ("class", "function") and theirs["parameters"] is not None:
        yield from _compare_parameters(full, ours, theirs["parameters"])
    for name, parameters in theirs.get("members", {}).items():
        member = inspect.getattr_static(ours, name, _MISSING)
        if member is _MISSING and name not in getattr(ours, "__dataclass_fields__", {}):
            yield f"{full}.{name}", "missing"
        elif isinstance(parameters, dict) and not isinstance(member, property):
            yield from _compare_parameters(f"{full}.{name}", getattr(ours, name), parameters)


def _compare_parameters(full: str, ours: Any, theirs: dict[str, str]) -> Iterator[tuple[str, str]]:
    found = {n: p for n, p in inspect.signature(ours).parameters.items() if n != "self"}
    takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in found.values())
    order = [name for name, p in found.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any_position = any(p.kind is p.VAR_POSITIONAL for p in found.values())
    for position, (name, text) in enumerate(theirs.items()):
        kind, _, default = text.partition(" ")
        if kind.startswith("VAR_"):
            continue
        if name not in found:
            if not (takes_any_keyword and kind == "KEYWORD_ONLY") and not takes_any_position:
                yield f"{full}({name})", "missing"
            continue
        if kind.startswith("POSITIONAL") and order[position : position + 1] != [name]:
            yield f"{full}({name})", "position"
        ours_default = found[name].default
        if default.startswith("= ") and default != "= ..." and repr(ours_default) != default[2:]:
            yield f"{full}({name})", f"default {ours_default!r} instead of {default[2:]}"
