"""Makes every interpreter with this folder in PYTHONPATH believe that it runs on a v5e host with eight chips.

It replaces the functions of nblaunch and torch_tpu that count chips. libtpu is unchanged: it finds no chips.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _nblaunch(module: Any) -> None:
    module.chips = module.vfio_chips = lambda: Counter(v5e=8)
    module.lock_holder = lambda: None  # other processes may use the TPU compiler on this machine


def _torch_tpu(module: Any) -> None:
    module._scan_pci_tpus = lambda: (8, module._V5E_TOPOLOGY)


_CHANGES = {"nblaunch.host.tpu": _nblaunch, "torch_tpu._internal.utils.hardware": _torch_tpu}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        change = _CHANGES.pop(fullname, None)  # so that the search below does not call this finder again
        spec = importlib.util.find_spec(fullname) if change is not None else None
        if change is not None and spec is not None and spec.loader is not None:
            spec.loader.exec_module = _then(spec.loader.exec_module, change)  # type: ignore[method-assign]
        return spec


def _then(execute: Callable[[ModuleType], None], change: Callable[[ModuleType], None]) -> Callable[..., None]:
    def both(module: ModuleType) -> None:
        execute(module)
        change(module)

    return both


sys.meta_path.insert(0, _Finder())
