"""Make the interpreter whose kernels are like those of Google Colab: ``make colab-env``.

ipykernel, IPython and ipywidgets as ``constraints-colab.txt`` pins them, with front ends of their time, in an
environment of their own; all else (torch above all) is that of the environment that runs this script. So a test can
start a kernel of either kind: ``Kernel.start(python=...)``, see ``tests/profiles.py``.

    .venv/bin/python tests/tools/colab_env.py .venv-colab-kernel    270 MB; at once where it is complete
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
    """Make the environment unless it is there; returns the exit code."""
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
    # Searched after its own packages.
    (own / "zz_shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    stamp.write_text(_fingerprint())
    return 0


def _fingerprint() -> str:
    """Changes where this file, the pins or the environment that is shared do."""
    parts = (Path(__file__).read_text(), CONSTRAINTS.read_text(), sys.version, sysconfig.get_path("purelib"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv-colab-kernel")))
