"""Python values in a memory file: the call on its way to fresh workers, and results on their way back.

    offset 0   header: where the pickle is, how long it is, how many buffers the table names
    64 ...     tensors and large arrays, raw, 64-byte aligned, each written as soon as the pickler meets it
    then       the pickle (cloudpickle: functions and classes of ``__main__`` by value), then the table of buffers
    then       the next value of the file, if there is one: its header, and so on

The reader maps the file privately and builds tensors on the mapped pages. A state dict of 1 GB is therefore copied
once, into the file, and never passes through a pipe; nobody can wait for anybody. Tensors arrive on the CPU.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import struct
import sys
from typing import Any

from nblaunch.wire.pickling import NotebookPickler

_HEADER = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<QQ")
_ALIGN = 64
_MIN_BUFFER_BYTES = 4096
_MAX_WRITE_BYTES = 1 << 30  # Linux writes at most 2 GiB - 4 KiB at a time


class PayloadWriter:
    """Appends values to a file that is empty at first. A tensor that several of them hold is written once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writer = _FileWriter(fd)
        self._regions: dict[Any, int] = {}
        # They keep tensors alive, so that no region of memory is used anew.
        self._picklers: list[_Pickler] = []

    def append(self, value: Any, *, main_by_reference: bool = False) -> int:
        """Write ``value``; ``main_by_reference`` as in ``wire/pickling.py``. Returns where it is, for :func:`load`.

        Raises:
            Exception: whatever pickling raises; :func:`nblaunch.wire.blame.unpicklable_parts` tells which part it
                was. Other values can still be appended.
            OSError: memory or disk is full.
        """
        header_at = self._writer.skip(_HEADER.size)
        stream = io.BytesIO()
        pickler = _Pickler(stream, self._writer, self._regions, main_by_reference)
        self._picklers.append(pickler)
        pickler.dump(value)
        body = stream.getbuffer()
        start = self._writer.write(body)
        self._writer.write(b"".join(_ENTRY.pack(*entry) for entry in pickler.buffers))
        os.pwrite(self._fd, _HEADER.pack(start, len(body), len(pickler.buffers)), header_at)
        return header_at


def dump(value: Any, fd: int) -> None:
    """Write ``value`` alone to the empty file ``fd``; raises as :meth:`PayloadWriter.append` does."""
    PayloadWriter(fd).append(value)


def load(fd: int, at: int = 0) -> Any:
    """Read what was written at ``at``. The tensors in it live on the file's pages, mapped copy-on-write."""
    mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    view = memoryview(mapping)
    start, length, num_buffers = _HEADER.unpack_from(view, at)
    table = _aligned(start + length)
    entries = [_ENTRY.unpack_from(view, table + i * _ENTRY.size) for i in range(num_buffers)]
    buffers = [view[offset : offset + size] for offset, size in entries]
    return _Unpickler(io.BytesIO(view[start : start + length]), mapping, buffers).load()


def can_pickle(value: Any) -> Exception | None:
    """None where :func:`dump` would accept ``value``, otherwise the error it would raise. Writes nothing."""
    try:
        _Pickler(io.BytesIO(), _NullWriter(), {}, False).dump(value)
    except Exception as error:
        return error
    return None


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


class _FileWriter:
    """Appends raw bytes to a file at aligned offsets."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = 0

    def skip(self, num_bytes: int) -> int:
        """Leave room, to be written later; returns where."""
        start = _aligned(self._end)
        self._end = start + num_bytes
        return start

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        start = offset = _aligned(self._end)
        while view:
            written = os.pwrite(self._fd, view[:_MAX_WRITE_BYTES], offset)
            view, offset = view[written:], offset + written
        self._end = offset
        return start


class _NullWriter(_FileWriter):
    """Takes everything and keeps nothing, to try whether a value can be pickled."""

    def __init__(self) -> None:
        super().__init__(-1)

    def write(self, data: Any) -> int:
        return 0


class _Pickler(NotebookPickler):
    """Writes dense tensors and large buffers beside the pickle as soon as it meets them.

    Tensors go by persistent id rather than as out-of-band buffers: a pickler's memo would keep the CPU copy of every
    GPU tensor alive until the end, all at once.
    """

    def __init__(
        self, stream: io.BytesIO, writer: _FileWriter, regions: dict[Any, int], main_by_reference: bool
    ) -> None:
        super().__init__(stream, main_by_reference=main_by_reference, buffer_callback=self._take_buffer)
        self.buffers: list[tuple[int, int]] = []
        self._writer = writer
        self._regions = regions
        self._tensors: dict[int, tuple[Any, Any]] = {}
        self._torch: Any = sys.modules.get("torch")

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether to keep a small buffer inside the pickle."""
        data = buffer.raw()
        if len(data) < _MIN_BUFFER_BYTES:
            return True
        self.buffers.append((self._writer.write(data), len(data)))
        return False

    def persistent_id(self, obj: Any) -> Any:
        torch = self._torch
        if torch is None or type(obj) not in (torch.Tensor, torch.nn.Parameter) or not _is_plain(obj, torch):
            return None
        known = self._tensors.get(id(obj))
        if known is None:
            # The tensor is kept beside its id, so that no other object gets the same id meanwhile.
            known = self._tensors[id(obj)] = (obj, self._describe(obj, len(self._tensors)))
        return known[1]

    def _describe(self, tensor: Any, index: int) -> tuple[Any, ...]:
        torch = self._torch
        # Devices that don't show their memory, as XLA's, say 0: then every tensor has its own.
        place = tensor.data_ptr() or ("object", id(tensor))
        region = (tensor.device, place, tensor.dtype, tensor.shape, tensor.stride())
        offset = self._regions.get(region)
        if offset is None or tensor.numel() == 0:
            dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            size = dense.numel() * dense.element_size()
            raw = (ctypes.c_char * size).from_address(dense.data_ptr()) if size else b""
            offset = self._regions[region] = self._writer.write(raw)
        is_parameter = type(tensor) is torch.nn.Parameter
        needs_grad = tensor.requires_grad and tensor.is_leaf
        return ("tensor", index, offset, tensor.dtype, tuple(tensor.shape), is_parameter, needs_grad)


def _is_plain(tensor: Any, torch: Any) -> bool:
    """Whether the tensor is nothing but dense numbers; any other kind is left to its own way of pickling."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
        and not vars(tensor)
    )


class _Unpickler(pickle.Unpickler):
    """Builds tensors on the mapped file; one object per object that was written, so that tied weights stay tied."""

    def __init__(self, stream: io.BytesIO, mapping: mmap.mmap, buffers: list[memoryview]) -> None:
        super().__init__(stream, buffers=buffers)
        self._mapping = mapping
        self._tensors: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        import torch

        _, index, offset, dtype, shape, is_parameter, needs_grad = pid
        if index not in self._tensors:
            count = 1
            for size in shape:
                count *= size
            if count == 0:
                tensor = torch.empty(shape, dtype=dtype)
            else:
                tensor = torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset)
                tensor = tensor.reshape(shape)
            if is_parameter:
                tensor = torch.nn.Parameter(tensor, requires_grad=needs_grad)
            else:
                tensor.requires_grad_(needs_grad)
            self._tensors[index] = tensor
        return self._tensors[index]
