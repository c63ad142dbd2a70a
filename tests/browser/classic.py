"""The classic notebook, Jupyter Notebook 6, in a real browser.

with Classic(folder, python) as server, Browser.start() as browser:
    page = server.open(browser, "jobs.ipynb")        # from here on as in lab.py
"""

from __future__ import annotations

import random
from typing import Any

import nbformat

from tests.browser.lab import Browser, Page
from tests.browser.server import Server


class Classic(Server):
    """A running server of Jupyter Notebook 6."""

    ABOUT = "nbserver-{pid}.json"

    def command(self) -> list[str]:
        # The server would not report a port that the system chose. If this port is taken, it tries others.
        port = random.randrange(20_000, 30_000)
        return [
            "notebook", "--no-browser", "--allow-root", "--NotebookApp.show_banner=False",
            "--NotebookApp.ip=127.0.0.1", f"--NotebookApp.port={port}", f"--NotebookApp.token={self.token}",
            f"--NotebookApp.notebook_dir={self.folder}", "--KernelManager.transport=ipc",
        ]  # fmt: skip

    def open(self, browser: Browser, name: str) -> ClassicPage:
        """Open a notebook of :attr:`folder` in a new tab, with a kernel ready."""
        page = ClassicPage(browser.new_page(), self.folder / name)
        page.goto(f"{self.url}notebooks/{name}?token={self.token}")
        return page


class ClassicPage(Page):
    """A notebook in a browser tab."""

    CELL = "#notebook-container > .cell"
    OUTPUT = ".output_wrapper"
    PROMPT = ".input_prompt"
    EDITOR = ".CodeMirror"

    def run_all(self) -> None:
        self.page.evaluate("() => Jupyter.notebook.execute_all_cells()")

    def save(self) -> Any:
        self.page.evaluate("() => Jupyter.notebook.save_notebook()")
        return nbformat.read(self._file, as_version=4)

    def restart_kernel(self) -> None:
        self.page.evaluate("() => Jupyter.notebook.kernel.restart()")

    def shut_down(self) -> None:
        self.page.evaluate("() => new Promise(done => Jupyter.notebook.session.delete(done, done))")
        self.page.close()

    def _wait_for_kernel(self) -> None:
        self.page.locator(self.CELL).first.wait_for()
        # The widgets' code is an extension that loads while the kernel starts.
        self.page.wait_for_function(
            """() => window.Jupyter?.notebook?.kernel?.is_connected()
                && window.require?.defined("nbextensions/jupyter-js-widgets/extension")"""
        )
