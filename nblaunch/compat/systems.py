"""Systems on which no job can run. There, ``import nblaunch`` works, and using any of it raises one ``LaunchError``."""

from __future__ import annotations

import os
import sys
from typing import Any

from nblaunch.errors import LaunchError

_REMEDIES = {
    "win32": "Windows: install WSL (`wsl --install` in a terminal), and run Jupyter and nblaunch inside it",
    "emscripten": "a browser (Pyodide, JupyterLite): use a kernel on Linux, as Colab's or Kaggle's",
}


def refusal() -> str | None:
    """Return why no job can run on this system, and what to do; None where jobs can."""
    remedy = _REMEDIES.get(sys.platform)
    if remedy is None and not hasattr(os, "fork"):
        remedy = f"{sys.platform}, where no process can be forked: use Linux"
    return remedy and f"nblaunch starts and watches its workers as Linux and macOS can, and this is {remedy}"


class StandIn:
    """What a public name is on such a system: it can be imported, and raises when it is used."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise LaunchError(refusal())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise LaunchError(refusal())
