"""Which notebook service this process runs on, and what is different there.

Recognised from the environment and from files that each service puts into its machines; nothing is imported, nothing is
asked over the network. What can be measured (memory, /dev/shm, chips) is measured in other modules: services change it.
Values of variables are never kept: some services put tokens there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nblaunch.host import proc

_CORE_WIDGETS = "ipywidgets' own controls; others need google.colab.output.enable_custom_widget_manager()"


@dataclass(frozen=True)
class Platform:
    """A notebook service, as it is here.

    Args:
        name: ``"colab"``, ``"kaggle"``, ``"databricks"``, ``"sagemaker"``, ``"binder"``, ``"vscode"``,
            ``"jupyterlab"``, ``"notebook"``, ``"jupyter"`` (a kernel of some other client) or ``"none"``.
        title: its usual name.
        evidence: the variable or file that was found.
        widgets: what is known of live widgets there, as the end of a sentence; empty where they just work.
        is_interactive: whether a user may see the running cell; False where it is known that none does.
        notes: what users who launch training there have to know, a sentence each.
    """

    name: str
    title: str
    evidence: str = ""
    widgets: str = ""
    is_interactive: bool = True
    notes: tuple[str, ...] = ()


# Each service with its signs: variables of which any is set, or files of which any exists.
# The first that fits wins. Kaggle comes before Colab, whose variables its images can inherit; whatever hosts
# Jupyter or VS Code comes before them. Sources: Kaggle/kagglehub (env.py) for Kaggle and Colab; "Databricks Runtime
# release notes" for DATABRICKS_RUNTIME_VERSION; aws/sagemaker-jupyterlab-extension-common for SAGEMAKER_APP_TYPE and
# the SageMaker guide, "Custom image specifications", for the metadata file; jupyterhub/binderhub (BinderSpawnerMixin)
# for BINDER_*; microsoft/vscode-jupyter#3364 for VSCODE_PID.
_KNOWN = (
    (
        Platform(
            "kaggle",
            "Kaggle",
            notes=(
                "packages can be installed only where the notebook's settings allow the internet",
                "a Kaggle session with TPUs has eight chips (v5e-8), whose processes share one host's memory: build "
                "the model in a cell and pass it",
            ),
        ),
        ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE"),
    ),
    (
        Platform(
            "databricks",
            "Databricks",
            widgets="works on a running cluster; widget state is not kept between notebook sessions",
            notes=(
                "processes run on the driver's machine alone: choose a node with all the GPUs that you want to use",
            ),
        ),
        ("DATABRICKS_RUNTIME_VERSION",),
    ),
    (
        Platform(
            "sagemaker",
            "SageMaker Studio",
            notes=("GPUs come with the instance type of the space; the default one has none",),
        ),
        (
            "SAGEMAKER_APP_TYPE",
            "SAGEMAKER_INTERNAL_IMAGE_URI",
            "/opt/ml/metadata/resource-metadata.json",
        ),
    ),
    (
        Platform(
            "binder",
            "Binder",
            notes=(
                "one or two CPU cores and 1 to 2 GB of memory: good for num_processes=2 and small models",
            ),
        ),
        ("BINDER_LAUNCH_HOST", "BINDER_REPO_URL", "BINDER_REQUEST"),
    ),
    (
        Platform(
            "colab",
            "Google Colab",
            widgets=_CORE_WIDGETS,
            notes=(
                "a Colab session has one GPU, or one TPU chip (v5e-1): one process there. More than one process "
                "computes on the CPU",
            ),
        ),
        ("COLAB_RELEASE_TAG", "COLAB_BACKEND_VERSION", "COLAB_JUPYTER_TRANSPORT"),
    ),
    (
        Platform(
            "vscode",
            "VS Code",
            widgets="works once VS Code has loaded them, from the Python environment or from the internet",
        ),
        ("VSCODE_PID", "VSCODE_CRASH_REPORTER_PROCESS_TYPE", "VSCODE_HANDLES_UNCAUGHT_ERRORS"),
    ),
)


def detect(environ: Mapping[str, str], root: Path = Path("/")) -> Platform:
    """Return the service that this process runs on; its name is ``"none"`` outside of notebooks.

    Processes that a notebook starts, as by ``!nblaunch env`` in a cell, inherit the environment and so the answer.

    Args:
        environ: the environment, from :func:`nblaunch.env.snapshot`.
        root: of the file system.
    """
    for platform, signs in _KNOWN:
        for sign in signs:
            if environ.get(sign) or (sign.startswith("/") and (root / sign[1:]).exists()):
                if platform.name == "kaggle" and environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch":
                    platform = replace(platform, is_interactive=False, widgets='not seen in "Save & Run All"')
                return replace(platform, evidence=sign)
    return _jupyter(environ, root / "proc")


def _jupyter(environ: Mapping[str, str], processes: Path) -> Platform:
    """Return the client that runs this kernel.

    A kernel can't see its front end, but jupyter_client gives it the process that started it (JPY_PARENT_PID), and
    jupyter_server the notebook's path (JPY_SESSION_NAME).
    """
    parent = environ.get("JPY_PARENT_PID", "")
    if not parent and not environ.get("JPY_SESSION_NAME"):
        return Platform("none", "no notebook service")
    evidence = "JPY_PARENT_PID" if parent else "JPY_SESSION_NAME"
    words = proc.read(processes / parent / "cmdline").split("\0")[:4] if parent.isdigit() else []
    names = {Path(word).name for word in words}  # of the program and its arguments
    if names & {"jupyter-lab", "jupyterlab", "lab"}:
        return Platform("jupyterlab", "JupyterLab", evidence)
    if names & {"jupyter-notebook", "notebook"}:
        return Platform("notebook", "Jupyter Notebook", evidence)
    if names & {"jupyter-nbconvert", "nbconvert", "papermill", "jupyter-execute", "nblaunch"}:
        return Platform("jupyter", "a notebook runner", evidence, "not seen", is_interactive=False)
    return Platform("jupyter", "a Jupyter kernel", evidence)
