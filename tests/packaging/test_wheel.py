"""The wheel: builds from the source archive, installs into a bare environment without a compiler, and is complete.

No package index is used: the build tools and nblaunch's dependencies come from the tests' environment.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.source import PACKAGE, ROOT, modules

# Packages that a dependency installs, and that are imported by their own name.
COMES_WITH = {
    "IPython": "ipykernel",
    "jupyter_client": "ipykernel",
    "jupyter_core": "ipykernel",
    "traitlets": "ipykernel",
}
# Users' optional packages, imported only if they are installed or if the user names them.
OF_USERS = {
    "accelerate",
    "comet_ml",
    "mlflow",
    "pandas",
    "swanlab",
    "tensorboard",
    "tqdm",
    "trackio",
    "transformers",
    "wandb",
}
IMPORT_NAMES = {"pyyaml": "yaml", "nvidia-ml-py": "pynvml", "torch-xla": "torch_xla", "types-pyyaml": "yaml"}


@dataclass(frozen=True)
class Built:
    """The results of a build."""

    wheel: Path
    sdist: Path

    @property
    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return Parser().parsestr(archive.read(name).decode())

    @property
    def requirements(self) -> list[Requirement]:
        return [Requirement(text) for text in self.metadata.get_all("Requires-Dist", [])]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build a source archive, and a wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="module")
def python(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an interpreter with only nblaunch from the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    interpreter = folder / "bin" / "python"
    run(
        sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--no-index", "--no-deps",
        str(built.wheel), CC="/bin/false", CXX="/bin/false",
    )  # fmt: skip
    return interpreter


def run(*command: str, **environ: str) -> str:
    """Run a program without the tests' environment in its path; it must succeed. Return its output."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT.parent, env={**own, **environ}
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def test_the_wheel_is_pure_and_has_every_file_of_the_package(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
        description = archive.read(next(name for name in names if name.endswith(".dist-info/WHEEL"))).decode()
    assert built.wheel.name.endswith("-py3-none-any.whl")
    assert "Root-Is-Purelib: true" in description
    there = {name for name in names if ".dist-info/" not in name}
    here = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert there == here
    assert "nblaunch/py.typed" in there


def test_the_source_archive_has_what_its_tests_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("pyproject.toml", "Makefile", "LICENSE", "README.md", "CONTRIBUTING.md", "constraints.txt"):
        assert name in names
    for folder in ("docs", "nblaunch", "notebooks", "tests"):
        assert any(name.startswith(f"{folder}/") for name in names)
    assert not [name for name in names if ".venv" in name or "__pycache__" in name]


def test_the_metadata_is_complete(built: Built) -> None:
    metadata = built.metadata
    version = re.search(r'^__version__ = "([^"]+)"', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)
    assert version is not None
    assert (metadata["Name"], metadata["Version"]) == ("nblaunch", version[1])
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_dependencies_are_few(built: Built) -> None:
    plain = {
        canonicalize_name(one.name)
        for one in built.requirements
        if one.marker is None or one.marker.evaluate({"extra": "", "sys_platform": "linux"})
    }
    wanted = {
        "cloudpickle",
        "ipykernel",
        "ipywidgets",
        "numpy",
        "nvidia-ml-py",
        "psutil",
        "pyyaml",
        "rich",
        "safetensors",
        "torch",
    }
    assert plain == wanted
    extras = {extra: of_extra(built, extra) for extra in built.metadata.get_all("Provides-Extra", [])}
    assert {"tpu", "deepspeed", "stateful", "notebooks", "demo", "docs", "lint", "test"} <= extras.keys()
    assert "nblaunch" not in {name for names in extras.values() for name in names}, (
        "an extra was not resolved"
    )
    assert {"torch", "torch-xla"} == extras["tpu"]
    assert extras["lint"] | extras["docs"] | extras["demo"] | extras["notebooks"] <= extras["test"]
    pinned = {
        canonicalize_name(one.name): str(one.specifier)
        for one in built.requirements
        if one.marker and "tpu" in str(one.marker)
    }
    assert pinned["torch"] == pinned["torch-xla"], "torch_xla works with the torch of its own release only"


def of_extra(built: Built, extra: str) -> set[str]:
    return {
        str(canonicalize_name(one.name))
        for one in built.requirements
        if one.marker is not None
        and one.marker.evaluate({"extra": extra})
        and not one.marker.evaluate({"extra": ""})
    }


def test_imported_packages_are_declared(built: Built) -> None:
    declared = {canonicalize_name(one.name) for one in built.requirements if "test" not in str(one.marker)}
    known = (
        {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in declared} | OF_USERS | COMES_WITH.keys()
    )
    offenders = {
        f"{module.at(node)} imports {name}"
        for module in modules()
        for node, name in module.imports()
        if name.partition(".")[0] not in known | sys.stdlib_module_names | {"nblaunch"}
    }
    assert not offenders
    at_the_top = {
        name.partition(".")[0]
        for module in modules()
        for node, name in module.imports()
        if node in module.tree.body
    }
    optional = at_the_top & (OF_USERS | {"deepspeed", "ray", "torch_xla", "torchdata"})
    assert not optional, f"imported at the top of a module, though no user needs to have it: {optional}"


def test_declared_transitive_dependencies_are_required() -> None:
    for name, dependency in COMES_WITH.items():
        required = {Requirement(text) for text in importlib.metadata.requires(dependency) or []}
        always = {
            canonicalize_name(one.name) for one in required if one.marker is None or one.marker.evaluate()
        }
        assert canonicalize_name(name) in always, f"{dependency} does not bring {name}"


def test_the_wheel_imports_without_other_packages(built: Built, python: Path) -> None:
    code = "import nblaunch; print(nblaunch.__file__, nblaunch.__version__, len(dir(nblaunch)))"
    file, version, count = run(str(python), "-c", code).split()
    assert Path(file).is_relative_to(python.parents[1])
    assert version == built.metadata["Version"]
    assert int(count) > 30


def test_type_checkers_see_its_types(python: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from nblaunch import Job, last_job, notebook_launcher\n"
        "notebook_launcher(print, (1,), num_processes='two')\n"
        "reveal_type(last_job())\n"
        "def wait(job: Job) -> str:\n    return job.num_processes\n"
        "reveal_type(notebook_launcher(len, ('a',)))\n"
    )
    ended = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--python-executable", str(python), "--cache-dir", str(tmp_path / "cache"),
            "--config-file", os.devnull, str(program),
        ],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    lines = [line.partition("program.py:")[2] for line in ended.stdout.splitlines()]
    assert lines[0].startswith('2: error: No overload variant of "notebook_launcher" matches')
    assert any(re.match('6: note: Revealed type is "(builtins.)?int"', line) for line in lines), ended.stdout
    assert any("Revealed type is" in line and "Job" in line and "None" in line for line in lines), (
        ended.stdout
    )
    assert any(line.startswith("5: error: Incompatible return value type") for line in lines), ended.stdout
    assert "missing library stubs or py.typed" not in ended.stdout


def test_an_installed_wheel_trains(python: Path) -> None:
    """The dependencies are linked from the tests' environment; nblaunch itself comes from the wheel."""
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = str(python.with_name("nblaunch"))
    assert (
        run(command, "--version")
        .strip()
        .endswith(run(str(python), "-c", "import nblaunch; print(nblaunch.__version__)").strip())
    )
    shown = run(command, "test", "--cpu", "--num_processes", "2", "--only", "gradients", "weights-back")
    assert "all passed" in shown
    where = run(str(python), "-c", "import nblaunch.training; print(nblaunch.training.__file__)")
    assert Path(where.strip()).is_relative_to(python.parents[1])
