"""Availability functions: versions are compared in the order of PEP 440, and an old kernel gets a warning."""

from __future__ import annotations

import importlib.metadata
import platform

import pytest
import torch
from packaging.version import parse
from torch.torch_version import TorchVersion

from nblaunch.utils import check_os_kernel, compare_versions, is_torch_version


def test_torch_is_new_enough() -> None:
    assert is_torch_version(">=", "2.5")
    assert not is_torch_version("<", "2.5.0")


def test_torch_version_comes_from_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version("torch")
    monkeypatch.setattr(torch, "__version__", TorchVersion(f"{installed.partition('+')[0]}+cu999"))
    assert is_torch_version("==", installed)
    assert is_torch_version("<=", installed)
    assert not is_torch_version(">", installed)


def test_versions_are_compared_numerically() -> None:
    assert compare_versions(parse("2.10.1"), ">", "2.9")
    assert compare_versions(parse("2.10"), "==", "2.10.0")
    assert compare_versions(parse("2.10rc1"), "<", "2.10")


def test_availability_takes_library_names() -> None:
    assert compare_versions("numpy", "==", importlib.metadata.version("numpy"))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        compare_versions("no-such-library", ">", "1.0")


def test_unknown_comparisons_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"operation='=>'.*'<', '<=', '==', '!=', '>=', '>'"):
        is_torch_version("=>", "2.5")


def test_old_linux_kernels_get_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    uname = platform.uname()
    monkeypatch.setattr(platform, "uname", lambda: uname._replace(release="6.1.0-9-amd64"))
    check_os_kernel()
    monkeypatch.setattr(platform, "uname", lambda: uname._replace(release="5.4.0-9-generic"))
    with pytest.warns(UserWarning, match=r"5\.4\.0-9-generic.*5\.5\.0"):
        check_os_kernel()
