"""Create the interpreter for kernels like Google Colab's: ``make colab-env``.

A separate environment has ipykernel, IPython and ipywidgets as pinned in ``constraints-colab.txt``, with front ends of
the same age; everything else, mainly torch, comes from the environment that runs this script. Tests can thus start both
kinds of kernels: ``Kernel.start(python=...)``, see ``tests/profiles.py``.

    .venv/bin/python tests/tools/colab_env.py .venv-colab-kernel    270 MB; returns at once if it is complete
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints-colab.txt"
PACKAGES = (
    "ipykernel",
    "ipython",
    "ipywidgets",
    "jupyter_client",
    "jupyterlab",
    "notebook",
    "pyzmq",
    "tornado",
    "traitlets",
)
TIMEOUT_S = 600.0


def main(folder: Path) -> int:
    """Create the environment unless it exists; return the exit code."""
    stamp = folder / ".complete"
    if stamp.exists() and stamp.read_text() == _fingerprint():
        return 0
    venv.create(folder, with_pip=False, symlinks=True, clear=True)
    print(f"Installing the Jupyter packages of Colab into {folder} ...", flush=True)
    install = ["install", "--quiet", "--constraint", str(CONSTRAINTS), *PACKAGES]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), *install],
        capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode != 0:
        print(f"The environment {folder} can't be made:\n{done.stderr[-2000:]}", file=sys.stderr)
        return done.returncode
    own = next(folder.glob("lib/python*/site-packages"))
    # searched after its own packages
    (own / "zz_shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    stamp.write_text(_fingerprint())
    return 0


def _fingerprint() -> str:
    """Return a value that changes with this file, the pins and the shared environment."""
    parts = (Path(__file__).read_text(), CONSTRAINTS.read_text(), sys.version, sysconfig.get_path("purelib"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv-colab-kernel")))
