"""The names that completion offers after ``import nblaunch``."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.programs import output_of

SHOWN = """
import json, nblaunch
before = dir(nblaunch)
nblaunch.Accelerator, nblaunch.notebook_launcher, nblaunch.utils  # loading them brings many modules of ours
print(json.dumps([before, dir(nblaunch), nblaunch.__all__]))
"""


def test_completion_offers_public_names_and_nothing_else() -> None:
    before, after, public = json.loads(output_of(SHOWN))
    offered = [name for name in before if not name.startswith("_")]
    assert before == after
    assert {name for name in public if not name.startswith("_")} <= set(offered)
    assert {"utils", "state", "logging", "data_loader"} <= set(offered)
    assert set(offered).isdisjoint(
        {"Any", "TYPE_CHECKING", "annotations", "importlib", "sys", "imports", "wire"}
    )


# Each name in a separate process, forked before any name was looked up; torch is imported once for all.
LOOK_UP = """
import os, sys, torch, nblaunch
for name in sys.argv[1:]:
    if os.fork() == 0:
        value = nblaunch
        for part in name.split("."):
            value = getattr(value, part)
        os._exit(0 if callable(value) else 1)
    assert os.wait()[1] == 0, name
"""


def test_accelerate_submodules_need_no_import() -> None:
    output_of(
        LOOK_UP,
        "utils.set_seed",
        "utils.random.set_seed",
        "state.PartialState",
        "data_loader.skip_first_batches",
        "logging.get_logger",
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    code = "import nblaunch\ntry: nblaunch.notebook_luncher\nexcept AttributeError as error: print(error)"
    assert _run(code) == "module 'nblaunch' has no attribute 'notebook_luncher'"


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    ).stdout.strip()
