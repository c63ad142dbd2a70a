"""Detects the installed torch_xla, imports it when it is needed, and sets it up in a worker.

    kind, num_chips, version_mismatch ...     do not import it
    package, part                             import it; no other code in nblaunch does
    counters, memory                          its compiler's counters; the device's memory
    use_spmd, shard, cut_batch                one process drives all devices of its host
    join_at_first_use, separate_stores ...    torch_xla's own world in a worker

Except for SPMD, nothing here initialises the runtime or waits for the device: this module only reads the compiler's
counters.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from nblaunch import env, packages
from nblaunch.backends import first_use
from nblaunch.backends.base import tensors
from nblaunch.backends.compile_watch import Counters
from nblaunch.host import tpu
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch

INSTALL = 'pip install "nblaunch[tpu]"'
_FIRST_WITH_V7X = (2, 9)
_SCALARS = "aten::_local_scalar_dense"  # item(), float(), bool()


def kind() -> str:
    """Return the device that the runtime will compute on: PJRT_DEVICE, or torch_xla's own choice."""
    return first_use.wanted_xla_device() or ("TPU" if num_chips() else "CPU")


def num_chips() -> int:
    """Return the number of TPU chips on this host."""
    if "torch_xla._internal.tpu" in sys.modules:
        count = int(sys.modules["torch_xla._internal.tpu"].num_available_chips())
    else:
        count = sum(tpu.chips().values())
    return count or tpu.device_files(
        first_use.wanted_xla_device() == "TPU" or bool(env.read("TPU_ACCELERATOR_TYPE"))
    )


def version_mismatch() -> str | None:
    """Return what to do if torch and torch_xla come from different releases, which makes the import fail."""
    torch, xla = packages.version("torch"), packages.version("torch_xla")
    if torch is None or xla is None or packages.release(torch)[:2] == packages.release(xla)[:2]:
        return None
    release = ".".join(map(str, packages.release(xla)[:2]))
    return (
        f"torch {torch} and torch_xla {xla} do not match: they must be from the same release. Install "
        f"torch=={release}.*, or another torch_xla: {INSTALL}"
    )


def unknown_chips() -> str | None:
    """Return what to do if torch_xla is too old for this host's chips, in which case the workers would exit."""
    xla = packages.version("torch_xla")
    if xla is not None and "v7x" in tpu.chips() and packages.release(xla) < _FIRST_WITH_V7X:
        return f"torch_xla {xla} does not support v7x chips: install torch and torch_xla 2.9, {INSTALL}"
    return None


def package() -> Any:
    """Import torch_xla and return it.

    Raises:
        RuntimeError: it can't be imported; the message gives the reason.
    """
    if "torch_xla" in sys.modules:
        return sys.modules["torch_xla"]
    try:
        # Without this, the import would fix PJRT_DEVICE for the whole process.
        with env.patched({"PJRT_DEVICE": kind(), **host_env()}), _one_collection():
            for name in ("core.xla_model", "runtime", "debug.metrics", "distributed.xla_backend"):
                importlib.import_module(f"torch_xla.{name}")
    except (ImportError, OSError) as error:
        raise RuntimeError(version_mismatch() or f"torch_xla can't be imported: {error}") from error
    return sys.modules["torch_xla"]


@contextmanager
def _one_collection() -> Iterator[None]:
    """Collect garbage once at the end of an import, instead of dozens of times while the heap grows.

    Uncollected objects would be frozen with the kernel's heap, and permanently shared with workers. Later launches do
    not collect again, because in a kernel with torch, that takes longer than the forks.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()


def part(name: str) -> Any:
    """Return one of torch_xla's modules, such as ``"core.xla_model"``, once the package is imported."""
    return importlib.import_module(f"torch_xla.{name}")


def tpu_slice() -> tpu.TpuSlice:
    """Return the slice that this TPU host belongs to."""
    return tpu.slice_of_host(num_chips())


def host_env() -> dict[str, str | None]:
    """Return the variables that torch_xla needs on a TPU host, even to be imported; empty if there are no chips."""
    if not num_chips():
        return {}
    named = {"TPU_ACCELERATOR_TYPE": tpu_slice().accelerator_type} if env.read("TPU_ACCELERATOR_TYPE") else {}
    return {**named, **tpu_slice().completed()}


def counters() -> Counters:
    """Return the compiler's counters since the start of the process."""
    metrics = part("debug.metrics")
    # Don't call metrics_report(), which takes a hundred times longer and initialises the runtime.
    compiled = metrics.metric_data("CompileTime")
    fallbacks = {
        name: metrics.counter_value(name) or 0
        for name in metrics.counter_names()
        if name.startswith("aten::") and name != _SCALARS
    }
    return Counters(
        metrics.counter_value("UncachedCompile") or 0,
        compiled[1] / 1e9 if compiled else 0.0,
        fallbacks,
        metrics.counter_value(_SCALARS) or 0,
    )


def memory() -> tuple[int, int, int] | None:
    """Return the memory of the default device in bytes: used, peak, total; None if the runtime does not report it.

    Source: ``torch_xla.core.xla_model.get_memory_info``; older runtimes do not report the peak.
    """
    try:
        info = part("core.xla_model").get_memory_info()
    except RuntimeError:
        return None
    taken = int(info["bytes_used"])
    return taken, int(info.get("peak_bytes_used", taken)), int(info["bytes_limit"])


# --- SPMD: one process drives all devices of its host as one ----------------------------------------------------------

# Tensors have their global shapes. An annotation says which part of a tensor each device holds. From the annotations,
# XLA's compiler derives how to split every operation, and which collectives to run in between. Without an annotation,
# every device holds the whole tensor.

_AXIS = "devices"


def use_spmd() -> None:
    """Make this process's runtime drive all devices as one device.

    Raises:
        RuntimeError: the runtime already drives one device.
    """
    runtime = package().runtime
    if runtime.is_spmd():
        return
    if first_use.is_xla_initialised():
        raise RuntimeError(
            "strategy='spmd' must be chosen before the process first uses the device: pass it to "
            "notebook_launcher, or build the Accelerator first"
        )
    runtime.use_spmd()


def num_spmd_devices() -> int:
    """Return the number of devices that this process drives as one device; 0 if it drives only one."""
    return int(_whole_mesh().size()) if part("runtime").is_spmd() else 0


@cache
def _whole_mesh() -> Any:
    count = part("runtime").global_runtime_device_count()
    return part("distributed.spmd").Mesh(list(range(count)), (count,), (_AXIS,))


def shard(tensor: torch.Tensor, dimension: int) -> None:
    """Shard ``tensor`` along ``dimension``, in place. Uneven last parts are padded."""
    axes = [_AXIS if index == dimension else None for index in range(tensor.ndim)]
    part("distributed.spmd").mark_sharding(tensor, _whole_mesh(), tuple(axes))


def cut_batch(batch: Any, note: Callable[[str], None]) -> None:
    """Give every device its rows of all tensors in ``batch``, if one process drives several devices.

    If a tensor can't be divided evenly among the devices, each device holds all of it, and a note says so.
    """
    count = num_spmd_devices()
    for tensor in tensors(batch) if count else ():
        if tensor.device.type != "xla" or not tensor.ndim:
            continue
        if tensor.shape[0] % count == 0:
            shard(tensor, 0)
        else:
            note(
                f"a batch of {tensor.shape[0]} rows can't be divided among {count} devices, so each processes the "
                f"whole batch. Choose a batch_size that is a multiple of {count}"
            )


# --- the world that torch_xla itself sees in a worker ----------------------------------------------------------------

# This section is for functions that use torch_xla without nblaunch's Accelerator. torch_xla knows about the other
# processes only if it is initialised as its own launcher initialises it. Otherwise each worker is a world of one
# process: xr.world_size() is 1, and xm.optimizer_step reduces nothing. On the CPU, this is always the case.

# Functions in torch_xla's extension that torch_xla's Python code calls when it first needs a device or the world.
_ENTRIES = (
    "_xla_get_default_device",
    "_xla_get_default_device_ordinal",
    "_xla_get_devices",
    "_xla_get_all_devices",
    "_xla_get_replication_devices_count",
    "_xla_get_num_processes",
    "_xla_get_process_index",
    "_xla_num_devices",
)


def join_at_first_use(topology: Topology) -> None:
    """Make this worker join the others as torch_xla's launcher does, when torch_xla first needs a device or the world.

    It can't join earlier: the runtime would then wait for all workers, and some functions never use the runtime.
    """
    extension = package()._XLAC
    originals = {name: getattr(extension, name) for name in _ENTRIES}

    def entry(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(*arguments: Any) -> Any:
            for name, function in originals.items():
                setattr(extension, name, function)
            launcher = part("_internal.pjrt")
            launcher.initialize_multiprocess(topology.local_rank, topology.local_world_size)
            return original(*arguments)

        return enter

    for name, original in originals.items():
        setattr(extension, name, entry(original))


def reject_spawn(topology: Topology) -> None:
    """Keep torch_xla from starting processes in this worker: each would be a separate world, or take others' chips."""

    def spawn(*arguments: Any, **options: Any) -> None:
        raise RuntimeError(
            f"xmp.spawn was called in a worker (rank {topology.rank} of {topology.world_size}), where nblaunch has "
            "started one process per device. Call the function itself, or torch_xla.launch, which does that here"
        )

    packages.when_imported("torch_xla._internal.pjrt", lambda launcher: setattr(launcher, "spawn", spawn))


def separate_stores(topology: Topology) -> None:
    """Give this worker its own keys in the store that ``init_method="xla://"`` connects to.

    This is for worlds of one process. In the store, torch counts the ranks that arrive, and waits until all ranks in
    the world have arrived. If several worlds share their keys, torch may count one rank too many and then wait until
    the timeout.
    """

    def separate(module: object) -> None:
        import torch.distributed as dist

        # torch has no public way to replace a handler.
        handlers: dict[str, Any] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
        rendezvous = handlers["xla"]

        @functools.wraps(rendezvous)
        def own_keys(*arguments: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
            for store, rank, world_size in rendezvous(*arguments, **options):
                worker_store = store if world_size > 1 else dist.PrefixStore(f"worker {topology.rank}", store)
                yield worker_store, rank, world_size

        handlers["xla"] = own_keys

    packages.when_imported("torch_xla.distributed.xla_backend", separate)


def has_exchanged_copies() -> bool:
    """Return whether a torch.distributed collective ran on copies of XLA tensors and so left the tensors unchanged.

    torch does not implement such collectives for XLA tensors: it copies the arguments to the host, but not back.
    """
    return any(name.startswith("c10d::") for name in part("debug.metrics").counter_names())
