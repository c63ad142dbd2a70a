"""Makes jupyter_client fork its kernels from a process that has imported torch: see ``forkserver.py``.

with forked_kernels.launching(forkserver_for): ...     # in this process
python tests/forked_kernels.py jupyterlab --no-browser  # the same as python -m jupyterlab, with forked kernels
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MODULE = "ipykernel_launcher"


@contextmanager
def launching(forkserver_for: Callable[[str, Mapping[str, str]], Any]) -> Iterator[None]:
    """Fork kernels while the block runs.

    Args:
        forkserver_for: function from interpreter and environment to a fork server; None for a new interpreter.
    """
    from jupyter_client.provisioning import local_provisioner

    from tests.forkserver import TOKEN_LENGTH, TOKEN_VARIABLE

    launch_new = local_provisioner.launch_kernel

    def launch(command: list[str], *, env: dict[str, str], cwd: str | None = None, **options: Any) -> Any:
        python, *words = command
        forkserver = forkserver_for(python, env) if words[:2] == ["-m", _MODULE] else None
        if forkserver is None:
            return launch_new(command, env=env, cwd=cwd, **options)
        env = {**env, TOKEN_VARIABLE: "0" * TOKEN_LENGTH}
        return forkserver.run_module(_MODULE, words[2:], env, cwd or os.getcwd(), sys.__stderr__.fileno())

    local_provisioner.launch_kernel = launch
    try:
        yield
    finally:
        local_provisioner.launch_kernel = launch_new


def main() -> None:
    """Run a module as a program."""
    sys.path[0] = str(Path(__file__).parents[1])
    from tests import left_behind
    from tests.forkserver import Forkserver

    left_behind.adopt_orphans()
    # A front end that reloads a page needs the comm targets that ipywidgets registers when a kernel imports it.
    forkserver = Forkserver(sys.executable, os.environ, left_out=("ipywidgets",))
    sys.path[0] = os.getcwd()
    del sys.argv[0]
    with launching(lambda python, env: forkserver):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
