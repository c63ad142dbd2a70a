"""A stub of torch_tpu: it adds a device ``tpu`` to torch that can be named, seeded and joined by gloo.

Like the real package, torch imports it automatically unless that is switched off, and a seed takes the chips.
"""

from __future__ import annotations

from pathlib import Path

_FILES = {
    "torch_tpu-0.2.0.dist-info/METADATA": """\
Metadata-Version: 2.1
Name: torch_tpu
Version: 0.2.0
Requires-Dist: torch>=2.11.0,<=2.15.0
""",
    "torch_tpu-0.2.0.dist-info/entry_points.txt": "[torch.backends]\ntorch_tpu = torch_tpu._loader:load\n",
    "libtpu/__init__.py": "",
    "torch_tpu/__init__.py": "import os\nIMPORTED_BY = os.getpid()\nfrom torch_tpu import _loader\n",
    "torch_tpu/_loader.py": """\
import os
import types
_before = os.getenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
from torch_tpu._internal.device import _device_ops_backend as operations

def load():
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _before
    if hasattr(torch, "tpu"):
        return
    module = types.ModuleType("torch.tpu")
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: setattr(operations, "is_taken", True)
    module.is_available = lambda: True
    torch.utils.rename_privateuse1_backend("tpu")
    torch._register_device_module("tpu", module)
    torch.distributed.Backend.register_backend("tpu_dist", torch.distributed.ProcessGroupGloo, devices=["tpu"])

if _before == "1":
    load()
""",
    "torch_tpu/_internal/__init__.py": "",
    "torch_tpu/_internal/device/__init__.py": "",
    "torch_tpu/_internal/device/_device_ops_backend.py": """\
is_taken = False

def _is_initialized():
    return is_taken
""",
    "torch_tpu/_internal/device/_device_module.py": """\
import atexit

class TpuDeviceModule:
    @classmethod
    def _shutdown_runtime(cls):
        print("the runtime was shut down")

atexit.register(TpuDeviceModule._shutdown_runtime)
""",
}


def write(folder: Path) -> str:
    """Write the package into a folder; return the value for PYTHONPATH."""
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)
