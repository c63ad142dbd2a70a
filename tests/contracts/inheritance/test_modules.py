"""The user's modules that imports would no longer find, or would find in another file."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.inheritance.contract import contract
from tests.kernels import Kernel


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("notebook")
    _write_modules(folder)
    with Kernel.start(cwd=folder) as kernel:
        kernel.run(CELL)
        yield kernel


def _write_modules(folder: Path) -> None:
    for name in ("repo", "elsewhere", "other", "elsewhere/package", "spaces/within"):
        (folder / name).mkdir(parents=True)
    (folder / "repo" / "helper.py").write_text("def value(): return 'of repo'\n")
    (folder / "other" / "helper.py").write_text("def value(): return 'of other'\n")
    (folder / "elsewhere" / "package" / "__init__.py").write_text("")
    (folder / "elsewhere" / "package" / "part.py").write_text("def value(): return 'of package.part'\n")
    (folder / "spaces" / "within" / "deep.py").write_text("def value(): return 'of within.deep'\n")
    (folder / "recipe.txt").write_text("def value(): return 'of recipe'\n")
    (folder / "script.py").write_text("def from_script(): return 'of script'\n")
    with zipfile.ZipFile(folder / "zipped.zip", "w") as archive:
        archive.writestr("inside.py", "def value(): return 'of inside'\n")


CELL = """
import importlib.machinery, importlib.util, os, sys
from nblaunch import notebook_launcher

%cd -q repo
import helper
%cd -q ..
sys.path.append(os.path.abspath("other"))  # where a search finds another module of the same name

sys.path.insert(0, os.path.abspath("elsewhere"))
import package.part
sys.path.pop(0)

sys.path.insert(0, "spaces")
import within.deep
sys.path.pop(0)

sys.path.insert(0, os.path.abspath("zipped.zip"))
import inside
sys.path.pop(0)

loader = importlib.machinery.SourceFileLoader("recipe", "recipe.txt")
recipe = importlib.util.module_from_spec(importlib.util.spec_from_loader("recipe", loader))
sys.modules["recipe"] = recipe
loader.exec_module(recipe)

%run -n script.py

def values():
    modules = helper, package.part, within.deep, inside, recipe
    return [module.value() for module in modules] + [from_script()]

def launch(function, start_method):
    return notebook_launcher(
        function, num_processes=1, start_method=start_method, dashboard="none", backend="cpu", return_all=True
    )
"""

VALUES = ["of repo", "of package.part", "of within.deep", "of inside", "of recipe", "of script"]


@contract("import path and modules")
def test_modules_come_from_the_kernels_files(shared: Kernel, start_method: str) -> None:
    assert shared.run(f"launch(values, {start_method!r})").value == [VALUES]


def test_spawned_processes_find_the_kernels_modules(shared: Kernel) -> None:
    shared.run(
        "def of_child():\n"
        "    import multiprocessing\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        return pool.apply(package.part.value)"
    )
    assert shared.run("launch(of_child, 'forkserver')").value == ["of package.part"]


def test_importable_modules_are_not_sent(shared: Kernel) -> None:
    places = shared.run(
        "import nblaunch, textwrap, torch, pandas\n"
        "from nblaunch.worker.inheritance.fresh_processes import places_of_this_process\n"
        "sorted(places_of_this_process())"
    ).value
    assert places == ["helper", "inside", "package", "package.part", "recipe", "within", "within.deep"]


ASSIGNED = """
import os, torch, torch.nn.functional as F
import settings_of_user as settings

plain_relu = F.relu
F.relu = lambda x, inplace=False: plain_relu(x) + 1
settings.lr, settings.Config.width = 0.5, 8
settings.options["depth"] = 3
settings.names.append("mine")
setattr(settings, "loss", lambda x: -x)
del settings.options["unused"]
os.environ["NAME"] = "kept"

def assigned():
    return (settings.scaled(2), settings.Config.width, settings.options, settings.names, settings.imported,
            settings.loss(4), torch.nn.ReLU()(torch.zeros(1)).item())
"""
SETTINGS = """
lr = 0.1
options = {"unused": 1}
names = ["theirs"]
imported = options

class Config:
    width = 1

def scaled(x):
    return x * lr
"""


@contract("attributes of modules and classes")
def test_attributes_that_cells_have_assigned_apply(shared: Kernel, start_method: str) -> None:
    shared.run(f"open('settings_of_user.py', 'w').write({SETTINGS!r})")
    shared.run(ASSIGNED)
    try:
        wanted = (1.0, 8, {"depth": 3}, ["theirs", "mine"], {"depth": 3}, -4, 1.0)
        assert shared.run("assigned()").value == wanted
        assert shared.run(f"launch(assigned, {start_method!r})").value == [wanted]
    finally:
        shared.run("F.relu = plain_relu; del sys.modules['settings_of_user']")


def test_an_assigned_attribute_that_can_not_be_sent_is_named(shared: Kernel) -> None:
    shared.run(
        "import threading, torch\nhelper.guard, helper.model = threading.Lock(), torch.nn.Linear(1, 1)"
    )
    try:
        cell = shared.run(
            "notebook_launcher(len, ('ab',), num_processes=1, start_method='forkserver', dashboard='text')"
        )
    finally:
        shared.run("del helper.guard, helper.model")
    assert "helper.guard" in cell.shown
    assert "helper.model" in cell.shown


def test_an_assigned_function_uses_the_objects_of_the_call(shared: Kernel) -> None:
    shared.run(
        "import torch\n"
        "model = torch.nn.Linear(1, 1)\n"
        "helper.weight = lambda: model.weight\n"
        "def is_one_model(): return helper.weight() is model.weight"
    )
    try:
        assert shared.run("launch(is_one_model, 'forkserver')").value == [True]
    finally:
        shared.run("del helper.weight")


@contract("import path and modules")
def test_cached_functions_of_cells_arrive(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import functools, nblaunch\n"
        "@functools.lru_cache(maxsize=7)\n"
        "def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"
        "def train(): return fibonacci(30), fibonacci.cache_parameters()['maxsize']"
    )
    cell = kernel.run(
        f"nblaunch.notebook_launcher(train, num_processes=1, start_method={start_method!r}, dashboard='none')"
    )
    assert cell.value == (832040, 7)


@contract("import path and modules")
def test_objects_of_cells_that_are_pickled_by_name_arrive(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import nblaunch, typing, typing_extensions\n"
        "class Missing:\n"
        "    def __reduce__(self): return 'MISSING'\n"
        "MISSING = Missing()\n"
        "MISSING.why = 'unknown'\n"
        "UserId = typing.NewType('UserId', int)\n"
        "Pair = typing_extensions.TypeAliasType('Pair', tuple[int, int])\n"
        "def train(user: UserId, value=MISSING) -> Pair:\n"
        "    return UserId(user), value is MISSING, MISSING.why, str(train.__annotations__['return'].__value__)\n"
        f"options = dict(num_processes=1, start_method={start_method!r}, dashboard='none')"
    )
    assert kernel.run("nblaunch.notebook_launcher(train, (7,), **options)").value == (
        7,
        True,
        "unknown",
        "tuple[int, int]",
    )
    assert kernel.run("nblaunch.notebook_launcher(lambda: MISSING, **options) is MISSING").value is True
