"""Notebook services are recognised by what they document of their machines, and never by the contents of secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from nblaunch.host import notebook_service
from tests.kernels import Kernel

# What each service sets in a kernel, shortened: from its own documentation or its published image.
ENVIRONMENTS = {
    "colab": {"COLAB_RELEASE_TAG": "release-colab_20250904", "COLAB_GPU": "", "JPY_PARENT_PID": "87"},
    "kaggle": {
        "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
        "KAGGLE_URL_BASE": "https://www.kaggle.com",
        "KAGGLE_DATA_PROXY_TOKEN": "secret",
        "COLAB_RELEASE_TAG": "release-colab-external-images",  # its image is built on Colab's
    },
    "databricks": {"DATABRICKS_RUNTIME_VERSION": "16.4", "DB_HOME": "/databricks"},
    "sagemaker": {"SAGEMAKER_APP_TYPE": "JupyterLab", "SAGEMAKER_SPACE_NAME": "space", "JPY_PARENT_PID": "9"},
    "binder": {
        "BINDER_LAUNCH_HOST": "https://mybinder.org/",
        "BINDER_REPO_URL": "https://github.com/user/repository",
        "JPY_PARENT_PID": "7",
    },
    "vscode": {"VSCODE_PID": "94309", "VSCODE_CWD": "/", "JPY_SESSION_NAME": "/home/me/train.ipynb"},
    "none": {"HOME": "/root", "TERM_PROGRAM": "vscode"},  # a terminal of VS Code is no notebook
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_services_are_recognised_by_their_variables(name: str, tmp_path: Path) -> None:
    platform = notebook_service.detect(ENVIRONMENTS[name], root=tmp_path)
    assert platform.name == name
    assert (platform.evidence in ENVIRONMENTS[name]) == (name != "none")
    assert "secret" not in repr(platform)


def test_sagemaker_is_also_recognised_by_its_metadata_file(tmp_path: Path) -> None:
    file = tmp_path / "opt/ml/metadata/resource-metadata.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"AppType": "KernelGateway"}')
    platform = notebook_service.detect({"AWS_REGION": "eu-west-1"}, root=tmp_path)
    assert (platform.name, platform.evidence) == ("sagemaker", "/opt/ml/metadata/resource-metadata.json")


def test_a_kernel_of_any_other_client_is_a_jupyter_kernel(tmp_path: Path) -> None:
    for sign in ("JPY_PARENT_PID", "JPY_SESSION_NAME"):
        platform = notebook_service.detect({sign: "41"}, root=tmp_path)
        assert (platform.title, platform.evidence) == ("a Jupyter kernel", sign)


def test_a_real_kernel_and_what_it_starts_know_that_they_are_one(kernel: Kernel) -> None:
    source = (
        "from nblaunch import env; from nblaunch.host import notebook_service as service; "
        "print(service.detect(env.snapshot()).name)"
    )
    known = "".join(
        f"os.environ.pop({name!r}, None);" for name in {n for e in ENVIRONMENTS.values() for n in e}
    )
    kernel.run(
        f"import os, sys; {known.replace(chr(39) + 'JPY_PARENT_PID' + chr(39), repr('HOME_OF_NO_USER'))}"
    )
    assert kernel.run(source).stdout.strip() == "jupyter"
    child = kernel.run(
        f"import subprocess; print(subprocess.check_output([sys.executable, '-c', {source!r}], text=True))"
    )
    assert child.stdout.strip() == "jupyter"
