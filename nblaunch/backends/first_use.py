"""Finds out which line of code in this process first used the device, and whether forked workers could use it.

Backends implement ``fork_hazard()`` and ``first_use()`` with this module. ``launcher/plan.py`` finds other hazards,
such as threads, and decides how workers start.

    watch                     lets torch count GPUs without using one, and records what torch_xla sets; called when
                              nblaunch is imported
    watch_torch               records the line that initialises a GPU; called when torch.cuda or torch.xpu is imported
    gpu_hazard                why forked workers could not use CUDA, ROCm, or Intel's Level Zero
    gpu_in_use                which GPUs make forked workers fail even if they compute on the CPU
    is_xla_initialised        whether the XLA runtime is running
    xla_backward_hazard       why forked workers could not run a backward pass on an XLA device
    fork_failure              tries a backward pass in a throwaway fork

A process can start to use CUDA in four ways. torch can initialise it. torch can merely query the driver
(``is_available()`` without NVML), which also makes forks unusable. A ``backward()`` on the CPU can initialise it,
because it starts a thread for each GPU. Or other code can do so, such as another library or a data loader with
``pin_memory``. Neither an *imported* library nor an open device file proves anything: NVML opens ``/dev/nvidia-uvm`` as
CUDA does (driver 580), and torch, DeepSpeed and torchao ask NVML when they count GPUs. nblaunch therefore asks the
driver whether CUDA is initialised.

On a machine with accelerators, the first ``backward`` in a process starts one engine thread per device. A fork copies
the engine's tables but not its threads, and torch then rejects every ``backward`` in the child. No torch flag reports
that, and it can't be undone, so nblaunch tries a backward pass in a throwaway child process. Source:
torch/csrc/autograd/engine.cpp (``in_bad_autograd_fork``, ``forked_autograd_child``).
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from nblaunch import env, other_debuggers, packages
from nblaunch.host import proc

_NUM_FRAMES = 200
_POISONED = "torch can't use GPUs in a forked process"
_EARLIER_BACKWARD = "autograd's threading"  # torch's words: torch/csrc/autograd/engine.cpp
_ASKED = (
    "has called the {} driver through torch (torch.{}.is_available() can do that), and a forked process can't use "
    "it"
)
# Calls that start the XLA runtime in the calling process, as tested with torch_xla 2.9.
XLA_INITIALISERS = re.compile(
    r"xla_device|torch_xla\.device|device_count\(|get_xla_supported_devices|world_size\(|global_ordinal|"
    r"is_master_ordinal|process_index\(|is_bf16_supported|mark_step|torch_xla\.sync|wait_device_ops|rendezvous\(|"
    r"torch_xla\.manual_seed|metrics_report|start_server|xla://|device=.?.xla|\.to\(.?.xla|xmp\.spawn|Accelerator\("
)
_FUNCTION = re.compile(r"(async )?def |class ")
_NOT_RUN = re.compile(r"^\s*#|\blambda\b")
_TIMEOUT_S = 20.0
_GOOD = b"+"

# --- GPUs -----------------------------------------------------------------------------------------------------------


class GpuRuntime(NamedTuple):
    """A GPU runtime, and how to find out whether a process is using it.

    Args:
        name: "CUDA".
        module: torch's module that uses it, such as ``torch.cuda``.
        is_in_use: returns whether this process has initialised it; does not initialise it.
        hiding: environment variables that hide all its GPUs.
    """

    name: str
    module: str
    is_in_use: Callable[[], bool]
    hiding: dict[str, str]


def is_cuda_initialised() -> bool:
    """Return whether any library in this process has initialised the CUDA driver.

    Before ``cuInit``, the driver's functions only report that it was not called. Source: CUDA Driver API,
    "Initialization".
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False  # the library is not loaded
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)


def has_open_device(device_file: str, descriptors: Path = Path("/proc/self/fd")) -> bool:
    """Return whether a process has a file open; False if the system has no /proc.

    Args:
        device_file: the file, or a prefix of its name.
        descriptors: folder of the process's open files.
    """
    return any(path.startswith(device_file) for path in proc.open_files(descriptors))


CUDA = GpuRuntime("CUDA", "cuda", is_cuda_initialised, {"CUDA_VISIBLE_DEVICES": ""})
ROCM = GpuRuntime("ROCm", "cuda", partial(has_open_device, "/dev/kfd"), {"HIP_VISIBLE_DEVICES": "-1"})
LEVEL_ZERO = GpuRuntime(
    "Level Zero",
    "xpu",
    partial(has_open_device, "/dev/dri/renderD"),
    {"ONEAPI_DEVICE_SELECTOR": "opencl:cpu"},
)

_first_use: tuple[tuple[str, int, str], ...] = ()


def watch() -> None:
    """Make torch count GPUs in a way that keeps forks possible, and record what torch_xla sets. Imports nothing."""
    keep_torch_tpu_away()
    if env.read("PYTORCH_NVML_BASED_CUDA_CHECK") is None:
        env.apply({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    if "torch_xla" in sys.modules:
        _keep_default(_was_set_at_start("PJRT_DEVICE"))
        return
    was_set: list[bool] = []
    packages.when_imported(_EARLY_IN_TORCH_XLA, lambda _: was_set.append(bool(env.read("PJRT_DEVICE"))))
    packages.when_imported("torch_xla", lambda _: _keep_default(any(was_set)))


def watch_torch(device_module: Any) -> None:
    """Record where a GPU is first initialised, even if ``torch.cuda`` or ``torch.xpu`` was imported long before.

    torch runs its queue of calls in the thread that initialises the GPU, so the stack shows the line that did so.
    """
    enqueue = getattr(device_module, "_lazy_call", None)
    if enqueue is not None and not device_module.is_initialized():
        enqueue(_record)


def gpu_first_use() -> tuple[tuple[str, int, str], ...]:
    """Return the stack when a GPU was initialised: (file name, line, function), innermost first; empty if unknown."""
    return _first_use


def _record() -> None:
    global _first_use
    if _first_use:
        return
    frames: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _NUM_FRAMES:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    _first_use = tuple(frames)


def gpu_in_use() -> str | None:
    """Return "CUDA" or "ROCm" if this process uses it; None otherwise.

    Forked workers on the CPU would also fail: optimizers ask torch whether a GPU is recording a graph, and backward
    finds that the threads for the GPUs are missing.
    """
    return next((runtime.name for runtime in (CUDA, ROCM) if _is_in_use(runtime)), None)


def _is_in_use(runtime: GpuRuntime) -> bool:
    """Return whether this process uses GPUs or was forked from a process that does."""
    module = _module_of_torch(runtime)
    return runtime.is_in_use() or (module is not None and module._is_in_bad_fork())


def _module_of_torch(runtime: GpuRuntime) -> Any:
    """Return ``torch.cuda`` or its equivalent; None if torch is not imported, or another thread is importing it."""
    return getattr(sys.modules.get("torch"), runtime.module, None)


def gpu_hazard(runtime: GpuRuntime) -> str | None:
    """Return why a fork of this process can't use a GPU, worded to follow "this process ..."; None if it can."""
    torch_module, name, module = _module_of_torch(runtime), runtime.name, runtime.module
    in_vain = f"{name} can't be used in a forked process"
    if torch_module is not None and torch_module.is_initialized():
        return f"has used {name} through torch, and {in_vain}"
    if not _is_in_use(runtime):
        return None
    failure = (fork_failure(lambda: _try_torch(runtime)) if torch_module is not None else None) or ""
    if _POISONED in failure:
        return _ASKED.format(name, module)
    if _EARLIER_BACKWARD in failure:
        return f"has run backward(), which fails in forked workers ({failure.splitlines()[0]:.120})"
    return f"has used {name} without torch.{module}, and {in_vain}"


def _try_torch(runtime: GpuRuntime) -> None:
    """In a probe process, use torch as a worker does when it starts; raise an error if that fails."""
    import torch

    if getattr(torch, runtime.module)._is_in_bad_fork():
        raise RuntimeError(_POISONED)
    # The GPUs are hidden because, if no backward pass ran before the fork, the backward pass in this child would
    # initialise the driver with all GPUs, which takes a second or more on each launch on large machines. If a backward
    # pass did run before the fork, the backward pass in this child fails even without any GPU.
    env.apply(runtime.hiding)
    small_backward()


# --- XLA ------------------------------------------------------------------------------------------------------------


def is_xla_initialised() -> bool:
    """Return whether the XLA runtime is running in this process, without starting it."""
    torch_xla: Any = sys.modules.get("torch_xla")
    # This name is private, but torch_xla's own launcher also reads it.
    ask = getattr(getattr(torch_xla, "_XLAC", None), "_xla_runtime_is_initialized", None)
    return bool(ask()) if ask is not None else False


_EARLY_IN_TORCH_XLA = "torch_xla._internal.tpu"  # imported by torch_xla before it sets PJRT_DEVICE
_default_of_torch_xla = ""


def _keep_default(was_set: bool) -> None:
    """Record the value that torch_xla gave PJRT_DEVICE on import, if the variable was not set before."""
    global _default_of_torch_xla
    _default_of_torch_xla = "" if was_set else env.read("PJRT_DEVICE") or ""


def _was_set_at_start(name: str) -> bool:
    """Return whether an environment variable was set when this process started."""
    try:
        return f"{name}=".encode() in Path("/proc/self/environ").read_bytes()
    except OSError:
        return False


def wanted_xla_device() -> str:
    """Return the user's PJRT_DEVICE; empty if it is unset, or if the import of torch_xla has set it.

    The import sets the variable to CPU if torch_xla finds no TPU. The user did not ask for that, and it is wrong in a
    container that hides the PCI bus.
    """
    value: str = env.read("PJRT_DEVICE") or ""
    return "" if value == _default_of_torch_xla else value.upper()


def xla_first_use() -> str:
    """Return the cell and line that most likely started the XLA runtime, in the format of :func:`first_match`."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return first_match(shell.user_ns.get("In", []) if shell is not None else [])


def first_match(cells: Sequence[str]) -> str:
    """Return ``" (probably in cell 3, line 2: `...`)"`` for the first line that starts the runtime; empty if not found.

    Functions, lambdas and methods don't count, because they probably run in the workers.
    """
    for number, source in enumerate(cells):
        is_in_function = False
        for position, line in enumerate(source.splitlines(), 1):
            if line[:1] not in ("", " ", "\t", ")"):  # `)` ends arguments on several lines
                is_in_function = bool(_FUNCTION.match(line))
            if XLA_INITIALISERS.search(line) and not is_in_function and not _NOT_RUN.search(line):
                return f" (probably in cell {number}, line {position}: `{line.strip():.80}`)"
    return ""


def xla_backward_hazard() -> str | None:
    """Return why forked workers can't run backward() after this process has done so; None if they can.

    torch_xla must have been imported.
    """
    failure = fork_failure(_xla_backward)
    if failure is None:
        return None
    first_line = failure.splitlines()[0]
    return f"backward() ran in this process, and fails in forked workers ({first_line:.120})"


def _xla_backward() -> None:
    """Run the first backward pass on an XLA device in a probe process; the device is the CPU, even on a TPU host."""
    env.apply({"PJRT_DEVICE": "CPU"})
    import torch

    leaf = torch.ones(2, device="xla", requires_grad=True)
    leaf.sum().backward()


# --- TorchTPU -------------------------------------------------------------------------------------------------------

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""The environment variable that makes ``import torch`` load the packages for additional devices."""


def keep_torch_tpu_away() -> None:
    """Keep a later import of torch from importing torch_tpu if it is installed.

    With torch_tpu imported, ``torch.manual_seed`` and every ``backward()`` on the CPU acquire the chips of a TPU host;
    on other hosts, the import wastes 300 MB and several seconds. Once torch is imported, the variable gets its old
    value back, so that programs started from cells are not affected. A value of 1 is not the user's choice: torch_tpu
    sets this value in a process that imports the package, and child processes inherit it.
    """
    before = env.read(AUTOLOAD)
    if "torch" not in sys.modules and before in (None, "1") and packages.is_installed("torch_tpu"):
        env.apply({AUTOLOAD: "0"})
        packages.when_imported("torch", lambda torch: env.apply({AUTOLOAD: before}))


# --- a backward in a fork -------------------------------------------------------------------------------------------


def fork_failure(attempt: Callable[[], None], timeout_s: float = _TIMEOUT_S) -> str | None:
    """Return what fails in a forked child that runs ``attempt``, a small ``backward``; None if nothing fails.

    A child that takes longer than ``timeout_s`` seconds counts as hung.
    """
    reader, writer = os.pipe()
    with other_debuggers.kept_out():
        pid = other_debuggers.fork()
        if pid == 0:
            _run_probe(attempt, writer)
    os.close(writer)
    try:
        return _reply(reader, timeout_s)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still the child's
        with suppress(ChildProcessError):  # a process that ignores SIGCHLD gets no status
            os.waitpid(pid, 0)


def _reply(reader: int, timeout_s: float) -> str | None:
    """Read the child's report."""
    # Don't use select.select(), which rejects descriptors of 1024 and above: a kernel may have many files open.
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    if not poller.poll(timeout_s * 1000):
        return f"backward() did not finish within {timeout_s:g} s in a forked process"
    message = os.read(reader, 65536)
    if message == _GOOD:
        return None
    return message.decode(errors="replace") or "a forked process died in backward()"


def _run_probe(attempt: Callable[[], None], writer: int) -> None:
    """Run ``attempt`` in the child, write the reply, and end the child without running the parent's exit handlers."""
    try:
        warnings.simplefilter("ignore")  # a warning would appear in the user's cell
        attempt()
        os.write(writer, _GOOD)
    except BaseException as error:
        os.write(writer, f"{type(error).__name__}: {error}"[:4000].encode())
    finally:
        os._exit(0)


def small_backward() -> None:
    """Run a minimal backward pass on the CPU. Called in a probe process."""
    import torch

    # A fork does not copy OpenMP's threads, but a single number is too little work for OpenMP to use them.
    torch.ones((), requires_grad=True).backward()
