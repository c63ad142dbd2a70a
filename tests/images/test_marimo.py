"""Launches from marimo's cells: in a script, an export, the editor's kernel and the thread of an app."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import websockets

CELLS = """
import marimo
app = marimo.App()

@app.cell
def _():
    import os, pathlib, time
    from nblaunch import last_job, notebook_launcher
    def train(start):
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print("hello from", os.environ["RANK"])
        return start + dist.get_world_size()
    def fail():
        raise LookupError("of the cell")
    value = notebook_launcher(train, (40,), 2)
    print("returned", value)
    try:
        notebook_launcher(fail, (), 2)
    except LookupError as error:
        print("raised", error)
    pathlib.Path(os.environ["RESULT"]).write_text(f"{value} {last_job().plan.start_method}")
    return

if __name__ == "__main__":
    app.run()
"""
WAITS = """
import marimo
app = marimo.App()

@app.cell
def _():
    import time
    from nblaunch import notebook_launcher
    def wait():
        print("waiting", flush=True)
        time.sleep(600)
    try:
        notebook_launcher(wait, (), 2)
    except KeyboardInterrupt:
        print("interrupted")
        raise
    return
"""
TIMEOUT_S = 200.0
SESSION = "s_test12"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file to which the notebook writes its launch's value and how the workers started."""
    monkeypatch.setenv("RESULT", str(tmp_path / "result"))
    monkeypatch.setenv("MARIMO_SKIP_UPDATE_CHECK", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path / "result"


@pytest.mark.parametrize("command", [[], ["-m", "marimo", "export", "html", "-o", os.devnull, "-f"]])
def test_a_script_and_an_export(result: Path, tmp_path: Path, command: list[str]) -> None:
    notebook = tmp_path / "notebook.py"
    notebook.write_text(CELLS)
    done = subprocess.run(
        [sys.executable, *command, str(notebook)],
        capture_output=True, text=True, timeout=TIMEOUT_S, cwd=tmp_path,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    check(printed, result)


def check(printed: str, result: Path) -> None:
    wanted = {"[0] hello from 0", "[1] hello from 1", "returned 42", "raised of the cell"}
    assert wanted <= set(printed.splitlines())
    assert "fail: failed in rank" in printed
    assert result.read_text() == "42 fork"


def test_the_editor_shows_text_and_errors(result: Path, tmp_path: Path) -> None:
    notebook = tmp_path / "notebook.py"
    notebook.write_text(CELLS)
    with served("edit", notebook) as url:
        printed = asyncio.run(printed_by(url, notebook))
    check(printed, result)


def test_the_editors_interrupt_ends_a_launch(result: Path, tmp_path: Path) -> None:
    notebook = tmp_path / "notebook.py"
    notebook.write_text(WAITS)
    with served("edit", notebook) as url:
        printed = asyncio.run(printed_by(url, notebook, interrupt_at="waiting"))
    assert "interrupted" in printed.splitlines()


def test_an_app_runs_its_cells_in_a_thread(result: Path, tmp_path: Path) -> None:
    notebook = tmp_path / "notebook.py"
    notebook.write_text(CELLS)
    with served("run", notebook) as url:
        asyncio.run(printed_by(url, notebook))
    assert result.read_text() == "42 forkserver"


@contextmanager
def served(mode: str, notebook: Path) -> Iterator[str]:
    """Serve the notebook; yield the server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--headless", "--no-token", "--port", str(port)]
    command = [sys.executable, "-m", "marimo", mode, str(notebook), *options]
    with (notebook.parent / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=notebook.parent
        )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        children = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        server.wait(30)
        for child in psutil.wait_procs(children, 10)[1]:
            child.kill()


async def printed_by(url: str, notebook: Path, interrupt_at: str = "") -> str:
    """Open the notebook as a browser does, run all its cells, and return their output."""
    page = await asyncio.to_thread(_when_up, f"http://{url}/")
    token = re.search(r'"serverToken":\s*"([^"]*)"|data-token="([^"]*)"', page)
    headers = {"Content-Type": "application/json", "Marimo-Session-Id": SESSION}
    headers["Marimo-Server-Token"] = next(filter(None, token.groups()), "") if token else ""

    def post(path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(f"http://{url}{path}", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=30).close()

    printed = ""
    address = f"ws://{url}/ws?session_id={SESSION}&file={notebook}"
    async with websockets.connect(address, max_size=None) as connection:
        async for text in connection:
            message = json.loads(text)
            if message["op"] == "kernel-ready":
                # An app starts by itself, and rejects the request.
                await asyncio.to_thread(
                    _allowing_401,
                    lambda: post("/api/kernel/instantiate", {"objectIds": [], "values": [], "autoRun": True}),
                )
            elif message["op"] == "cell-op":
                parts = message["data"].get("console") or []
                for part in [parts] if isinstance(parts, dict) else parts:
                    printed += part["data"]
                if interrupt_at and interrupt_at in printed:
                    interrupt_at = ""
                    await asyncio.to_thread(post, "/api/kernel/interrupt", {})
            elif message["op"] == "completed-run":
                break
    return printed


def _when_up(url: str) -> str:
    while True:  # until the test's timeout
        try:
            with urllib.request.urlopen(url, timeout=30) as page:
                return page.read().decode()
        except urllib.error.URLError:
            continue


def _allowing_401(call: Callable[[], None]) -> None:
    try:
        call()
    except urllib.error.HTTPError as rejected:
        if rejected.code != 401:
            raise
