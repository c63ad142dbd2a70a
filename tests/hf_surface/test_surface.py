"""The names that scripts import and call are those of the reference, but for the deviations that are listed."""

from __future__ import annotations

import ast
import importlib
import re
from fnmatch import translate
from functools import cache

import pytest

from nblaunch.not_offered import explanation
from tests.architecture.source import Module, modules
from tests.hf_surface.deviations import DEVIATIONS
from tests.hf_surface.surface import differences, our_module, snapshot

HAND_ON = {module.name for module in modules() if module.name.removeprefix("nblaunch.") in snapshot()} | {
    "nblaunch.accelerator"
}

HAS_ALIASES = "__getattr__ = attributes_of(__name__)"


@cache
def _found() -> tuple[tuple[str, str], ...]:
    return tuple(differences())


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(translate(text.replace("[", "[[]")))


def test_every_difference_is_on_purpose() -> None:
    patterns = [_pattern(text) for texts in DEVIATIONS.values() for text in texts]
    surprises = [
        f"{name}: {what}" for name, what in _found() if not any(pattern.match(name) for pattern in patterns)
    ]
    assert not surprises, "differs from the reference and is not in deviations.py:\n" + "\n".join(surprises)


def test_every_deviation_is_still_one() -> None:
    names = [name for name, _ in _found()]
    stale = [
        text for texts in DEVIATIONS.values() for text in texts if not any(map(_pattern(text).match, names))
    ]
    assert not stale, f"no longer differ, take them out of deviations.py: {stale}"


def test_the_snapshot_has_what_people_use() -> None:
    assert len(snapshot()["utils"]) > 200
    assert "gather_for_metrics" in snapshot()[""]["Accelerator"]["members"]


@pytest.mark.parametrize(
    "module", [m for m in modules() if m.name in HAND_ON], ids=lambda module: module.name
)
def test_modules_of_the_surface_only_hand_on(module: Module) -> None:
    for statement in module.tree.body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_import = isinstance(statement, ast.ImportFrom)
        is_all = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
        assert is_docstring or is_import or is_all or ast.unparse(statement) == HAS_ALIASES, (
            f"{module.at(statement)}: {ast.unparse(statement):.80}"
        )
    loaded = importlib.import_module(module.name)
    for name in loaded.__all__:
        if not name.isupper():
            assert getattr(loaded, name).__module__.startswith("nblaunch."), name
            assert getattr(loaded, name).__module__ != module.name, name


def test_every_module_of_the_surface_is_there_or_explained() -> None:
    missing = {path for path in snapshot() if path and our_module(path) is None}
    assert missing == {
        "hooks", "inference", "parallelism_config", "utils.ao", "utils.bnb", "utils.megatron_lm", "utils.offload",
        "utils.transformer_engine",
    }  # fmt: skip
    assert all(explanation(path.rpartition(".")[2]) for path in missing)
