"""nblaunch: launch PyTorch training on every device of a machine from a notebook.

    from nblaunch import Accelerator, notebook_launcher

    result = notebook_launcher(training_function, (model,))

The names in ``__all__`` and in ``nblaunch.utils`` are public. Each is imported when it is first used, so ``import
nblaunch`` takes milliseconds and imports neither torch nor ipywidgets.
"""

from __future__ import annotations

from typing import Any

from nblaunch import compat, packages
from nblaunch.backends import first_use

__version__ = "0.1.0"

__all__ = sorted(("__version__", *compat.PUBLIC))  # for type checkers in __init__.pyi

compat.install()

# A launch can fork even if this process has counted the GPUs. If the process has initialised CUDA, a note names the
# line of code that did so.
first_use.watch()
packages.when_imported("torch.cuda", first_use.watch_torch)
packages.when_imported("torch.xpu", first_use.watch_torch)


def __getattr__(name: str) -> Any:
    value = compat.attribute(__name__, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*__all__, "errors", *compat.submodules_of(__name__), *dunders})


def load_ipython_extension(shell: Any) -> None:
    """Add ``%%ranks`` and ``%ranks`` to IPython: ``%load_ext nblaunch``."""
    from nblaunch.session import magics

    magics.register(shell)
