"""Which notebook service this process runs on.

Recognised from the environment and from files that each service puts into its machines; nothing is imported, nothing is
asked over the network. What can be measured (memory, /dev/shm, chips) is measured in other modules: services change it.
Values of variables are never kept: some services put tokens there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Platform:
    """A notebook service.

    Args:
        name: ``"colab"``, ``"kaggle"``, ``"databricks"``, ``"sagemaker"``, ``"binder"``, ``"vscode"``, ``"jupyter"`` (a
            kernel of some other client) or ``"none"``.
        title: its usual name.
        evidence: the variable or file that was found.
    """

    name: str
    title: str
    evidence: str = ""


# Each service with its signs: variables of which any is set, or files of which any exists.
# The first that fits wins. Kaggle comes before Colab, whose variables its images can inherit; whatever hosts
# Jupyter or VS Code comes before them. Sources: Kaggle/kagglehub (env.py) for Kaggle and Colab; "Databricks Runtime
# release notes" for DATABRICKS_RUNTIME_VERSION; aws/sagemaker-jupyterlab-extension-common for SAGEMAKER_APP_TYPE and
# the SageMaker guide, "Custom image specifications", for the metadata file; jupyterhub/binderhub (BinderSpawnerMixin)
# for BINDER_*; microsoft/vscode-jupyter#3364 for VSCODE_PID. jupyter_client gives a kernel the process that started it
# (JPY_PARENT_PID), jupyter_server the notebook's path (JPY_SESSION_NAME).
_KNOWN = (
    ("kaggle", "Kaggle", "KAGGLE_KERNEL_RUN_TYPE KAGGLE_URL_BASE"),
    ("databricks", "Databricks", "DATABRICKS_RUNTIME_VERSION"),
    (
        "sagemaker",
        "SageMaker Studio",
        "SAGEMAKER_APP_TYPE SAGEMAKER_INTERNAL_IMAGE_URI /opt/ml/metadata/resource-metadata.json",
    ),
    ("binder", "Binder", "BINDER_LAUNCH_HOST BINDER_REPO_URL BINDER_REQUEST"),
    ("colab", "Google Colab", "COLAB_RELEASE_TAG COLAB_BACKEND_VERSION COLAB_JUPYTER_TRANSPORT"),
    ("vscode", "VS Code", "VSCODE_PID VSCODE_CRASH_REPORTER_PROCESS_TYPE VSCODE_HANDLES_UNCAUGHT_ERRORS"),
    ("jupyter", "a Jupyter kernel", "JPY_PARENT_PID JPY_SESSION_NAME"),
)


def detect(environ: Mapping[str, str], root: Path = Path("/")) -> Platform:
    """Return the service that this process runs on; its name is ``"none"`` outside of notebooks.

    Processes that a notebook starts, as by ``!nblaunch env`` in a cell, inherit the environment and so the answer.

    Args:
        environ: the environment, from :func:`nblaunch.env.snapshot`.
        root: of the file system.
    """
    for name, title, signs in _KNOWN:
        for sign in signs.split():
            if environ.get(sign) or (sign.startswith("/") and (root / sign[1:]).exists()):
                return Platform(name, title, sign)
    return Platform("none", "no notebook service")
