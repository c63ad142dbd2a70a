"""Reports about errors of CUDA and NCCL, with the messages of torch 2.13 and NCCL 2.27."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nblaunch.backends.gpu import FAULTS, CudaBackend, explain
from nblaunch.worker.failure import describe_failure

AFTER = (
    "\nSearch for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nDevice-side assertion tracking was not enabled "
    "by user."
)


def cuda(text: str, name: str) -> RuntimeError:
    return torch.AcceleratorError(f"CUDA error: {text}{AFTER.format(name)}")


def nccl(kind: str, name: str, last: str) -> RuntimeError:
    return dist.DistBackendError(
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {kind} (run with NCCL_DEBUG=INFO for "
        f"details), NCCL version 2.27.5\n{name}\nLast error:\n{last}"
    )


IN_A_FORK = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start "
    "method"
)
SHM = "Error while creating shared memory segment /dev/shm/nccl-aB3dEf (size 9637888), error: No space left on dev"


@pytest.mark.parametrize(
    ("error", "meaning", "advice"),
    [
        (cuda("device-side assert triggered", "cudaErrorAssert"), "out of range", "backend='cpu'"),
        (
            cuda("an illegal memory access was encountered", "cudaErrorIllegalAddress"),
            "outside",
            "torch.compile",
        ),
        (
            cuda("unspecified launch failure", "cudaErrorLaunchFailure"),
            "outside its tensors",
            "CUDA_LAUNCH_",
        ),
        (
            cuda(
                "no kernel image is available for execution on the device", "cudaErrorNoKernelImageForDevice"
            ),
            "has no code for this GPU",
            "another build of torch",
        ),
        (RuntimeError(IN_A_FORK), "can't be used in a fork", "multiprocessing_context='forkserver'"),
        (
            RuntimeError(
                "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
                f'  File "/x.py", line 3, in __getitem__\nRuntimeError: {IN_A_FORK}'
            ),
            "data loader",
            "stay on the CPU",
        ),
        (
            cuda("initialization error", "cudaErrorInitializationError"),
            "can't be used in a fork",
            "forkserver",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
            "usually because the GPU's memory is full",
            "a smaller batch",
        ),
        (
            nccl(
                "invalid usage",
                "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
                "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3000",
            ),
            "Two ranks are using the same GPU",
            "LOCAL_RANK",
        ),
        (
            nccl(
                "unhandled system error",
                "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
                SHM,
            ),
            "/dev/shm",
            "--shm-size",
        ),
    ],
)
def test_gpu_errors_get_a_meaning_and_advice(error: RuntimeError, meaning: str, advice: str) -> None:
    first, second = CudaBackend().explain_failure(error)
    assert meaning in first
    assert second.startswith("Try: ")
    assert advice in second


def test_every_fault_has_a_case() -> None:
    (parameters,) = test_gpu_errors_get_a_meaning_and_advice.pytestmark
    texts = [str(error) for error, *_ in parameters.args[1]]
    reported = {explain(RuntimeError(text))[1] for text in texts}
    assert len(reported) == len(FAULTS)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error: device-side assert triggered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"),
        nccl(
            "remote process exited or there was a network error",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            "socketPollConnect: connect to 127.0.0.1<4711> returned Connection refused, retrying",
        ),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
        dist.DistStoreError("wait timeout after 600000ms, keys: /default_pg/0//cuda//0"),
    ],
)
def test_other_errors_are_not_explained(error: Exception) -> None:
    assert CudaBackend().explain_failure(error) == ()


def test_follow_up_errors_are_explained_by_their_cause() -> None:
    error = RuntimeError("training stopped")
    error.__cause__ = cuda("device-side assert triggered", "cudaErrorAssert")
    assert "out of range" in explain(error)[0]


def test_explained_gpu_errors_are_causes() -> None:
    """Most errors of NCCL report the loss of another rank; these errors report a fault of this rank."""
    duplicate = nccl(
        "invalid usage", "ncclInvalidUsage", "Duplicate GPU detected : rank 1 and rank 0 both on"
    )
    assert describe_failure(1, duplicate).is_consequence
    assert not describe_failure(1, duplicate, CudaBackend().explain_failure(duplicate)).is_consequence
    asserted = cuda("device-side assert triggered", "cudaErrorAssert")
    asserted.error_code = 710  # type: ignore[attr-defined]
    described = describe_failure(0, asserted)
    assert described.exception is not None
    assert not described.is_consequence


# --- memory -----------------------------------------------------------------------------------------------------------

GIB = 1 << 30
OF_TORCH_2_13 = (
    "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which 512.00 MiB "
    "is free. Including non-PyTorch memory, this process has 139.30 GiB memory in use. Of the allocated memory 138.00"
    " GiB is allocated by PyTorch, and 12.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation. See "
    "documentation for Memory Management "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)
FULL_AT_THE_START = (
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\nCUDA kernel errors "
    "might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\nFor "
    "debugging consider passing CUDA_LAUNCH_BLOCKING=1\nDevice-side assertion tracking was not enabled by user."
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (torch.OutOfMemoryError(OF_TORCH_2_13), True),
        # Otherwise it would count as an error of the host's memory.
        (torch.AcceleratorError(FULL_AT_THE_START), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (
            torch.distributed.DistBackendError(
                "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
                "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function "
                "failed.\nLast error:\nCuda failure 2 'out of memory'"
            ),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
        (ValueError("CUDA out of memory"), False),
        (KeyError("x"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error: Exception, expected: bool) -> None:
    lines = explain(error)
    assert bool(lines) is expected
    assert not lines or (lines[0] == "GPU memory ran out." and lines[1].startswith("Try a smaller batch"))


def test_memory_of_this_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CudaBackend().device_memory() is None, "CUDA is not in use"
    for name, answer in {
        "is_initialized": lambda: True,
        "current_device": lambda: 1,
        "memory_reserved": lambda: 13 * GIB,
        "max_memory_reserved": lambda: 14 * GIB,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=16 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert CudaBackend().device_memory() == (13 * GIB, 14 * GIB, 16 * GIB)
