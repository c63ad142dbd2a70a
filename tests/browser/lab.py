"""A real JupyterLab in a real browser: start both, open notebooks, run cells, look at what they show.

    with Lab.start(folder) as lab, Browser.start() as browser:
        page = lab.open(browser, "quickstart.ipynb")
        page.run(3)                       # the cell's position among all cells
        page.wait_for_text(3, "done in")
        page.screenshot("quickstart.png")

The server runs in a process of its own, with its own folders: no setting, extension or running kernel of the person
who runs the tests takes part. Used by the browser tests and by ``make picture``.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import Request, urlopen

import nbformat
import psutil
from playwright.sync_api import Browser as ChromiumBrowser
from playwright.sync_api import Locator, Playwright, sync_playwright
from playwright.sync_api import Page as BrowserPage

from scripts import browser as chromium
from tests import watchman

START_TIMEOUT_S = 60.0
WAIT_S = 60.0
_TOKEN_VARIABLE = "NBLAUNCH_TEST_LAB"

# What a fresh user is asked and told, and what would move on the screen while a test looks at it.
SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none", "recordTiming": False},
    # Widget state is kept in saved notebooks wherever there is some: the harshest setting for our promise of none.
    "@jupyter-widgets/jupyterlab-manager/plugin": {"saveState": True},
}


class Lab:
    """A running JupyterLab server."""

    def __init__(
        self, process: subprocess.Popen[bytes], url: str, token: str, folder: Path, home: Any
    ) -> None:
        self._process = process
        self.url = url
        self._token = token
        self.folder = folder
        self._home = home

    @classmethod
    def start(cls, folder: Path, settings: Mapping[str, dict[str, Any]] = SETTINGS) -> Lab:
        """Start a server whose file browser shows ``folder``, and wait until it answers."""
        # A server in a session of its own would outlive this process where that is killed.
        watchman.begin()
        home = tempfile.TemporaryDirectory(prefix="nbl-")
        token = secrets.token_hex(8)
        config = Path(home.name) / "config"
        for name, values in settings.items():
            file = config / "lab" / "user-settings" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        log = (Path(home.name) / "server.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
             "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={token}",
             f"--ServerApp.root_dir={folder}", "--ServerApp.terminals_enabled=False",
             "--KernelManager.transport=ipc"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, start_new_session=True,
            env={
                **os.environ,
                "JUPYTER_CONFIG_DIR": str(config),
                "JUPYTER_DATA_DIR": f"{home.name}/data",
                "JUPYTER_RUNTIME_DIR": f"{home.name}/run",
                "JUPYTER_PREFER_ENV_PATH": "1",
                "IPYTHONDIR": f"{home.name}/ipython",
                "PYDEVD_DISABLE_FILE_VALIDATION": "1",
                _TOKEN_VARIABLE: token,
            },
        )  # fmt: skip
        log.close()
        lab = cls(process, "", token, folder, home)
        try:
            lab._connect()
        except BaseException:
            lab.close()
            raise
        return lab

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call the server's REST API; returns the parsed answer, None where it is empty."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}{path}", data, {"Authorization": f"token {self._token}"}, method=method)
        with urlopen(request, timeout=WAIT_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def open(self, browser: Browser, name: str) -> Page:
        """Open a notebook of :attr:`folder` in a tab of its own, in single-document mode, with a kernel ready."""
        page = Page(browser.new_page(), self)
        page.goto(f"{self.url}doc/tree/{name}?token={self._token}&reset")
        return page

    def close(self) -> None:
        """End the server and its kernels."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(15)
        # Kernels live in process groups of their own. An orderly server has ended them.
        left = [p for p in psutil.process_iter() if _carries(p, self._token)]
        for process in left:
            process.kill()
        psutil.wait_procs(left, 10)
        self._home.cleanup()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        return (Path(self._home.name) / "server.log").read_text(errors="replace")

    def _connect(self) -> None:
        """Wait for the file in which the server says where it is, then for an answer."""
        deadline = time.monotonic() + START_TIMEOUT_S
        about = Path(self._home.name) / "run" / f"jpserver-{self._process.pid}.json"
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.url = json.loads(about.read_text())["url"]
                self.request("GET", "api/status")
                return
            except (OSError, ValueError):
                time.sleep(0.1)  # nothing tells when the file appears
        raise AssertionError(f"JupyterLab did not start:\n{self.log[-4000:]}")


class Browser:
    """A headless Chromium."""

    def __init__(
        self, playwright: Playwright, chrome: ChromiumBrowser, scale: float, size: tuple[int, int]
    ) -> None:
        self._playwright = playwright
        self._chrome = chrome
        self._context = chrome.new_context(
            viewport={"width": size[0], "height": size[1]}, device_scale_factor=scale
        )
        self._context.set_default_timeout(WAIT_S * 1000)

    @classmethod
    def start(cls, *, scale: float = 1.0, size: tuple[int, int] = (1000, 900)) -> Browser:
        """Start it.

        Raises:
            FileNotFoundError: there is none; says what to do.
        """
        path = chromium.find()
        if path is None:
            raise FileNotFoundError(chromium.HELP)
        playwright = sync_playwright().start()
        try:
            chrome = playwright.chromium.launch(executable_path=path, args=chromium.flags(), headless=True)
        except BaseException:
            playwright.stop()
            raise
        return cls(playwright, chrome, scale, size)

    def new_page(self) -> BrowserPage:
        return self._context.new_page()

    def close(self) -> None:
        self._chrome.close()
        self._playwright.stop()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Page:
    """A notebook in a browser tab. Cells are counted from 0, text cells included."""

    def __init__(self, page: BrowserPage, lab: Lab) -> None:
        self.page = page
        self._lab = lab

    def goto(self, url: str) -> None:
        self.page.goto(url)
        self._wait_for_kernel()

    def reload(self) -> None:
        """Open the page anew, as the browser's button does; the kernel goes on meanwhile."""
        self.page.reload()
        self._wait_for_kernel()

    def cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> Locator:
        """The output area of a cell."""
        return self.cell(index).locator(".jp-Cell-outputArea")

    def run(self, index: int) -> None:
        """Run a cell, as a person does: click into it, Shift-Enter. Does not wait for its end."""
        editor = self.cell(index).locator(".cm-content")
        editor.scroll_into_view_if_needed()
        editor.click()
        self.page.keyboard.press("Shift+Enter")

    def run_all(self) -> None:
        """Run all cells, as the menu does. Does not wait for their end."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")

    def wait_until_idle(self, index: int, timeout_s: float = WAIT_S) -> None:
        """Wait until a cell has run: its prompt shows a number."""
        prompt = self.cell(index).locator(".jp-InputPrompt")
        self.wait_until(
            lambda: prompt.inner_text().strip("[]: ").isdigit(), f"cell {index} to end", timeout_s
        )

    def is_running(self, index: int) -> bool:
        return "*" in self.cell(index).locator(".jp-InputPrompt").inner_text()

    def text(self, index: int) -> str:
        """What a reader sees below a cell."""
        return self.output(index).inner_text()

    def wait_for_text(self, index: int, text: str, timeout_s: float = WAIT_S) -> None:
        self.wait_until(lambda: text in self.text(index), f"{text!r} below cell {index}", timeout_s)

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
        """Wait until ``condition()`` is true, asked ten times a second.

        Raises:
            AssertionError: it was not in time; the screenshot ``failed.png`` shows what was there instead.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                self.screenshot("failed.png")
                raise AssertionError(f"waited {timeout_s:g} s for {what}; see {ARTIFACTS / 'failed.png'}")
            self.page.wait_for_timeout(100)

    def save(self) -> Any:
        """Save the notebook as the menu does; returns what is then in the file."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        return nbformat.read(self._lab.folder / self._name, as_version=4)

    def screenshot(self, name: str, locator: Locator | None = None) -> Path:
        """Write a picture of the page, or of a part of it, to the folder of artefacts."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        (ARTIFACTS / name).write_bytes((locator or self.page).screenshot())
        return ARTIFACTS / name

    def shut_down(self) -> None:
        """End the kernel and close the tab."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()

    @property
    def _name(self) -> str:
        return self.page.url.partition("/tree/")[2].partition("?")[0]

    def _wait_for_kernel(self) -> None:
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        # What is run before the session is there is lost. A kernel that is busy (after a reload) never gets "idle".
        self.page.wait_for_function(
            """async () => {
                const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
                if (!context) return false;
                await context.ready;
                const kernel = context.session?.kernel;
                if (kernel?.connectionStatus !== "connected") return false;
                return ["idle", "busy"].includes(kernel.status);
            }"""
        )


ARTIFACTS = Path(__file__).parents[2] / "artifacts" / "browser"


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    """A notebook with these code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


def _carries(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(_TOKEN_VARIABLE) == token
    except psutil.Error:
        return False
