"""The buttons of a notebook and a detached job: a real Jupyter server restarts and interrupts its kernel."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client import BlockingKernelClient

from nblaunch import detached
from tests.browser.lab import Lab
from tests.event_loop import event_loop  # noqa: F401  a fixture

TIMEOUT_S = 120.0
LAUNCH = """
import os, nblaunch

def count(gate):
    print("begun")
    open(gate + os.environ["RANK"]).close()  # waits for the test
    return 7

nblaunch.notebook_launcher(count, ({gate!r},), num_processes=2, background=True, detach=True, dashboard="none")
"""
WAIT = "import nblaunch\njob = nblaunch.attach(dashboard='none')\nprint('waits')\njob.result()"


@contextmanager
def connected(server: Lab, kernel_id: str) -> Iterator[BlockingKernelClient]:
    """Connect like a page that shows the notebook."""
    client = BlockingKernelClient(connection_file=str(server.runtime_folder / f"kernel-{kernel_id}.json"))
    client.load_connection_file()
    client.start_channels(hb=False)
    try:
        while not is_ready(client):
            continue
        yield client
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)


def is_ready(client: BlockingKernelClient) -> bool:
    """Return whether the kernel answers on both channels; earlier messages are lost."""
    client.kernel_info()
    try:
        client.get_shell_msg(timeout=1.0)
        client.get_iopub_msg(timeout=1.0)
    except queue.Empty:
        return False
    return True


def run(client: BlockingKernelClient, code: str, at_output: Callable[[], object] = int) -> dict[str, Any]:
    """Run a cell; call ``at_output()`` when it has printed; return the reply."""

    def on_output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            at_output()

    reply = client.execute_interactive(code, timeout=TIMEOUT_S, allow_stdin=False, output_hook=on_output)
    return dict(reply["content"])


def test_a_job_continues_whatever_happens_to_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBLAUNCH_LOG_DIR", str(tmp_path))
    gate = str(tmp_path / "gate")
    for rank in range(2):
        os.mkfifo(f"{gate}{rank}")
    with Lab(tmp_path) as server:
        kernels = "api/kernels"
        kernel_id = server.request("POST", kernels, {"name": "python3"})["id"]
        with connected(server, kernel_id) as client:
            assert run(client, LAUNCH.format(gate=gate))["status"] == "ok"
            interrupt = f"{kernels}/{kernel_id}/interrupt"
            assert (
                run(client, WAIT, lambda: server.request("POST", interrupt))["ename"] == "KeyboardInterrupt"
            )
            assert [job.status for job in detached.jobs()] == ["running"]
            server.request("POST", f"{kernels}/{kernel_id}/restart")
        with connected(server, kernel_id) as client:  # the page was reloaded
            assert (
                run(client, WAIT, lambda: server.request("POST", interrupt))["ename"] == "KeyboardInterrupt"
            )
            assert [job.status for job in detached.jobs()] == ["running"]
        server.request("DELETE", f"{kernels}/{kernel_id}")
        assert [job.status for job in detached.jobs()] == ["running"]
        job = detached.attach(dashboard="none")
        for rank in range(2):
            open(f"{gate}{rank}", "w").close()
        assert job.result(TIMEOUT_S) == 7
        assert job.logs(1) == "begun\n"
