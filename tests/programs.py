"""Short programs, forked from a process that has imported torch: the import would take most of their time."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.forkserver import TOKEN_LENGTH, TOKEN_VARIABLE
from tests.kernels import forkserver_for


def output_of(code: str, *arguments: str, limit_s: float = 60.0) -> str:
    """Run a program whose imports find torch loaded, and nothing of nblaunch; return what it has written.

    Args:
        code: the program.
        arguments: the rest of ``sys.argv``.
        limit_s: seconds that it may take.
    """
    env = {**os.environ, TOKEN_VARIABLE: "0" * TOKEN_LENGTH}
    server = forkserver_for(sys.executable, env)
    assert server is not None, "kernels are forked on Linux only"
    with tempfile.TemporaryDirectory() as folder, Path(folder, "output").open("w+") as output:
        Path(folder, "program.py").write_text(code)
        process = server.run_module("program", list(arguments), env, folder, output.fileno())
        try:
            exit_code = process.wait(limit_s)
        except BaseException:
            process.kill()
            raise
        output.seek(0)
        text = output.read().strip()
    assert exit_code == 0, text
    return text
