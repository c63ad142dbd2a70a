"""Launches, sessions and detached jobs with an odd umask, temporary folder or home folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failures.surroundings import CELL, LIMIT_S
from tests.kernels import Kernel
from tests.thorough import thorough

SETTINGS = {
    "umask 000, no home": "os.umask(0o000)\nos.environ.pop('HOME', None)",
    "umask 077, a folder with spaces and 100 characters": "os.umask(0o077)\nset_folder('a b  $c' + 't' * 93)",
}


@pytest.mark.parametrize(
    "setting", ["umask 000, no home", thorough("umask 077, a folder with spaces and 100 characters")]
)
def test_launches_work_in_odd_environments(kernel: Kernel, tmp_path: Path, setting: str) -> None:
    kernel.run(
        f"""{CELL}
def set_folder(name):
    folder = os.path.join({str(tmp_path)!r}, name)
    os.mkdir(folder)
    os.environ.update(TMPDIR=folder, HOME=folder)
    tempfile.tempdir = None
os.environ["XDG_STATE_HOME"] = {str(tmp_path / "state")!r}
""",
        timeout_s=LIMIT_S,
    )
    _, modes = kernel.run(f"{SETTINGS[setting]}\ncheck_all()", timeout_s=LIMIT_S).value
    assert not [mode for mode in modes if int(mode, 8) & 0o077], "others can use files of the job"
