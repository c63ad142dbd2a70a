"""The real torch_tpu and libtpu on a machine without chips, as far as libtpu's own search for them.

Collected only where torch_tpu is installed, which is the environment that ``make test-torch-tpu`` makes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

IS_INSTALLED = importlib.util.find_spec("torch_tpu") is not None

if not IS_INSTALLED:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    """Labels what these tests show."""
    if not IS_INSTALLED:
        return "tests/torch_tpu: left out, torch_tpu is not installed; make test-torch-tpu runs them"
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torch_tpu", "libtpu"))
    return f"tests/torch_tpu: no chips, {', '.join(versions)}"
