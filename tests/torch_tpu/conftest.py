"""The real torch_tpu and libtpu on a machine without chips, up to libtpu's own search for them.

The tests are collected only if torch_tpu is installed, as in the environment of ``make test-torch-tpu``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

IS_INSTALLED = importlib.util.find_spec("torch_tpu") is not None

if not IS_INSTALLED:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    """Label the results of these tests."""
    if not IS_INSTALLED:
        return "tests/torch_tpu: left out, torch_tpu is not installed; make test-torch-tpu runs them"
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torch_tpu", "libtpu"))
    return f"tests/torch_tpu: no chips, {', '.join(versions)}"
