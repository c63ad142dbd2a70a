"""``nblaunch.launch`` is a folder and a function: the package stands in for the function wherever that may be used."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys

import cloudpickle
import pytest

import nblaunch
import nblaunch.launch.preflight
from nblaunch import scripts


def test_it_takes_what_the_function_takes() -> None:
    assert inspect.signature(nblaunch.launch) == inspect.signature(scripts.launch)
    assert "nblaunch.scripts.launch" in (sys.modules["nblaunch.launch"].__doc__ or "")
    with pytest.raises(TypeError, match="did you mean num_processes"):
        nblaunch.launch(print, num_proceses=2)


def test_it_is_pickled_by_its_name() -> None:
    """As a global of a training function that is sent to a fresh process, that is."""
    for dumps in (pickle.dumps, cloudpickle.dumps):
        assert pickle.loads(dumps(nblaunch.launch)) is nblaunch.launch
    assert copy.deepcopy(nblaunch.launch) is nblaunch.launch


@pytest.mark.parametrize(
    "lines",
    ["from nblaunch import launch", "import nblaunch; launch = nblaunch.launch",
     "import nblaunch.launch.job; launch = nblaunch.launch",
     "import nblaunch; first = nblaunch.launch; import nblaunch.launch.job; launch = nblaunch.launch"],
)  # fmt: skip
def test_the_order_of_imports_does_not_matter(lines: str) -> None:
    check = f"{lines}\nimport sys\nassert callable(launch) and launch is sys.modules['nblaunch.launch']"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
