"""What is reported when a GPU's memory runs out."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nblaunch.backends.cuda import CudaBackend
from nblaunch.backends.gpu_errors import NO_STEP, LastStep, explain, is_out_of_memory, shapes_of

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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The numbers that torch gives for a GPU of 16 GiB."""
    numbers = SimpleNamespace(free=GIB, allocated=12 * GIB, peak=13 * GIB, reserved=14 * GIB)
    for name, answer in {
        "is_initialized": lambda: True,
        "current_device": lambda: 1,
        "mem_get_info": lambda device: (numbers.free, 16 * GIB),
        "get_device_name": lambda device: "Tesla T4",
        "memory_allocated": lambda device: numbers.allocated,
        "max_memory_allocated": lambda device: numbers.peak,
        "memory_reserved": lambda device=None: numbers.reserved,
        "max_memory_reserved": lambda device=None: numbers.reserved,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=16 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return numbers


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (torch.OutOfMemoryError(OF_TORCH_2_13), True),
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
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_numbers_the_batch_and_what_to_try(gpu: SimpleNamespace) -> None:
    backend = CudaBackend()
    backend.begin_step("training", {"input_ids": torch.zeros(64, 512), "labels": torch.zeros(64)})
    memory, batch, advice = backend.explain_failure(torch.OutOfMemoryError("CUDA out of memory"))
    assert memory == (
        "GPU memory ran out on cuda:1 (Tesla T4) with 16.00 GiB: 12.00 GiB allocated (at most 13.00 GiB), 14.00 GiB "
        "reserved by this rank, 1.00 GiB free."
    )
    assert batch == "It happened in training, on a batch of 64: tensors 64x512, 64."
    assert advice.startswith("Try: a smaller batch, with gradient_accumulation_steps")
    assert backend.explain_failure(RuntimeError("something else")) == ()


def test_what_is_reserved_in_pieces(gpu: SimpleNamespace) -> None:
    gpu.allocated = 8 * GIB
    advice = (
        "os.environ['{}'] = 'expandable_segments:True' in a cell before the launch (6.00 GiB are reserved"
    )
    assert advice.format("PYTORCH_CUDA_ALLOC_CONF") in explain(torch.OutOfMemoryError(), NO_STEP)[-1]
    assert advice.format("PYTORCH_ALLOC_CONF") in explain(torch.OutOfMemoryError(OF_TORCH_2_13), NO_STEP)[-1]


def test_what_others_have_taken(gpu: SimpleNamespace) -> None:
    gpu.allocated = gpu.peak = gpu.reserved = 3 * GIB
    memory, advice = explain(torch.OutOfMemoryError(), NO_STEP)
    assert "12.00 GiB taken by other processes and by the driver itself" in memory
    assert advice.startswith("Try: end the other processes on this GPU")


def test_an_evaluation_needs_no_gradients(gpu: SimpleNamespace) -> None:
    assert "torch.no_grad()" in explain(torch.OutOfMemoryError(), LastStep("evaluating", ((8, 3),)))[-1]


def test_a_gpu_that_is_full_before_cuda_starts() -> None:
    """Its error would else be taken for one of the host's memory."""
    memory, advice = explain(torch.AcceleratorError(FULL_AT_THE_START), NO_STEP)
    assert (
        memory == "GPU memory ran out so that its driver could not even start: other processes have taken it."
    )
    assert advice.startswith("Try: end the other processes on this GPU")
    assert CudaBackend().device_memory() is None


def test_a_gpu_too_full_to_answer(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int) -> None:
        raise torch.AcceleratorError(FULL_AT_THE_START)

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    memory, batch, _ = explain(torch.OutOfMemoryError(OF_TORCH_2_13), LastStep("training", ((8, 3),)))
    assert memory.startswith("GPU memory ran out")
    assert batch == "It happened in training, on a batch of 8: tensors 8x3."


def test_own_memory(gpu: SimpleNamespace) -> None:
    assert CudaBackend().device_memory() == (14 * GIB, 14 * GIB, 16 * GIB)


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
