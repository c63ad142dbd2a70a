"""Import lines for Accelerate with ``accelerate`` replaced: they work, or the error says why not and what to do."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

import nblaunch
import nblaunch.utils
from nblaunch.compat import DELEGATED, HOMES, INSTEAD
from tests.hf_surface.surface import snapshot
from tests.programs import output_of
from tests.tools import stubs

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


def test_accelerate_imports_work() -> None:
    assert output_of(LINES) == "all found"


def test_foreign_finder_is_not_mistaken_for_ours() -> None:
    other = """
import sys
class _Finder:
    def find_spec(self, name, path=None, target=None):
        return None
sys.meta_path.insert(0, _Finder())
"""
    assert output_of(other + LINES) == "all found"


@pytest.mark.parametrize("module", sorted(HOMES))
def test_every_name_of_the_table_is_defined_in_its_home(module: str) -> None:
    loaded = importlib.import_module(module)
    assert loaded.__all__ == sorted(HOMES[module])
    for name, home in HOMES[module].items():
        value = getattr(loaded, name)
        assert value is getattr(importlib.import_module(home), name)
        if not name.isupper():
            assert value.__module__ == home, f"{name} is only imported in {home}"


@pytest.mark.parametrize("module", stubs.MODULES)
def test_type_checkers_see_the_same_names(module: str) -> None:
    assert stubs.path_of(module).read_text(encoding="utf-8") == stubs.stub_of(module), "run: make stubs"


def test_importing_a_module_of_the_table_loads_no_home() -> None:
    code = "import sys, nblaunch.utils, nblaunch.state; print('torch' in sys.modules)"
    assert _run(code) == "False"


def test_a_star_import_has_every_name() -> None:
    code = "from nblaunch.state import *; print(PartialState.__name__, is_initialized())"
    assert output_of(code) == "PartialState False"


def test_modules_are_pickled_by_name() -> None:
    assert cloudpickle.loads(cloudpickle.dumps(nblaunch.utils)) is nblaunch.utils


def test_a_folder_of_an_older_version_does_not_hide_a_module(tmp_path: Path) -> None:
    code = f"""
import nblaunch
nblaunch.__path__.insert(0, {str(tmp_path)!r})
import nblaunch.utils
print(nblaunch.utils.set_seed.__module__)
"""
    (tmp_path / "utils" / "__pycache__").mkdir(parents=True)
    assert output_of(code) == "nblaunch.training.collectives.rng"


def test_every_name_is_found_where_the_reference_has_it() -> None:
    for path, names in snapshot().items():
        if f"nblaunch.{path}" in HOMES:
            module = importlib.import_module(f"nblaunch.{path}")
            lost = [name for name in names if hasattr(nblaunch.utils, name) and not hasattr(module, name)]
            assert not lost, path


def test_aliased_names_are_pickled_by_home() -> None:
    operations = importlib.import_module("nblaunch.utils.operations")
    assert b"nblaunch.utils" not in pickle.dumps(operations.gather)


def test_device_map_names_come_from_accelerate() -> None:
    for name, home in DELEGATED.items():
        value = getattr(importlib.import_module(home), name)
        assert getattr(nblaunch, name) is getattr(nblaunch.utils.modeling, name) is value
        module = importlib.import_module(home.replace("accelerate", "nblaunch", 1))
        assert getattr(module, name) is value


_WITHOUT_ACCELERATE = """
import sys
sys.modules["accelerate"] = {accelerate}
from nblaunch import infer_auto_device_map
from nblaunch.hooks import AlignDevicesHook
assert not isinstance(object(), AlignDevicesHook)
for use in (infer_auto_device_map, AlignDevicesHook, type("Own", (AlignDevicesHook,), {{}})):
    try:
        use()
    except ImportError as error:
        assert "pip install accelerate" in str(error), error
    else:
        raise AssertionError(use)
print("explained")
"""


@pytest.mark.parametrize("accelerate", ["None", "__import__('nblaunch')"])
def test_names_import_without_accelerate_and_raise_on_use(accelerate: str) -> None:
    assert _run(_WITHOUT_ACCELERATE.format(accelerate=accelerate)) == "explained"


def test_unsupported_modules_raise_with_advice() -> None:
    with pytest.raises(ImportError, match=r"no megatron_lm: .*DistributedDataParallel"):
        exec("from nblaunch.utils.megatron_lm import MegatronEngine")


def test_unsupported_attributes_raise_with_a_reason() -> None:
    with pytest.raises(AttributeError, match=r"no FP8RecipeKwargs: .*torchao"):
        nblaunch.utils.FP8RecipeKwargs  # noqa: B018
    assert not hasattr(nblaunch, "FP8RecipeKwargs")


_WAYS = (
    r"Accelerator\(", r"accelerator\.prepare", r"accelerator\.autocast", r"nblaunch\.launch", "GeneralTracker",
    r"GatheredParameters\(",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_rejected_names_suggest_a_replacement(name: str) -> None:
    with pytest.raises(ImportError, match=rf"nblaunch has no {name}: .*({'|'.join(_WAYS)})"):
        exec(f"from nblaunch.utils import {name}")


def test_unknown_names_raise_standard_errors() -> None:
    with pytest.raises(ImportError, match="cannot import name 'gahter'"):
        exec("from nblaunch.utils.operations import gahter")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'nblaunch\.utils\.operatoins'"):
        importlib.import_module("nblaunch.utils.operatoins")


def test_every_name_of_utils_exists_or_is_explained() -> None:
    names = {*snapshot()["utils"], *snapshot()[""]} - {"is_rich_available"}
    lost = [name for name in names if not hasattr(nblaunch.utils, name) and not hasattr(nblaunch, name)]
    assert [name for name in lost if name not in INSTEAD] == []


def test_explained_names_exist_only_in_accelerate() -> None:
    theirs = {name for names in snapshot().values() for name in names}
    modules = {path.rpartition(".")[2] for path in snapshot()} | {"commands"}
    assert set(INSTEAD) <= theirs | modules
    assert [name for name in INSTEAD if hasattr(nblaunch, name) or hasattr(nblaunch.utils, name)] == []


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    ).stdout.strip()
