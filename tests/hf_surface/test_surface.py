"""Names and signatures equal Hugging Face Accelerate's, except for listed deviations."""

from __future__ import annotations

import re
from fnmatch import translate
from functools import cache

from nblaunch.compat import explanation
from tests.hf_surface.deviations import DEVIATIONS
from tests.hf_surface.surface import differences, our_module, snapshot


@cache
def _found() -> tuple[tuple[str, str], ...]:
    return tuple(differences())


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(translate(text.replace("[", "[[]")))


def test_every_difference_is_listed() -> None:
    patterns = [_pattern(text) for texts in DEVIATIONS.values() for text in texts]
    surprises = [
        f"{name}: {what}" for name, what in _found() if not any(pattern.match(name) for pattern in patterns)
    ]
    assert not surprises, "differs from Accelerate and is not in deviations.py:\n" + "\n".join(surprises)


def test_every_listed_deviation_still_exists() -> None:
    names = [name for name, _ in _found()]
    stale = [
        text for texts in DEVIATIONS.values() for text in texts if not any(map(_pattern(text).match, names))
    ]
    assert not stale, f"no longer differ, take them out of deviations.py: {stale}"


def test_the_snapshot_covers_the_used_names() -> None:
    assert len(snapshot()["utils"]) > 200
    assert "gather_for_metrics" in snapshot()[""]["Accelerator"]["members"]


def test_every_module_exists_or_is_explained() -> None:
    missing = {path for path in snapshot() if path and our_module(path) is None}
    assert missing == {
        "utils.megatron_lm", "utils.transformer_engine",
    }  # fmt: skip
    assert all(explanation(path.rpartition(".")[2]) for path in missing)
