"""Import lines written for Accelerate, with ``accelerate`` replaced: they work, or say why not and what to do."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

import nblaunch
import nblaunch.utils
from nblaunch.module_aliases import ALIASES, _Finder, install
from nblaunch.not_offered import INSTEAD
from tests.hf_surface.surface import snapshot

LINES = """
from nblaunch.utils.operations import gather, send_to_device
from nblaunch.utils.dataclasses import DistributedType, ProjectConfiguration
from nblaunch.utils.imports import is_xpu_available, is_bf16_available
from nblaunch.utils.random import set_seed
from nblaunch.utils.other import extract_model_from_parallel, save
from nblaunch.utils.memory import release_memory
from nblaunch.utils.modeling import load_checkpoint_in_model
from nblaunch.utils.versions import compare_versions, is_torch_version
from nblaunch.utils.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from nblaunch.utils.deepspeed import DummyOptim, get_active_deepspeed_plugin
from nblaunch.utils.environment import str_to_bool
from nblaunch.utils.tqdm import tqdm
from nblaunch.big_modeling import init_empty_weights, load_checkpoint_and_dispatch
from nblaunch.memory_utils import find_executable_batch_size
import nblaunch.utils.operations as ops
import nblaunch, nblaunch.utils
assert ops.gather is nblaunch.utils.operations.gather is gather
assert callable(nblaunch.utils.tqdm) and nblaunch.utils.tqdm is tqdm
print("all found")
"""


def test_lines_written_for_accelerate_find_their_names() -> None:
    assert _run(LINES) == "all found"


def test_submodules_need_no_import_of_their_own() -> None:
    assert _run("import nblaunch; print(nblaunch.utils.random.set_seed is nblaunch.set_seed)") == "True"


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_an_alias_has_what_it_stands_for(alias: str) -> None:
    module, source = importlib.import_module(alias), importlib.import_module(ALIASES[alias])
    assert {name for name in source.__all__ if name != "__version__"} <= set(dir(module))
    for name in source.__all__:
        assert getattr(module, name) is getattr(source, name)


def test_every_name_is_found_where_the_reference_has_it() -> None:
    for path, names in snapshot().items():
        if f"nblaunch.{path}" in ALIASES:
            module = importlib.import_module(f"nblaunch.{path}")
            lost = [name for name in names if hasattr(nblaunch.utils, name) and not hasattr(module, name)]
            assert not lost, path


def test_what_comes_through_an_alias_is_pickled_by_its_home() -> None:
    operations = importlib.import_module("nblaunch.utils.operations")
    assert b"operations" not in pickle.dumps(operations.gather)


@pytest.mark.parametrize(
    "line",
    [
        "from nblaunch import infer_auto_device_map",
        "from nblaunch.utils import infer_auto_device_map",
        "from nblaunch.utils.modeling import infer_auto_device_map",
        "from nblaunch.big_modeling import infer_auto_device_map",
    ],
)
def test_a_name_that_is_left_out_is_told_with_what_to_do(line: str) -> None:
    with pytest.raises(
        ImportError, match=r"no infer_auto_device_map: .*fsdp_plugin=.*import this name from accel"
    ):
        exec(line)


def test_a_module_that_is_left_out_is_told_with_what_to_do() -> None:
    with pytest.raises(ImportError, match=r"no parallelism_config: .*DistributedDataParallel"):
        exec("from nblaunch.parallelism_config import ParallelismConfig")


def test_the_reason_is_told_to_who_takes_an_attribute_too() -> None:
    with pytest.raises(AttributeError, match=r"no FP8RecipeKwargs: .*bf16"):
        nblaunch.utils.FP8RecipeKwargs  # noqa: B018
    assert not hasattr(nblaunch, "dispatch_model")
    assert not hasattr(nblaunch.utils.operations, "dispatch_model")


def test_unknown_names_are_pythons_own_errors() -> None:
    with pytest.raises(ImportError, match="cannot import name 'gahter'"):
        exec("from nblaunch.utils.operations import gahter")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'nblaunch\.utils\.operatoins'"):
        importlib.import_module("nblaunch.utils.operatoins")


def test_what_is_explained_exists_there_and_not_here() -> None:
    theirs = {name for names in snapshot().values() for name in names}
    modules = {path.rpartition(".")[2] for path in snapshot()} | {"commands"}
    assert set(INSTEAD) <= theirs | modules
    assert [name for name in INSTEAD if hasattr(nblaunch, name) or hasattr(nblaunch.utils, name)] == []


def test_there_is_one_finder_and_it_is_the_last() -> None:
    install()
    assert [type(finder) for finder in sys.meta_path].count(_Finder) == 1
    assert _run("import sys, nblaunch; print(type(sys.meta_path[-1]).__name__)") == "_Finder"


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
