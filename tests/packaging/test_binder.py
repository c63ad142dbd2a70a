"""Builds Binder's image as mybinder.org does, only from the repository, and executes the quickstart in it.

Source of the order of steps: repo2docker's documentation, "Configuration files": requirements.txt, then postBuild;
start wraps each command.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.source import ROOT

TEST_VARIABLES = ("PYTHONPATH", "NBLAUNCH_NUM_PROCESSES", "NBLAUNCH_LOG_DIR", "VIRTUAL_ENV")


@pytest.mark.timeout(900)
@pytest.mark.thorough
def test_the_image_builds_and_runs_the_quickstart_on_two_processes(tmp_path: Path) -> None:
    repository = copy_of_repository(tmp_path / "repository")
    environment = make_environment(tmp_path / "environment")
    run(repository, environment, "python", "-m", "pip", "install", "--quiet", "--upgrade", "pip")
    requirements = repository / "binder" / "requirements.txt"
    # Drop the index of CPU builds, because this machine's configuration determines the source of torch.
    requirements.write_text(
        re.sub(r"^--extra-index-url.*\n", "", requirements.read_text(), flags=re.MULTILINE)
    )
    run(repository, environment, "python", "-m", "pip", "install", "--quiet", "-r", "binder/requirements.txt")
    run(repository, environment, "binder/postBuild")
    text = run(
        repository, environment, "binder/start", "nblaunch", "run-notebook", "notebooks/01_quickstart.ipynb"
    )
    assert re.search(r"train: done in .* on 2 processes \(cpu, fork", text)
    assert float(re.search(r"^accuracy .*: ([\d.]+)%$", text, re.MULTILINE)[1]) > 90  # type: ignore[index]


def test_the_python_version_is_tested() -> None:
    assert (ROOT / "binder" / "runtime.txt").read_text().strip() == "python-3.11"


def copy_of_repository(target: Path) -> Path:
    """Copy the tracked files in their present state."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def make_environment(folder: Path) -> dict[str, str]:
    """Create a bare virtual environment; return the variables with which its commands are found first.

    pip compiles no bytecode there; postBuild and the notebook compile what they import.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    lend(folder)
    variables = {name: value for name, value in os.environ.items() if name not in TEST_VARIABLES}
    path = f"{folder / 'bin'}{os.pathsep}{variables['PATH']}"
    return variables | {"PATH": path, "PIP_NO_INPUT": "1", "PIP_COMPILE": "0"}


def lend(folder: Path) -> None:
    """Link torch and what the other requirements depend on into an environment, where pip finds them.

    Unpacking and compiling them would take most of the test's time. The requirements themselves, and nblaunch's own
    dependencies, are installed.
    """
    source = Path(torch.__file__).parents[1]
    (target,) = folder.glob("lib/python*/site-packages")
    text = (ROOT / "binder" / "requirements.txt").read_text()
    required = {Requirement(line).name for line in text.splitlines() if re.match(r"\w", line)}
    names = {name for one in required for name in dependencies_of(one)} - required
    linked = {"torch", "torchgen", "functorch", f"torch-{torch.__version__}.dist-info"}
    for name in names:
        linked |= {file.parts[0] for file in importlib.metadata.files(name) or () if file.parts[0] != ".."}
    for entry in linked - {"__pycache__"}:
        if (source / entry).exists() and not (target / entry).exists():
            (target / entry).symlink_to(source / entry)


def dependencies_of(name: str, found: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the names of the packages that are installed with a package, its own included."""
    found |= {name}
    for text in importlib.metadata.requires(name) or ():
        one = Requirement(text)
        is_used = one.marker is None or one.marker.evaluate({"extra": ""})
        other = canonicalize_name(one.name)
        if is_used and other not in found:
            found = dependencies_of(other, found)
    return found


def run(folder: Path, environment: dict[str, str], *command: str) -> str:
    """Return the output of a command; fail the test with it if the command fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
