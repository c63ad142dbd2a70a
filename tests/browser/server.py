"""A real Jupyter server in a process of its own, with its own folders.

No setting, extension or running kernel of the user who runs the tests takes part. Which front end it serves is reported
by what derives from it: ``lab.py``, ``classic.py``.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.request import Request, urlopen

import psutil

from tests import watchman

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
ANSWER_TIMEOUT_S = 60.0
_TOKEN_VARIABLE = "NBLAUNCH_TEST_SERVER"

_Own = TypeVar("_Own", bound="Server")


class Server(ABC):
    """A running server.

    Args:
        folder: what its file browser shows.
        python: the interpreter that runs it; its kernels are of the same environment.

    Attributes:
        url: where it answers, with a slash at the end.
        token: what it asks for.
        runtime_folder: with the connection files of its kernels.
    """

    ABOUT: str
    """The file in which such a server says where it is; ``{pid}`` stands for its process."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        # A server in a POSIX session of its own would outlive this process where that is killed.
        watchman.begin()
        self.folder = folder
        self.url = ""
        self.token = secrets.token_hex(8)
        self._home = tempfile.TemporaryDirectory(prefix="nbl-")
        home = Path(self._home.name)
        self.runtime_folder = home / "run"
        self.configure(home / "config")
        with (home / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [python, *self.command()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, start_new_session=True,
                env={
                    **os.environ,
                    "JUPYTER_CONFIG_DIR": str(home / "config"),
                    "JUPYTER_DATA_DIR": str(home / "data"),
                    "JUPYTER_RUNTIME_DIR": str(self.runtime_folder),
                    "JUPYTER_PREFER_ENV_PATH": "1",
                    "IPYTHONDIR": str(home / "ipython"),
                    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
                    _TOKEN_VARIABLE: self.token,
                },
            )  # fmt: skip
        try:
            self._connect(self.runtime_folder / self.ABOUT.format(pid=self._process.pid))
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def command(self) -> list[str]:
        """What comes after the interpreter. Asked for before the server runs."""

    def configure(self, folder: Path) -> None:
        """Write the settings of its user below ``folder``, before it starts."""

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call the server's REST API; returns the parsed answer, None where it is empty."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}{path}", data, {"Authorization": f"token {self.token}"}, method=method)
        with urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    @property
    def log(self) -> str:
        return (Path(self._home.name) / "server.log").read_text(errors="replace")

    def close(self) -> None:
        """End the server and its kernels."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        # Kernels live in process groups of their own. An orderly server has ended them.
        left = [p for p in psutil.process_iter() if _carries(p, self.token)]
        for process in left:
            process.kill()
        psutil.wait_procs(left, 10)
        self._home.cleanup()

    def __enter__(self: _Own) -> _Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, about: Path) -> None:
        """Wait for the file in which the server says where it is, then for an answer."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.url = json.loads(about.read_text())["url"]
                self.request("GET", "api/status")
                return
            except (OSError, ValueError):
                time.sleep(0.1)  # nothing reports when the file appears
        raise AssertionError(f"{type(self).__name__} did not start:\n{self.log[-4000:]}")


def _carries(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(_TOKEN_VARIABLE) == token
    except psutil.Error:
        return False
