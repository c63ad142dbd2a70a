"""torch_xla as it is installed here: found, imported when it is needed, and what its compiler does.

    kind, num_chips, version_mismatch ...  without importing it
    package, part                          import it; nothing else in nblaunch does
    counters                               what its compiler has done, for ``compile_watch.py``

Nothing here initialises the runtime or waits for the device: of the compiler, only counters are read.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from nblaunch import env
from nblaunch.backends import first_use
from nblaunch.backends.compile_watch import Counters
from nblaunch.host import tpu
from nblaunch.host.tpu import TpuSlice, ask_metadata_server
from nblaunch.host.tpu import read as read_slice

INSTALL = 'pip install "nblaunch[tpu]"'
_FIRST_WITH_V7X = (2, 9)
_SCALARS = "aten::_local_scalar_dense"  # item(), float(), bool()


def kind() -> str:
    """Return what the runtime will compute on: the value of PJRT_DEVICE, or what torch_xla would choose."""
    return first_use.wanted_xla_device() or ("TPU" if num_chips() else "CPU")


def num_chips() -> int:
    """Return the number of TPU chips of this host."""
    if "torch_xla._internal.tpu" in sys.modules:
        found = int(sys.modules["torch_xla._internal.tpu"].num_available_chips())
    else:
        found = sum(tpu.chips().values())
    return found or tpu.device_files(
        first_use.wanted_xla_device() == "TPU" or bool(env.read("TPU_ACCELERATOR_TYPE"))
    )


def version_mismatch() -> str | None:
    """Return what to do where torch and torch_xla are of different releases, in which case the import fails."""
    import importlib.metadata  # 10 ms that a fresh interpreter does not need

    try:
        torch, xla = (importlib.metadata.version(name) for name in ("torch", "torch_xla"))
    except importlib.metadata.PackageNotFoundError:
        return None  # not installed by pip: nothing is known
    release = ".".join(xla.split(".")[:2])
    if torch.split("+")[0].split(".")[:2] == release.split("."):
        return None
    return (
        f"torch {torch} and torch_xla {xla} do not fit each other: they must be of one release. "
        f"Install torch=={release}.*, or another torch_xla: {INSTALL}"
    )


def unknown_chips() -> str | None:
    """Return what to do where torch_xla is older than the chips of this host, whose workers would end in its errors."""
    import importlib.metadata

    try:
        xla = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return None
    release = tuple(int(part) for part in xla.split(".")[:2] if part.isdigit())
    if "v7x" in tpu.chips() and release < _FIRST_WITH_V7X:
        return f"torch_xla {xla} does not know these chips, v7x: install torch and torch_xla 2.9, {INSTALL}"
    return None


def package() -> Any:
    """Import torch_xla and return it.

    Raises:
        RuntimeError: it can't be imported, with the reason.
    """
    if "torch_xla" in sys.modules:
        return sys.modules["torch_xla"]
    try:
        # Left alone, the import would fix PJRT_DEVICE for the whole process.
        with env.patched({"PJRT_DEVICE": kind(), **host_env()}):
            for name in ("core.xla_model", "runtime", "debug.metrics", "distributed.xla_backend"):
                importlib.import_module(f"torch_xla.{name}")
    except (ImportError, OSError) as error:
        raise RuntimeError(version_mismatch() or f"torch_xla can't be imported: {error}") from error
    return sys.modules["torch_xla"]


def part(name: str) -> Any:
    """Return a module of torch_xla, as ``"core.xla_model"``, once the package is imported."""
    return importlib.import_module(f"torch_xla.{name}")


def tpu_slice() -> TpuSlice:
    """Return the slice that this TPU host belongs to."""
    return read_slice(env.snapshot(), tpu.chips(), num_chips(), ask_metadata_server)


def host_env() -> dict[str, str | None]:
    """Return what torch_xla must find in the environment of a TPU host, for its import too; none without chips."""
    if not num_chips():
        return {}
    named = {"TPU_ACCELERATOR_TYPE": tpu_slice().accelerator_type} if env.read("TPU_ACCELERATOR_TYPE") else {}
    return {**named, **tpu_slice().completed()}


def counters() -> Counters:
    """Return the compiler's counters since the process began."""
    metrics = part("debug.metrics")
    # Not metrics_report(): it takes a hundred times longer and initialises the runtime.
    compiled = metrics.metric_data("CompileTime")
    transfers = metrics.metric_data("TransferFromDeviceTime")
    fallbacks = {
        name: metrics.counter_value(name) or 0
        for name in metrics.counter_names()
        if name.startswith("aten::") and name != _SCALARS
    }
    return Counters(
        metrics.counter_value("UncachedCompile") or 0,
        compiled[1] / 1e9 if compiled else 0.0,
        fallbacks,
        transfers[0] if transfers else 0,
        metrics.counter_value(_SCALARS) or 0,
    )


def memory() -> tuple[int, int, int] | None:
    """Return bytes of the default device: taken, peak, total; None where the runtime does not report them.

    Source: ``torch_xla.core.xla_model.get_memory_info``; the peak is missing from older runtimes' answer.
    """
    try:
        info = part("core.xla_model").get_memory_info()
    except RuntimeError:
        return None
    taken = int(info["bytes_used"])
    return taken, int(info.get("peak_bytes_used", taken)), int(info["bytes_limit"])
