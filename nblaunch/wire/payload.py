"""Python values in a memory file: the call on its way to fresh workers, and results on their way back.

    offset 0   header: where the pickle is, how long it is, how many buffers the table names
    64 ...     tensors and large arrays, raw, 64-byte aligned, each written as soon as the pickler meets it
    then       the pickle (cloudpickle: functions and classes of ``__main__`` by value), then the table of buffers
    then       where the file has a name, the signature of header, pickle and table: of all that can run code
    then       the next value of the file, if there is one: its header, and so on

Nothing passes through a pipe, so that no process waits for another. What is read is either built on the file's pages,
mapped privately (:func:`load_mapped`), or copied into memory of its own (:func:`load_copied`). Tensors arrive on the
CPU.

Objects of the notebook itself: to a fresh interpreter, functions and classes of ``__main__`` go by value, since it has
no such cells; they become members of its own ``__main__``, so that what it pickles by name itself (checkpoints, tasks
of a process pool) is found. Back to the kernel they go by *reference*: an exception class or a result class defined in
a cell must arrive as that very class, or ``except MyError`` would not catch it.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import math
import mmap
import os
import pickle
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import context as multiprocessing_context
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

from nblaunch.wire import accelerate_states, made_anew, signing
from nblaunch.wire.originals import Unchanged

_HEADER = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<QQ")
_ALIGN = 64
_MIN_BUFFER_BYTES = 4096
_MIN_PAGES_BYTES = 1 << 20
_MAX_WRITE_BYTES = 1 << 30  # Linux writes at most 2 GiB - 4 KiB at a time


class Damaged(ValueError):
    """A file is not as it was written: it was cut, or others have written it. Nothing of it was unpickled."""


class NotebookPickler(cloudpickle.CloudPickler):
    """cloudpickle, with a choice of how ``__main__`` is treated.

    Args:
        stream: where to write.
        main_by_reference: name functions and classes that this process's ``__main__`` holds; False = copy them into the
            ``__main__`` of the process that reads.
        options: for the pickler.
    """

    def __init__(self, stream: io.BytesIO, *, main_by_reference: bool, **options: Any) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL, **options)
        self._main_by_reference = main_by_reference
        self._main = sys.modules.get("__main__")
        if not main_by_reference:
            # The global names of a function, by the id of what it has here.
            self.globals_ref[id(vars(self._main))] = _NAMES_OF_MAIN

    def reducer_override(self, obj: Any) -> Any:
        if obj is _NAMES_OF_MAIN:
            return _names_of_main, ()
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            # cloudpickle refuses modules with a class of their own, as torch.backends.cudnn.
            return importlib.import_module, (obj.__name__,)
        if _is_on_device(obj):
            return _same, (_moved_to_cpu(obj),)
        if _is_ddp(obj):
            # The wrapper belongs to a process group, and can't be rebuilt without it.
            return _same, (obj.module,)
        of_state = accelerate_states.reduction(obj)
        if of_state is not None:
            return of_state
        is_named = isinstance(obj, (type, types.FunctionType)) and self._is_of_main(obj)
        if is_named and self._main_by_reference:
            return obj.__qualname__
        of_new = made_anew.reduction(obj)
        if of_new is not None:
            return of_new
        if not is_named:
            return super().reducer_override(obj)
        reduced = super().reducer_override(obj)
        if "." in obj.__qualname__ or not isinstance(reduced, tuple):
            return reduced
        make, args, state, _, _, set_state = reduced
        return make, args, (set_state, state), None, None, _set_state_in_main

    def _is_of_main(self, obj: Any) -> bool:
        if obj.__module__ != "__main__":
            return False
        found: Any = self._main
        for name in obj.__qualname__.split("."):  # Outer.Inner is looked up in steps
            found = getattr(found, name, None)
        return found is obj


def _is_on_device(obj: Any) -> bool:
    """Return whether ``obj`` is a tensor whose reader would open a device; a parameter is pickled by its data."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor) or isinstance(obj, torch.nn.Parameter):
        return False
    return obj.device.type not in ("cpu", "meta")


def _moved_to_cpu(tensor: Any) -> Any:
    """Return a copy on the CPU with all else that a tensor has: attributes, and that a leaf needs gradients."""
    with sys.modules["torch"].no_grad():
        moved = tensor.to("cpu")
    if tensor.is_leaf and tensor.requires_grad:
        moved.requires_grad_()
    for name, value in vars(tensor).items():
        vars(moved).setdefault(name, value)  # its class may have set those that depend on the device
    return moved


def _is_ddp(obj: Any) -> bool:
    library: Any = sys.modules.get("torch.nn.parallel.distributed")
    return library is not None and isinstance(obj, library.DistributedDataParallel)


def _same(value: Any) -> Any:
    return value


class _NamesOfMain:
    """Stands for the names of ``__main__`` of the process that reads."""


_NAMES_OF_MAIN = _NamesOfMain()


def _names_of_main() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _set_state_in_main(obj: Any, state: tuple[Callable[[Any, Any], Any], Any]) -> None:
    """Complete a function or class as cloudpickle does, and make it a member of ``__main__``."""
    set_state, own = state
    set_state(obj, own)
    setattr(sys.modules["__main__"], obj.__name__, obj)


def send_cells_by_value() -> None:
    """Let the processes that ``multiprocessing`` starts afresh get what a cell defined: loaders' ``Dataset`` classes.

    It names functions and classes, and a fresh interpreter (``spawn``; ``forkserver``, the default of Python 3.14) has
    no cells in its ``__main__``; that of a script it runs again.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None and not hasattr(main, "__file__"):
        pickler: Any = ForkingPickler
        pickler.reducer_override = _reduce_for_fresh_process


@contextmanager
def cells_sent_by_value() -> Iterator[None]:
    """Do as :func:`send_cells_by_value`, but in the block alone: this process is the user's."""
    pickler: Any = ForkingPickler
    before = vars(pickler).get("reducer_override")
    send_cells_by_value()
    try:
        yield
    finally:
        if before is not None:
            pickler.reducer_override = before
        elif "reducer_override" in vars(pickler):
            del pickler.reducer_override


def _reduce_for_fresh_process(pickler: ForkingPickler, obj: Any) -> Any:
    # Tasks of processes that are there already, which may be forked ones with the same cells, go by name.
    is_starting = multiprocessing_context.get_spawning_popen() is not None
    if not is_starting or not isinstance(obj, (type, types.FunctionType)) or obj.__module__ != "__main__":
        return NotImplemented
    return pickle.loads, (to_bytes(obj, main_by_reference=False),)


def to_bytes(value: Any, *, main_by_reference: bool, max_bytes: int | None = None) -> bytes:
    """Pickle ``value``.

    Raises:
        OverflowError: it takes more than ``max_bytes``, found out before all of it was written.
        Exception: it can't be pickled.
    """
    stream = io.BytesIO() if max_bytes is None else _BoundedStream(max_bytes)
    NotebookPickler(stream, main_by_reference=main_by_reference).dump(value)
    return stream.getvalue()


class _BoundedStream(io.BytesIO):
    """Refuses to grow beyond ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._max_bytes:
            raise OverflowError(f"more than {self._max_bytes} bytes")
        return super().write(data)


class PayloadWriter:
    """Appends values to a file that is empty at first. A tensor that several of them hold is written once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writer = _FileWriter(fd)
        self._regions: dict[Any, int] = {}
        # They keep tensors alive, so that no region of memory is used anew.
        self._picklers: list[_Pickler] = []

    def append(
        self,
        value: Any,
        *,
        main_by_reference: bool = False,
        tests: Mapping[int, Callable[[Any], bool]] | None = None,
        key: bytes = b"",
    ) -> int:
        """Write ``value`` and return where it is, for :func:`load_mapped`.

        Args:
            value: what to write.
            main_by_reference: as in :class:`NotebookPickler`.
            tests: ``id`` of a tensor -> a function that says of its values, on the CPU, whether the reader has them.
                Then an :class:`nblaunch.wire.originals.Unchanged` is written in the tensor's place.
            key: to sign it with (``wire/signing.py``); b"" = unsigned.

        Raises:
            Exception: whatever pickling raises; :func:`nblaunch.wire.pickle_errors.unpicklable_parts` says which
                part it was. Other values can still be appended.
            OSError, MemoryError: memory or disk is full. What was written of ``value`` is given back.
        """
        end, regions = self._writer.end, dict(self._regions)
        try:
            return self._append(value, main_by_reference, tests or {}, key)
        except (OSError, MemoryError):
            os.ftruncate(self._fd, end)
            self._writer.end, self._regions = end, regions
            raise

    def _append(
        self, value: Any, main_by_reference: bool, tests: Mapping[int, Callable[[Any], bool]], key: bytes
    ) -> int:
        header_at = self._writer.skip(_HEADER.size)
        stream = io.BytesIO()
        pickler = _Pickler(stream, self._writer, self._regions, main_by_reference, tests)
        self._picklers.append(pickler)
        pickler.dump(value)
        body = stream.getbuffer()
        start = self._writer.write(body)
        table = b"".join(_ENTRY.pack(*entry) for entry in pickler.buffers)
        self._writer.write(table)
        header = _HEADER.pack(start, len(body), len(pickler.buffers))
        os.pwrite(self._fd, header, header_at)
        if key:
            self._writer.write(signing.digest(key, header, body, table))
        return header_at


def dump(value: Any, fd: int) -> None:
    """Write ``value`` alone to the empty file ``fd``; raises as :meth:`PayloadWriter.append` does."""
    PayloadWriter(fd).append(value)


def load_mapped(fd: int, at: int = 0, key: bytes = b"") -> Any:
    """Read what was written at ``at``. The tensors in it live on the file's pages, mapped copy-on-write.

    As long as one of them lives, so does the whole file, with a descriptor.

    Raises:
        Damaged: it is not signed with ``key``, or was cut.
    """
    if key:
        _check(fd, at, key)
    return _read(_MappedFile(fd), at)


def load_mapped_with_address(fd: int) -> tuple[Any, int]:
    """Load what was written first; return the memory address of the file's first byte, too."""
    file = _MappedFile(fd)
    return _read(file, 0), ctypes.addressof(ctypes.c_char.from_buffer(file.part(0, 1)))


def load_copied(fd: int, at: int = 0) -> Any:
    """Read what was written at ``at`` into memory of its own, for values that are kept: the file may hold much more."""
    return _read(_CopiedFile(fd), at)


def _read(file: _MappedFile | _CopiedFile, at: int) -> Any:
    body, table = _parts(file, file.part(at, _HEADER.size))
    buffers = [file.part(offset, size) for offset, size in _ENTRY.iter_unpack(table)]
    return _Unpickler(io.BytesIO(body), file, buffers).load()


def _parts(file: _MappedFile | _CopiedFile, header: Any) -> tuple[Any, Any]:
    """Return the pickle and the table of buffers that a header names."""
    start, length, num_buffers = _HEADER.unpack(header)
    table = file.part(_aligned(start + length), num_buffers * _ENTRY.size) if num_buffers else b""
    return file.part(start, length), table


def _check(fd: int, at: int, key: bytes) -> None:
    """Check the signature of what was written at ``at``, which follows the table of buffers.

    Raises:
        Damaged: it is another, or the file was cut.
    """
    try:
        file = _MappedFile(fd)
        header = file.part(at, _HEADER.size)
        body, table = _parts(file, header)
        start, length, num_buffers = _HEADER.unpack(header)
        end = _aligned(start + length) + num_buffers * _ENTRY.size
        signing.check(bytes(file.part(_aligned(end), signing.SIGNATURE_BYTES)), key, header, body, table)
    except (ValueError, struct.error) as error:  # an empty file can't be mapped, a short one has no header
        raise Damaged(str(error)) from None


class _MappedFile:
    """Parts of a file where they lie, mapped copy-on-write."""

    def __init__(self, fd: int) -> None:
        self._view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))

    def part(self, offset: int, size: int) -> Any:
        """Return that many bytes, to be read and written."""
        return self._view[offset : offset + size]


class _CopiedFile:
    """Parts of a file, each in memory of its own; what shared memory before it was written does so again."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._parts: dict[tuple[int, int], Any] = {}

    def part(self, offset: int, size: int) -> Any:
        """Return that many bytes, to be read and written."""
        if (offset, size) not in self._parts:
            self._parts[offset, size] = self._copy(offset, size)
        return self._parts[offset, size]

    def _copy(self, offset: int, size: int) -> Any:
        if size < _MIN_PAGES_BYTES:
            whole: Any = bytearray(size)
        else:  # these need not be zeroed, and are back with the system as soon as they are given up
            whole = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        rest = memoryview(whole)
        while rest:
            count = os.preadv(self._fd, [rest[:_MAX_WRITE_BYTES]], offset)
            if count == 0:
                raise EOFError(f"the memory file ends at {offset}, before its contents")
            rest, offset = rest[count:], offset + count
        return whole


def pickling_error(value: Any) -> Exception | None:
    """Return None where :func:`dump` accepts ``value``, otherwise the error that it raises. Writes nothing."""
    try:
        _Pickler(io.BytesIO(), _NullWriter(), {}, False, {}).dump(value)
    except Exception as error:
        return error
    return None


def num_bytes(value: Any) -> int:
    """Return how large a file with ``value`` is, about. Writes nothing.

    Raises:
        Exception: whatever pickling it raises.
    """
    writer, stream = _NullWriter(), io.BytesIO()
    _Pickler(stream, writer, {}, True, {}).dump(value)
    return writer.end + stream.getbuffer().nbytes


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


class _FileWriter:
    """Appends raw bytes to a file at aligned offsets, from ``end`` on."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.end = 0

    def skip(self, num_bytes: int) -> int:
        """Leave room, to be written later; returns where."""
        start = _aligned(self.end)
        self.end = start + num_bytes
        return start

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        start = offset = _aligned(self.end)
        while view:
            written = os.pwrite(self._fd, view[:_MAX_WRITE_BYTES], offset)
            view, offset = view[written:], offset + written
        self.end = offset
        return start


class _NullWriter(_FileWriter):
    """Takes everything and keeps nothing, to try whether a value can be pickled, and in how many bytes."""

    def __init__(self) -> None:
        super().__init__(-1)

    def write(self, data: Any) -> int:
        start = _aligned(self.end)
        self.end = start + memoryview(data).nbytes
        return start


class _Pickler(NotebookPickler):
    """Writes dense tensors and large buffers beside the pickle as soon as it meets them.

    Tensors go by persistent id rather than as out-of-band buffers: a pickler's memo would keep the CPU copy of every
    GPU tensor alive until the end, all at once.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        writer: _FileWriter,
        regions: dict[Any, int],
        main_by_reference: bool,
        tests: Mapping[int, Callable[[Any], bool]],
    ) -> None:
        super().__init__(stream, main_by_reference=main_by_reference, buffer_callback=self._take_buffer)
        self.buffers: list[tuple[int, int]] = []
        self._writer = writer
        self._regions = regions
        self._tests = tests
        self._tensors: dict[int, tuple[Any, Any]] = {}
        self._torch: Any = sys.modules.get("torch")

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether to keep a small buffer inside the pickle."""
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
        is_had = self._tests.get(id(tensor))
        on_cpu = None if is_had is None else _on_cpu(tensor)
        if is_had is not None and is_had(on_cpu):
            return ("unchanged", tuple(tensor.shape))
        # Devices that don't show their memory, as XLA's, say 0: then every tensor has its own.
        place = tensor.data_ptr() or ("object", id(tensor))
        # A lazily conjugated or negated view differs from its base by a bit alone.
        is_lazy = (tensor.is_conj(), tensor.is_neg())
        region = (tensor.device, place, tensor.dtype, tensor.shape, tensor.stride(), is_lazy)
        offset = self._regions.get(region)
        if offset is None or tensor.numel() == 0:
            dense = (_on_cpu(tensor) if on_cpu is None else on_cpu).contiguous()
            size = dense.numel() * dense.element_size()
            raw = (ctypes.c_char * size).from_address(dense.data_ptr()) if size else b""
            offset = self._regions[region] = self._writer.write(raw)
        is_parameter = type(tensor) is torch.nn.Parameter
        needs_grad = tensor.requires_grad and tensor.is_leaf
        return ("tensor", index, offset, tensor.dtype, tuple(tensor.shape), is_parameter, needs_grad)


def _on_cpu(tensor: Any) -> Any:
    return tensor.detach().resolve_conj().resolve_neg().cpu()


def _is_plain(tensor: Any, torch: Any) -> bool:
    """Return whether the tensor is nothing but dense numbers; any other kind is pickled by its own means."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested  # which has no shape
        and tensor.device.type != "meta"
        and not vars(tensor)
    )


class _Unpickler(pickle.Unpickler):
    """Builds tensors on parts of the file; one object per object that was written, so that tied weights stay tied."""

    def __init__(self, stream: io.BytesIO, file: _MappedFile | _CopiedFile, buffers: list[Any]) -> None:
        super().__init__(stream, buffers=buffers)
        self._file = file
        self._tensors: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        import torch

        if pid[0] == "unchanged":
            return Unchanged(pid[1])
        _, index, offset, dtype, shape, is_parameter, needs_grad = pid
        if index not in self._tensors:
            count = math.prod(shape)
            if count == 0:
                tensor = torch.empty(shape, dtype=dtype)
            else:
                part = self._file.part(offset, count * dtype.itemsize)
                tensor = torch.frombuffer(part, dtype=dtype).reshape(shape)
            if is_parameter:
                tensor = torch.nn.Parameter(tensor, requires_grad=needs_grad)
            else:
                tensor.requires_grad_(needs_grad)
            self._tensors[index] = tensor
        return self._tensors[index]
