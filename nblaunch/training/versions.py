"""Which version of a library is installed, compared as PEP 440 orders versions."""

from __future__ import annotations

import importlib.metadata
import operator
from typing import Any

import torch
from torch.torch_version import TorchVersion

from nblaunch.training.options import check_choice

_COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Whether a version meets a requirement: ``compare_versions("transformers", ">=", "4.51")``.

    Args:
        library_or_version: name of an installed library, or a version of :mod:`packaging`.
        operation: ``"<"``, ``"<="``, ``"=="``, ``"!="``, ``">="`` or ``">"``.
        requirement_version: what to compare with.

    Raises:
        ValueError: another ``operation``.
        importlib.metadata.PackageNotFoundError: no such library is installed.
    """
    check_choice("operation", operation, tuple(_COMPARISONS))
    found = library_or_version
    if isinstance(found, str) and not isinstance(found, TorchVersion):
        found = importlib.metadata.version(found)
    return bool(_COMPARISONS[operation](TorchVersion(str(found)), requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether the version of torch meets a requirement: ``is_torch_version(">=", "2.6")``."""
    return compare_versions(torch.__version__, operation, version)
