"""A real JupyterLab in a real browser: start both, open notebooks, run cells, read their outputs.

    with Lab(folder) as lab, Browser.start() as browser:
        page = lab.open(browser, "quickstart.ipynb")
        page.run(3)                       # the cell's position among all cells
        page.wait_for_text(3, "done in")
        page.screenshot("quickstart.png")

JupyterLab 4 and 3. Used by the browser tests and by ``make picture``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import nbformat
from playwright.sync_api import Browser as ChromiumBrowser
from playwright.sync_api import Locator, Playwright, sync_playwright
from playwright.sync_api import Page as BrowserPage

from tests.browser.server import Server
from tests.tools import browser as chromium

WAIT_S = 180.0

# Turn off dialogs and news for new users, and animations.
SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none", "recordTiming": False},
    # Save widget state in notebooks, so that tests can check its size.
    "@jupyter-widgets/jupyterlab-manager/plugin": {"saveState": True},
}

# Turn off dialogs for new users, and nothing else.
QUIET = {name: SETTINGS[name] for name in ("@jupyterlab/apputils-extension/notification",)}


class Lab(Server):
    """A running JupyterLab server, 3 or 4."""

    ABOUT = "jpserver-{pid}.json"

    def command(self) -> list[str]:
        return [
            "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
            "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={self.token}",
            f"--ServerApp.root_dir={self.folder}", "--ServerApp.terminals_enabled=False",
            "--KernelManager.transport=ipc",
        ]  # fmt: skip

    SETTINGS = SETTINGS

    def configure(self, folder: Path) -> None:
        # Each page would otherwise make the server run Node.js three times, to look for extensions to be built.
        page = folder / "labconfig" / "page_config.json"
        page.parent.mkdir(parents=True)
        page.write_text(json.dumps({"buildCheck": False, "buildAvailable": False}))
        for name, values in self.SETTINGS.items():
            file = folder / "lab" / "user-settings" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))

    def open(self, browser: Browser, name: str) -> Page:
        """Open a notebook of :attr:`folder` in a new tab, in single-document mode, with a kernel ready."""
        page = Page(browser.new_page(), self.folder / name)
        page.goto(f"{self.url}doc/tree/{name}?token={self.token}&reset")
        return page


class DefaultLab(Lab):
    """A running JupyterLab with default settings: it saves by itself, and draws only visible cells."""

    SETTINGS = QUIET


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
            FileNotFoundError: no Chromium is installed; the message says what to do.
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
    """A notebook in a browser tab. Cells are counted from 0, text cells included.

    Args:
        page: the tab.
        file: the notebook that it shows.
    """

    # CSS selectors; all but the first are relative to a cell.
    CELL = ".jp-Notebook .jp-Cell"
    OUTPUT = ".jp-Cell-outputArea"
    PROMPT = ".jp-InputPrompt"
    EDITOR = ".cm-content, .CodeMirror"  # for JupyterLab 4 and 3

    def __init__(self, page: BrowserPage, file: Path) -> None:
        self.page = page
        self._file = file

    def goto(self, url: str) -> None:
        self.page.goto(url)
        self._wait_for_kernel()

    def reload(self) -> None:
        """Reload the page, as the browser's button does; the kernel continues."""
        self.page.reload()
        self._wait_for_kernel()

    def cell(self, index: int) -> Locator:
        return self.page.locator(self.CELL).nth(index)

    def output(self, index: int) -> Locator:
        """Return the output area of a cell."""
        return self.cell(index).locator(self.OUTPUT)

    def run(self, index: int) -> None:
        """Run a cell as a user does, with a click and Shift-Enter. Does not wait for its end."""
        editor = self.cell(index).locator(self.EDITOR)
        editor.scroll_into_view_if_needed()
        editor.click()
        self.page.keyboard.press("Shift+Enter")

    def run_all(self) -> None:
        """Run all cells, as the menu does. Does not wait for their end."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")

    def wait_until_idle(self, index: int, timeout_s: float = WAIT_S) -> None:
        """Wait until a cell has run: its prompt shows a number."""
        self.wait_until(lambda: self._prompt(index).isdigit(), f"cell {index} to end", timeout_s)

    def is_running(self, index: int) -> bool:
        return self._prompt(index) == "*"

    def text(self, index: int) -> str:
        """Return the visible text below a cell."""
        return self.output(index).inner_text()

    def wait_for_text(self, index: int, text: str, timeout_s: float = WAIT_S) -> None:
        self.wait_until(lambda: text in self.text(index), f"{text!r} below cell {index}", timeout_s)

    def wait_for_matches(self, index: int, pattern: str, count: int) -> None:
        """Wait until ``pattern`` is found ``count`` times below a cell; its ``^`` is the start of any line."""
        regex = re.compile(pattern, re.MULTILINE)
        self.wait_until(
            lambda: len(regex.findall(self.text(index))) == count,
            f"{count} of {pattern!r} below cell {index}",
        )

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
        """Wait until ``condition()`` is true, checking five times a second.

        Live elements are replaced several times a second, and finally by a table, so a single check may come between
        two of them.

        Raises:
            AssertionError: the condition stayed false; the screenshot ``unmet.png`` shows the page.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                self.screenshot("unmet.png")
                raise AssertionError(f"waited {timeout_s:g} s for {what}; see {ARTIFACTS / 'unmet.png'}")
            self.page.wait_for_timeout(200)

    def save(self) -> Any:
        """Save the notebook with the menu; return the contents of the file."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        return nbformat.read(self._file, as_version=4)

    def screenshot(self, name: str, locator: Locator | None = None) -> Path:
        """Write a picture of the page, or of a part of it, to the folder of artefacts."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        (ARTIFACTS / name).write_bytes((locator or self.page).screenshot())
        return ARTIFACTS / name

    def restart_kernel(self) -> None:
        """Restart the kernel with the menu. Does not wait for the new kernel."""
        context = "window.jupyterapp.shell.currentWidget.sessionContext"
        self.page.evaluate(f"() => {context}.session.kernel.restart()")

    def shut_down(self) -> None:
        """End the kernel and close the tab."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()

    def _prompt(self, index: int) -> str:
        """Return a cell's prompt: a number, a star while it runs, or nothing."""
        return self.cell(index).locator(self.PROMPT).inner_text().removeprefix("In").strip("[]: \xa0")

    def _wait_for_kernel(self) -> None:
        self.page.locator(self.CELL).first.wait_for()
        # Cells that run before the session exists are lost. A kernel that is busy after a reload never becomes "idle".
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
    """Write a notebook with these code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)
