"""Find Chromium for the browser tests and ``make picture``; if the system has none, install Debian's.

    python tests/tools/browser.py      # prints its path; without one, the reason, and exit code 1

It searches in this order: ``NBLAUNCH_TEST_BROWSER``, the names under which systems install it, and playwright's own
download.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Turn off features that use the network, which may be closed or slow.
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
    """Return the path of a Chromium; None if there is none."""
    named = os.environ.get("NBLAUNCH_TEST_BROWSER")
    if named:
        return shutil.which(named)
    on_path = next(filter(None, map(shutil.which, NAMES)), None)
    return on_path or _playwrights_own()


def find_or_install() -> str | None:
    """Do the same, after trying to install it if that needs no interaction: as root, with apt-get."""
    return find() or (_install() and find()) or None


def flags() -> list[str]:
    """Return flags for a headless start. Chromium's sandbox can't run as root, as tests in containers do."""
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
