"""What is reported when a GPU's memory runs out."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nblaunch.backends.cuda import CudaBackend
from nblaunch.backends.gpu_errors import LastStep, explain, shapes_of

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
        (
            torch.AcceleratorError(FULL_AT_THE_START),
            True,
        ),  # or it would be taken for one of the host's memory
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
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert [line.startswith("GPU memory ran out.") for line in explain(error)[:1]] == [True] * expected


def test_the_batch_and_what_to_try() -> None:
    backend = CudaBackend()
    backend.begin_step("training", {"input_ids": torch.zeros(64, 512), "labels": torch.zeros(64)})
    batch, advice = backend.explain_failure(torch.OutOfMemoryError("CUDA out of memory"))
    assert batch == "GPU memory ran out in training, on a batch of 64: tensors 64x512, 64."
    assert advice.startswith("Try: a smaller batch, with gradient_accumulation_steps")
    assert backend.explain_failure(RuntimeError("something else")) == ()


def test_an_evaluation_needs_no_gradients() -> None:
    assert "torch.no_grad()" in explain(torch.OutOfMemoryError(), LastStep("evaluating", ((8, 3),)))[-1]


def test_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(2, 3), ((2, 3),)),
        ((torch.zeros(4), [torch.zeros(())]), ((4,), ())),
        ({"x": torch.zeros(5), "name": "text"}, ((5,),)),
        ([torch.zeros(4, 2), "text"], ((4, 2),)),
        ("text", ()),
        (None, ()),
    ],
)
def test_shapes(batch: Any, expected: Any) -> None:
    assert shapes_of(batch) == expected


def test_a_batch_is_not_kept_alive() -> None:
    batch = (torch.zeros(4, 2), torch.zeros(4))
    backend, inputs = CudaBackend(), weakref.ref(batch[0])
    backend.begin_step("training", batch)
    del batch
    assert inputs() is None
