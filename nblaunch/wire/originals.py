"""Finds the tensors that a worker has changed, by comparing them with the launcher's originals.

Workers do not send unchanged tensors back.

    forked worker  ── the memory of the process that forked it, at the same addresses
    fresh worker   ── the memory file of its call, from which its tensors are mapped (copied on write)

Nothing is copied or computed beforehand: the worker only records the address of each tensor. It compares bytes, so it
detects every change, including changes made by an optimizer, by NumPy or through ``.data``, and replaced tensors.
``requires_grad`` does not show changes (averaged weights are frozen but change), and neither does a tensor's version
(``.data`` bypasses it).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nblaunch.wire.argument_paths import ArgPath

_CHUNK_BYTES = 1 << 18  # small enough to stay in a core's cache between reading and comparing

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class Unchanged:
    """Replaces, in a state dict, a tensor of this shape that was not sent because it is unchanged."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Original:
    """The location of a tensor: ``num_bytes`` starting at ``address``, including holes between its elements."""

    address: int
    num_bytes: int
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_contiguous: bool


class Originals:
    """The launcher's copies of the tensors of some modules.

    Args:
        fd: a file that holds them; the caller owns it.
        address: address of that file's first byte in memory.
    """

    def __init__(self, fd: int, address: int = 0) -> None:
        self.fd = fd
        self.address = address
        self._modules: dict[ArgPath, dict[str, _Original]] = {}

    @classmethod
    def of_this_process(cls) -> Originals | None:
        """Return the originals for processes forked from this one; None if this process's memory can't be opened.

        The file refers to this process's memory in every process that inherits it: the system checks permissions when
        it is opened, not when it is read. Source: proc_pid_mem(5), and ``proc_mem_open`` in Linux's fs/proc/base.c.
        """
        try:
            return cls(os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None

    def remember(self, modules: Mapping[ArgPath, Any]) -> None:
        """Record the addresses of the tensors of ``modules`` before any of them has changed."""
        for path, module in modules.items():
            tensors = (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            )
            noted = ((name, _original(tensor)) for name, tensor in tensors)
            self._modules[path] = {name: original for name, original in noted if original is not None}

    def equality_tests(self, path: ArgPath, state: Mapping[str, Any]) -> dict[int, Callable[[Any], bool]]:
        """Return a dict: ``id`` of a tensor in ``state`` -> a function that compares its CPU copy with the original.

        A tensor whose original can't be read has no function.
        """
        noted = self._modules.get(path, {})
        originals = {name: noted[name] for name in state.keys() & noted.keys()}
        tests: dict[int, Callable[[Any], bool]] = {}
        for name, original in originals.items():
            key = id(state[name])
            # A tensor with two names may be unchanged under one name and changed under the other.
            tests[key] = functools.partial(self._is_same, original) if key not in tests else _never
        return tests

    def _is_same(self, original: _Original, tensor: Any) -> bool:
        if (tensor.dtype, tuple(tensor.shape)) != (original.dtype, original.shape):
            return False
        if tensor.stride() != original.stride:
            if not original.is_contiguous:
                return False
            tensor = tensor.contiguous()
        buffer = bytearray(min(_CHUNK_BYTES, original.num_bytes))
        copy = ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
        address = tensor.data_ptr()
        for done in range(0, original.num_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, original.num_bytes - done)
            try:
                count = os.preadv(
                    self.fd, [memoryview(buffer)[:size]], original.address - self.address + done
                )
            except OSError:  # the original is gone or unreadable, or the function has closed the descriptor
                return False
            if count != size or _memcmp(copy, address + done, size) != 0:
                return False
        return True


def _never(tensor: Any) -> bool:
    return False


def _original(tensor: Any) -> _Original | None:
    """Return the location of a tensor; None (it counts as changed) if it is not in this process's ordinary memory."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.numel() == 0:
        return None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _Original(
        address=tensor.data_ptr(),
        num_bytes=(last + 1) * tensor.element_size(),
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        is_contiguous=tensor.is_contiguous(),
    )
