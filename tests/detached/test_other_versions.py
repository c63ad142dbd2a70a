"""Jobs of another version of nblaunch, and an update of nblaunch while a job runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.detached.other_versions import Installation

RESULT = """
import nblaunch
job = nblaunch.attach({!r}, dashboard="none")
try:
    print(job.result(180))
except Exception as error:
    print(type(error).__name__, error)
print("attempt", job.attempt)
"""

ENDS = {
    "train": "trained",
    "disagree": "CollectiveMismatch",
}


@pytest.mark.parametrize("function", ["train", "disagree"])
@pytest.mark.thorough
def test_a_job_continues_when_nblaunch_is_replaced(tmp_path: Path, function: str) -> None:
    installation = Installation(tmp_path)
    job_id = installation.launch(function)
    installation.replace()
    installation.release()
    shown = installation.run(RESULT.format(job_id))
    assert shown.startswith(ENDS[function]), shown
    assert "new version" not in shown


@pytest.mark.thorough
def test_a_job_restarts_after_nblaunch_is_replaced(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    job_id = installation.launch("fail", "{'max_restarts': 1}")
    installation.replace()
    installation.release()
    installation.release(attempt=1)
    shown = installation.run(RESULT.format(job_id))
    assert shown.startswith("ValueError batch 7 is broken"), shown
    assert shown.endswith("attempt 1\n"), shown


@pytest.mark.thorough
def test_fresh_interpreters_of_another_version_are_rejected_with_the_reason(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    job_id = installation.launch("fail", "{'max_restarts': 1, 'start_method': 'spawn'}")
    installation.replace()
    installation.release()
    shown = installation.run(RESULT.format(job_id))
    assert shown.startswith("LaunchError"), shown
    assert re.search(r"nblaunch [\d.]+.* replaced by nblaunch 9\.9\.9", shown), shown
    assert "batch 7 is broken" in shown


IN_ONE_PROCESS = """
import nblaunch, sys
nblaunch.Session(1, backend="cpu").close()
print("ready", flush=True)
input()
import nblaunch.session.magics
"""


def test_a_process_imports_no_modules_of_another_version(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", IN_ONE_PROCESS], cwd=installation.site, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        installation.replace()
        _, errors = process.communicate("\n", timeout=300)
    assert re.search(
        r"LaunchError: this process is running nblaunch [\d.]+.* replaced by nblaunch 9\.9\.9", errors
    ), errors
    assert "Restart the kernel" in errors


OTHER_VERSION = {
    "__init__.py": {'__version__ = "0.1.0"': '__version__ = "9.1.0"'},
    "detached/record.py": {
        "\nFORMAT = 2": "\nFORMAT = 1024",
        "    backend: str\n": "    backend: str\n    num_nodes: int\n",
    },
    "detached/job_process.py": {"task.backend,\n": "task.backend, 1,\n"},
    "detached/listing.py": {
        "    waits_for: str\n": "    awaited: str\n",
        "served.waits_for": "served.awaited",
    },
    "detached/follower.py": {"served.waits_for": "served.awaited"},
}


@pytest.mark.thorough
def test_jobs_of_other_versions_without_folder_can_be_stopped(tmp_path: Path) -> None:
    installation = Installation(tmp_path, OTHER_VERSION)
    job_id = installation.launch("wait_for_stop")
    installation.release()
    folder = installation.jobs / "detached" / job_id
    shutil.rmtree(folder)
    listed = installation.command("jobs").stdout
    assert re.search(rf"^{job_id} +running ", listed, re.MULTILINE), listed
    assert "nblaunch 9.1.0" in listed

    folder.rename(tmp_path / "moved")
    folder.write_text("nothing can be restored here")
    listed = installation.command("jobs").stdout
    assert re.search(rf"^{job_id} +running ", listed, re.MULTILINE), listed
    assert "can't be restored" in listed
    stopped = installation.command("stop", job_id)
    assert stopped.returncode == 0, stopped.stderr
    folder.unlink()
    (tmp_path / "moved").rename(folder)
    installation.run("import nblaunch, time\nwhile nblaunch.jobs()[0].status == 'running': time.sleep(0.1)")
