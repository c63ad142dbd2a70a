"""Find the Chromium that the browser tests and ``make picture`` drive; where the system has none, install Debian's.

    python tests/tools/browser.py      # prints its path; exit code 1, and why, where there is none

Looked for, in this order: ``NBLAUNCH_TEST_BROWSER``, the names under which systems install it, and what playwright
downloaded for itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The closed or slow networks that tests run in are no business of theirs.
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
HELP = (
    "no Chromium found. Install it (Debian and Ubuntu: apt-get install chromium), or "
    "`python -m playwright install chromium`, or name one in NBLAUNCH_TEST_BROWSER"
)


def find() -> str | None:
    """The path of a Chromium; None where there is none."""
    named = os.environ.get("NBLAUNCH_TEST_BROWSER")
    if named:
        return shutil.which(named)
    on_path = next(filter(None, map(shutil.which, NAMES)), None)
    return on_path or _playwrights_own()


def find_or_install() -> str | None:
    """The same, after an attempt to install it where that needs no questions: as root, with apt-get."""
    return find() or (_install() and find()) or None


def flags() -> list[str]:
    """For a headless start. The sandbox of Chromium refuses to run as root, which tests in containers do."""
    return [*FLAGS, "--no-sandbox"] if os.geteuid() == 0 else list(FLAGS)


def _playwrights_own() -> str | None:
    caches = [
        Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright"),
        Path.home() / "Library" / "Caches" / "ms-playwright",
    ]
    found = [str(path) for cache in caches for path in cache.glob("chromium-*/chrome-linux*/chrome")]
    return max(found, default=None)


def _install() -> bool:
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        return False
    print("installing Debian's chromium for the browser tests", file=sys.stderr, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        [apt, "update", "-qq"],
        [apt, "install", "-y", "-qq", "--no-install-recommends", "chromium"],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        if done.returncode:
            print(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
            return False
    return True


if __name__ == "__main__":
    path = find_or_install()
    print(path or HELP, file=sys.stdout if path else sys.stderr)
    sys.exit(0 if path else 1)
