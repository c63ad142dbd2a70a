"""A real Jupyter server in a separate process, with its own folders.

It uses no setting, extension or running kernel of the user who runs the tests. Subclasses choose the front end:
``lab.py``, ``classic.py``.
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

from tests import forked_kernels, watchman

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 180.0
_TOKEN_VARIABLE = "NBLAUNCH_TEST_SERVER"
FORKED = Path(forked_kernels.__file__)

_Own = TypeVar("_Own", bound="Server")


class Server(ABC):
    """A running server.

    Args:
        folder: the folder in its file browser.
        python: the interpreter that runs it; its kernels use the same environment.

    Attributes:
        url: its address, with a slash at the end.
        token: its access token.
        runtime_folder: folder with the connection files of its kernels.
    """

    ABOUT: str
    """The file in which the server stores its address; ``{pid}`` is its process id."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        # A server in a separate POSIX session would outlive this process if that is killed.
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
                [python, str(FORKED), *self.command()],
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
        """Return the server's module and its arguments. Called before the server runs."""

    def configure(self, folder: Path) -> None:
        """Write the settings of its user below ``folder``, before it starts."""

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call the server's REST API; return the parsed answer, or None if it is empty."""
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
        # Kernels have their own process groups. A server that exits properly has ended them.
        left = [p for p in psutil.process_iter() if _carries(p, self.token)]
        for process in left:
            process.kill()
        psutil.wait_procs(left, 30)
        self._home.cleanup()

    def __enter__(self: _Own) -> _Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, about: Path) -> None:
        """Wait for the file with the server's address, then for an answer."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.url = json.loads(about.read_text())["url"]
                self.request("GET", "api/status")
                return
            except (OSError, ValueError):
                time.sleep(0.1)  # nothing signals the appearance of the file
        raise AssertionError(f"{type(self).__name__} did not start:\n{self.log[-4000:]}")


def _carries(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(_TOKEN_VARIABLE) == token
    except psutil.Error:
        return False
