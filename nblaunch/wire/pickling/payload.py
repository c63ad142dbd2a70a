"""Python values in a memory file: the call for fresh workers, and the workers' results.

    offset 0   header: place and length of the pickles, number of buffers in the table
    64 ...     large buffers and tensors on devices, raw, 64-byte aligned, each written when the pickler reaches it
    then       tensors on the CPU and NumPy arrays, as blocks that preserve their overlap in memory
    then       two pickles: descriptions of tensors and arrays; the value (cloudpickle: functions and classes of
               ``__main__`` by value). Then the table of buffers
    then       if the file has a name, the signature of header, pickles and table, the only parts that can run code
    then       the next value in the file, if there is one: its header, and so on

No data passes through a pipe, so no process waits for another. The reader either builds objects on the file's pages,
mapped privately (:func:`load_mapped`), or copies them into its own memory (:func:`load_copied`). Tensors arrive on the
CPU.

Objects from the notebook: functions and classes of ``__main__`` go to a fresh interpreter by value, because it has no
cells. They become members of its ``__main__``, so that names in its own pickles (checkpoints, tasks for a process pool)
are found. They return to the kernel by *reference*: an exception class or a result class from a cell must arrive as
that same class, or ``except MyError`` would not catch it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import io
import os
import pickle
import pickletools
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import context as multiprocessing_context
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

from nblaunch.wire import accelerate_states, signing
from nblaunch.wire.originals import Unchanged
from nblaunch.wire.pickling import reductions
from nblaunch.wire.pickling.memory_file import (
    Arrays,
    CopiedFile,
    FileWriter,
    MappedFile,
    NullWriter,
    Place,
    Span,
    aligned,
)

_HEADER = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<QQ")
_MIN_BUFFER_BYTES = 4096


class Damaged(ValueError):
    """A file has changed since it was written: it was truncated or overwritten. Nothing was unpickled."""


class NotebookPickler(cloudpickle.CloudPickler):
    """cloudpickle's pickler, extended to send members of ``__main__`` by value or by reference.

    Args:
        stream: where to write.
        main_by_reference: True = refer by name to functions and classes of this process's ``__main__``; False = copy
            them into the ``__main__`` of the reading process.
        options: options for the pickler.
    """

    def __init__(self, stream: io.BytesIO, *, main_by_reference: bool, **options: Any) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL, **options)
        self._main_by_reference = main_by_reference
        self._main = sys.modules.get("__main__")
        if not main_by_reference:
            # Maps the id of a function's globals in this process to the globals that the function gets in the reading
            # process.
            self.globals_ref[id(vars(self._main))] = _MAIN_NAMES

    def reducer_override(self, obj: Any) -> Any:
        if obj is _MAIN_NAMES:
            return _names_of_main, ()
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            # cloudpickle rejects modules with their own class, such as torch.backends.cudnn.
            return importlib.import_module, (obj.__name__,)
        if _is_on_device(obj):
            return _same, (_moved_to_cpu(obj),)
        if _is_ddp(obj):
            # The wrapper belongs to a process group, and can't be rebuilt without that group.
            return _same, (obj.module,)
        of_state = accelerate_states.reduction(obj)
        if of_state is not None:
            return of_state
        is_named = isinstance(obj, (type, types.FunctionType)) and self._is_of_main(obj)
        if is_named and self._main_by_reference:
            return obj.__qualname__
        if isinstance(obj, _LruCached) and obj.__module__ == "__main__" and not self._main_by_reference:
            return _lru_cached, (obj.__wrapped__, obj.cache_parameters())
        elsewhere = reductions.reduction(obj)
        if elsewhere is not None:
            return elsewhere
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and not self._main_by_reference:
            return reductions.of_named_object(obj, self._main, self.dispatch_table)
        if not is_named:
            return reduced
        if "." in obj.__qualname__ or not isinstance(reduced, tuple):
            return reduced
        make, args, state, _, _, set_state = reduced
        return make, args, (set_state, state), None, None, _set_state_in_main

    def _is_of_main(self, obj: Any) -> bool:
        if obj.__module__ != "__main__":
            return False
        target: Any = self._main
        for name in obj.__qualname__.split("."):  # Outer.Inner is looked up in steps
            target = getattr(target, name, None)
        return target is obj


def _is_on_device(obj: Any) -> bool:
    """Return whether ``obj`` is a tensor that would open a device when read; a parameter is pickled via its data."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor) or isinstance(obj, torch.nn.Parameter):
        return False
    return obj.device.type not in ("cpu", "meta")


def _moved_to_cpu(tensor: Any) -> Any:
    """Return a copy on the CPU that keeps the tensor's attributes; a leaf keeps its ``requires_grad``."""
    with sys.modules["torch"].no_grad():
        moved = tensor.to("cpu")
    if tensor.is_leaf and tensor.requires_grad:
        moved.requires_grad_()
    for name, value in vars(tensor).items():
        vars(moved).setdefault(name, value)  # its class may have set device-dependent attributes
    return moved


def _is_ddp(obj: Any) -> bool:
    library: Any = sys.modules.get("torch.nn.parallel.distributed")
    return library is not None and isinstance(obj, library.DistributedDataParallel)


def _same(value: Any) -> Any:
    return value


class _MainNames:
    """Stands in for the namespace of ``__main__`` in the reading process."""


_MAIN_NAMES = _MainNames()


_LruCached = type(functools.lru_cache(_same))


def _lru_cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _names_of_main() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _set_state_in_main(obj: Any, state: tuple[Callable[[Any, Any], Any], Any]) -> None:
    """Complete a function or class as cloudpickle does, and make it a member of ``__main__``."""
    set_state, attributes = state
    set_state(obj, attributes)
    setattr(sys.modules["__main__"], obj.__name__, obj)


def send_cells_by_value() -> None:
    """Send definitions made in cells, such as loaders' ``Dataset`` classes, to fresh ``multiprocessing`` processes.

    ``multiprocessing`` pickles functions and classes by name. A fresh interpreter (``spawn``; ``forkserver``, the
    default of Python 3.14) has no cells in its ``__main__``. It runs scripts again and therefore has their definitions.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None and not hasattr(main, "__file__"):
        pickler: Any = ForkingPickler
        pickler.reducer_override = _reduce_for_fresh_process


@contextmanager
def cells_sent_by_value() -> Iterator[None]:
    """Do what :func:`send_cells_by_value` does, but only during the block, because this is the user's process."""
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
    # Pickle by name for existing processes, because they may be forks, which already have the cells' definitions.
    is_starting = multiprocessing_context.get_spawning_popen() is not None
    if not is_starting or not isinstance(obj, (type, types.FunctionType)) or obj.__module__ != "__main__":
        return NotImplemented
    return pickle.loads, (to_bytes(obj, main_by_reference=False),)


def to_bytes(value: Any, *, main_by_reference: bool, max_bytes: int | None = None) -> bytes:
    """Pickle ``value``.

    Raises:
        OverflowError: it takes more than ``max_bytes``; raised before all of it is written.
        Exception: it can't be pickled.
    """
    stream = io.BytesIO() if max_bytes is None else _BoundedStream(max_bytes)
    NotebookPickler(stream, main_by_reference=main_by_reference).dump(value)
    return stream.getvalue()


class _BoundedStream(io.BytesIO):
    """Rejects writes beyond ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._max_bytes:
            raise OverflowError(f"more than {self._max_bytes} bytes")
        return super().write(data)


class PayloadWriter:
    """Appends values to an initially empty file. It writes a tensor only once even if several values share it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writer = FileWriter(fd)
        self._regions: dict[Any, int] = {}
        # Picklers keep tensors alive, so that no region of memory is reused.
        self._picklers: list[_Pickler] = []

    def append(
        self,
        value: Any,
        *,
        main_by_reference: bool = False,
        tests: Mapping[int, Callable[[Any], bool]] | None = None,
        key: bytes = b"",
    ) -> int:
        """Write ``value`` and return its place, for :func:`load_mapped`.

        Args:
            value: the value to write.
            main_by_reference: as in :class:`NotebookPickler`.
            tests: ``id`` of a tensor -> a function that takes its CPU copy and returns whether the reader already has
                these values. If so, an :class:`nblaunch.wire.originals.Unchanged` is written in the tensor's place.
            key: key to sign it with (``wire/signing.py``); b"" = unsigned.

        Raises:
            Exception: pickling raised it; :func:`nblaunch.wire.pickling.pickle_errors.unpicklable_parts` finds the
                part. Other values can still be appended.
            OSError, MemoryError: the memory or the disk is full. The file is truncated to its previous end.
        """
        end, regions = self._writer.end, dict(self._regions)
        try:
            return self._append(value, main_by_reference, tests or {}, key)
        except (OSError, MemoryError):
            self._writer.go_back(end)
            self._regions = regions
            raise

    def _append(
        self, value: Any, main_by_reference: bool, tests: Mapping[int, Callable[[Any], bool]], key: bytes
    ) -> int:
        header_at = self._writer.skip(_HEADER.size)
        stream = io.BytesIO()
        pickler = _Pickler(stream, self._writer, self._regions, main_by_reference, tests)
        self._picklers.append(pickler)
        pickler.dump(value)
        arrays = pickle.dumps((pickler.descriptions, pickler.arrays.put()), pickle.HIGHEST_PROTOCOL)
        body = b"".join((arrays, stream.getbuffer()))
        start = self._writer.write(body)
        table = b"".join(_ENTRY.pack(*entry) for entry in pickler.buffers)
        self._writer.write(table)
        header = _HEADER.pack(start, len(body), len(pickler.buffers))
        if key:
            self._writer.write(signing.digest(key, header, body, table))
        self._writer.flush()
        os.pwrite(self._fd, header, header_at)
        return header_at


def dump(value: Any, fd: int) -> None:
    """Write a single ``value`` to the empty file ``fd``; raise like :meth:`PayloadWriter.append`."""
    PayloadWriter(fd).append(value)


def load_mapped(fd: int, at: int = 0, key: bytes = b"") -> Any:
    """Read the value at ``at``. Its tensors live on the file's pages, mapped copy-on-write.

    The whole file and a descriptor stay open while any of these tensors exists.

    Raises:
        Damaged: it is not signed with ``key``, or was truncated.
    """
    if key:
        _check(fd, at, key)
    return _read(MappedFile(fd), at)


def load_mapped_with_address(fd: int) -> tuple[Any, int]:
    """Load the first value; also return the memory address of the file's first byte."""
    file = MappedFile(fd)
    return _read(file, 0), ctypes.addressof(ctypes.c_char.from_buffer(file.part(0, 1)))


def load_copied(fd: int, at: int = 0) -> Any:
    """Read the value at ``at`` into its own memory, for values that are kept, because the file may be much larger."""
    return _read(CopiedFile(fd), at)


def _read(file: MappedFile | CopiedFile, at: int) -> Any:
    body, table = _parts(file, file.part(at, _HEADER.size))
    buffers = [file.part(offset, size) for offset, size in _ENTRY.iter_unpack(table)]
    stream = io.BytesIO(body)
    descriptions, places = pickle.load(stream)
    return _Unpickler(stream, file, buffers, descriptions, places).load()


def _parts(file: MappedFile | CopiedFile, header: Any) -> tuple[Any, Any]:
    """Return the pickles and the table of buffers that a header names."""
    start, length, num_buffers = _HEADER.unpack(header)
    table = file.part(aligned(start + length), num_buffers * _ENTRY.size) if num_buffers else b""
    return file.part(start, length), table


def _check(fd: int, at: int, key: bytes) -> None:
    """Check the signature of the value at ``at``, which follows the table of buffers.

    Raises:
        Damaged: the signature is wrong, or the file was truncated.
    """
    try:
        file = MappedFile(fd)
        header = file.part(at, _HEADER.size)
        body, table = _parts(file, header)
        start, length, num_buffers = _HEADER.unpack(header)
        end = aligned(start + length) + num_buffers * _ENTRY.size
        signing.check(bytes(file.part(aligned(end), signing.SIGNATURE_BYTES)), key, header, body, table)
    except (ValueError, struct.error) as error:  # an empty file can't be mapped; a short one has no header
        raise Damaged(str(error)) from None


def pickles_in(fd: int) -> list[bytes]:
    """Return the pickles in the output of :func:`dump` (descriptions of arrays, and the value) without reading them."""
    file = MappedFile(fd)
    body, _ = _parts(file, file.part(0, _HEADER.size))
    data = bytes(body)
    pickles = []
    while data:
        *_, (_, _, last) = pickletools.genops(data)  # STOP, which takes one byte
        assert last is not None, "positions in bytes are known"
        pickles.append(data[: last + 1])
        data = data[last + 1 :]
    return pickles


def pickling_error(value: Any) -> Exception | None:
    """Return None if :func:`dump` accepts ``value``, or else the error that it raises. Writes nothing."""
    try:
        _Pickler(io.BytesIO(), NullWriter(), {}, False, {}).dump(value)
    except Exception as error:
        return error
    return None


def num_bytes(value: Any) -> int:
    """Return the approximate size of a file that contains ``value``. Writes nothing.

    Raises:
        Exception: pickling raised it.
    """
    writer, stream = NullWriter(), io.BytesIO()
    pickler = _Pickler(stream, writer, {}, True, {})
    pickler.dump(value)
    pickler.arrays.put()
    return writer.end + stream.getbuffer().nbytes


class _Pickler(NotebookPickler):
    """Writes dense tensors, arrays and large buffers outside the pickle.

    It uses persistent ids rather than out-of-band buffers: a pickler's memo would keep the CPU copies of all GPU
    tensors alive at the same time, until the end.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        writer: FileWriter,
        regions: dict[Any, int],
        main_by_reference: bool,
        tests: Mapping[int, Callable[[Any], bool]],
    ) -> None:
        super().__init__(stream, main_by_reference=main_by_reference, buffer_callback=self._take_buffer)
        self.buffers: list[tuple[int, int]] = []
        self.arrays = Arrays(writer.write, regions)
        self._writer = writer
        self._tests = tests
        self.descriptions: list[tuple[Any, ...]] = []
        # Keep the objects alive, so that no other object gets the same id and their memory is not reused.
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._torch: Any = sys.modules.get("torch")
        self._numpy: Any = sys.modules.get("numpy")
        self._kinds: dict[type, Callable[[Any], tuple[Any, ...] | None]] = {}
        if self._torch is not None:
            self._kinds |= dict.fromkeys(
                (self._torch.Tensor, self._torch.nn.Parameter), self._describe_tensor
            )
        if self._numpy is not None:
            self._kinds[self._numpy.ndarray] = self._describe_array

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether to keep a small buffer inside the pickle."""
        data = buffer.raw()
        if len(data) < _MIN_BUFFER_BYTES:
            return True
        self.buffers.append((self._writer.write(data), len(data)))
        return False

    def persistent_id(self, obj: Any) -> int | None:
        describe = self._kinds.get(type(obj))
        if describe is None:
            return None
        if id(obj) not in self._numbers:
            description = describe(obj)
            if description is None:
                return None
            self._numbers[id(obj)] = (len(self.descriptions), obj)
            self.descriptions.append(description)
        return self._numbers[id(obj)][0]

    def _describe_tensor(self, tensor: Any) -> tuple[Any, ...] | None:
        if not _is_plain(tensor, self._torch):
            return None
        is_had = self._tests.get(id(tensor))
        on_cpu = None if is_had is None else _on_cpu(tensor)
        if is_had is not None and is_had(on_cpu):
            return ("unchanged", tuple(tensor.shape))
        number = self._add_tensor(tensor, on_cpu)
        is_parameter = type(tensor) is self._torch.nn.Parameter
        needs_grad = tensor.requires_grad and tensor.is_leaf
        layout = (tuple(tensor.shape), tuple(tensor.stride()))
        return ("tensor", number, tensor.dtype, *layout, is_parameter, needs_grad)

    def _add_tensor(self, tensor: Any, on_cpu: Any) -> int:
        address, item_bytes = tensor.data_ptr(), tensor.element_size()
        num_bytes = tensor.numel() * item_bytes
        # A lazily conjugated or negated view differs from its base only in a flag.
        is_lazy = (tensor.is_conj(), tensor.is_neg())
        is_in_memory = tensor.device.type == "cpu" and not any(is_lazy) and num_bytes > 0
        if is_in_memory and tensor.is_contiguous():
            return self.arrays.add(Span(address, address, address + num_bytes, num_bytes, item_bytes, True))
        # Devices that don't expose memory addresses, such as XLA's, return 0: each tensor then counts as separate
        # memory.
        place = address or ("object", id(tensor))
        key = (tensor.device, place, tensor.dtype, tensor.shape, tensor.stride(), is_lazy)

        def copy() -> Any:
            return _raw((_on_cpu(tensor) if on_cpu is None else on_cpu).contiguous())

        if not is_in_memory:
            return self.arrays.put_now(key, copy, num_bytes)
        strides = [step * item_bytes for step in tensor.stride()]
        return self.arrays.add(Span.of(address, tensor.shape, strides, item_bytes, num_bytes), key, copy)

    def _describe_array(self, array: Any) -> tuple[Any, ...] | None:
        if not _is_plain_array(array):
            return None
        number = self._add_array(array, array.__array_interface__["data"][0], array.itemsize, array.nbytes)
        return ("array", number, array.dtype, array.shape, array.strides)

    def _add_array(self, array: Any, address: int, item_bytes: int, num_bytes: int) -> int:
        if array.flags.c_contiguous:
            return self.arrays.add(Span(address, address, address + num_bytes, num_bytes, item_bytes, True))
        key = ("array", address, array.dtype.str, array.shape, array.strides)
        span = Span.of(address, array.shape, array.strides, item_bytes, num_bytes)
        return self.arrays.add(span, key, lambda: self._numpy.ascontiguousarray(array).view("u1"))


def _on_cpu(tensor: Any) -> Any:
    return tensor.detach().resolve_conj().resolve_neg().cpu()


def _raw(dense: Any) -> Any:
    """Return the memory of a tensor on the CPU, and keep the tensor alive."""
    raw: Any = (ctypes.c_char * (dense.numel() * dense.element_size())).from_address(dense.data_ptr())
    raw.tensor = dense
    return raw


def _is_plain(tensor: Any, torch: Any) -> bool:
    """Return whether this is a plain dense tensor; other kinds use their own pickling."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested  # a nested tensor has no shape
        and tensor.device.type != "meta"
        and not vars(tensor)
    )


def _is_plain_array(array: Any) -> bool:
    """Return whether the array consists only of dense numbers or fixed-size strings, each with its own memory."""
    dtype = array.dtype
    return (
        dtype.kind in _PLAIN_KINDS
        and not dtype.hasobject
        and array.nbytes > 0
        and (array.flags.c_contiguous or 0 not in array.strides)  # not one element that many indices share
    )


_PLAIN_KINDS = frozenset("biufcmMSUV")  # source: numpy.dtype.kind


class _Unpickler(pickle.Unpickler):
    """Builds tensors and arrays on parts of the file; each object is built only once, so tied tensors stay tied."""

    def __init__(
        self,
        stream: io.BytesIO,
        file: MappedFile | CopiedFile,
        buffers: list[Any],
        descriptions: list[Any],
        places: list[Place],
    ) -> None:
        super().__init__(stream, buffers=buffers)
        self._file = file
        self._descriptions = descriptions
        self._places = places
        self._built: dict[int, Any] = {}
        self._storages: dict[tuple[int, int], Any] = {}

    def persistent_load(self, pid: int) -> Any:
        if pid not in self._built:
            self._built[pid] = self._build(*self._descriptions[pid])
        return self._built[pid]

    def _build(self, kind: str, *description: Any) -> Any:
        if kind == "unchanged":
            return Unchanged(*description)
        number, *rest = description
        return (self._tensor if kind == "tensor" else self._array)(self._places[number], *rest)

    def _tensor(
        self, place: Place, dtype: Any, shape: Any, strides: Any, is_parameter: bool, needs_grad: bool
    ) -> Any:
        import torch

        block = (place.offset, place.size)
        if place.size == 0:
            tensor = torch.empty(shape, dtype=dtype)
        elif not place.is_shared:
            tensor = torch.frombuffer(self._file.part(*block), dtype=dtype).reshape(shape)
        else:
            if block not in self._storages:
                memory = torch.frombuffer(self._file.part(*block), dtype=torch.uint8)
                self._storages[block] = memory.untyped_storage()
            tensor = torch.empty(0, dtype=dtype)
            tensor.set_(self._storages[block], place.start // dtype.itemsize, shape, strides)
        if is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=needs_grad)
        return tensor.requires_grad_(needs_grad)

    def _array(self, place: Place, dtype: Any, shape: Any, strides: Any) -> Any:
        import numpy

        part = self._file.part(place.offset, place.size)
        return numpy.ndarray(shape, dtype, part, place.start, strides if place.is_shared else None)
