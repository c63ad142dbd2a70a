"""Python values in a memory file: the call on its way to fresh workers, and results on their way back.

    offset 0   header: where the pickles are, how long they are, how many buffers the table names
    64 ...     large buffers and tensors of devices, raw, 64-byte aligned, each written as soon as the pickler meets it
    then       tensors on the CPU and NumPy arrays, as blocks in which they overlap as in memory (``blocks.py``)
    then       two pickles: what describes tensors and arrays; the value (cloudpickle: functions and classes of
               ``__main__`` by value). Then the table of buffers
    then       where the file has a name, the signature of header, pickles and table: of all that can run code
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
from nblaunch.wire.pickling import hidden_classes, process_bound
from nblaunch.wire.pickling.blocks import Arrays, Place, Span
from nblaunch.wire.pickling.memory_file import CopiedFile, FileWriter, MappedFile, NullWriter, aligned

_HEADER = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<QQ")
_MIN_BUFFER_BYTES = 4096


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
        if isinstance(obj, _LruCached) and obj.__module__ == "__main__" and not self._main_by_reference:
            return _lru_cached, (obj.__wrapped__, obj.cache_parameters())
        elsewhere = process_bound.reduction(obj) or hidden_classes.reduction(obj)
        if elsewhere is not None:
            return elsewhere
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


_LruCached = type(functools.lru_cache(_same))


def _lru_cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _names_of_main() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _set_state_in_main(obj: Any, state: tuple[Callable[[Any, Any], Any], Any]) -> None:
    """Complete a function or class as cloudpickle does, and make it a member of ``__main__``."""
    set_state, own = state
    set_state(obj, own)
    setattr(sys.modules["__main__"], obj.__name__, obj)


def send_cells_by_value() -> None:
    """Let the processes that ``multiprocessing`` starts afresh get what a cell defined: loaders' ``Dataset`` classes.

    ``multiprocessing`` pickles functions and classes by name. A fresh interpreter (``spawn``; ``forkserver``, the
    default of Python 3.14) has no cells in its ``__main__``. It runs a script again, and so has its definitions.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None and not hasattr(main, "__file__"):
        pickler: Any = ForkingPickler
        pickler.reducer_override = _reduce_for_fresh_process


@contextmanager
def cells_sent_by_value() -> Iterator[None]:
    """Act as :func:`send_cells_by_value` during the block only, since this process is the user's."""
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
        self._writer = FileWriter(fd)
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
            key: key to sign it with (``wire/signing.py``); b"" = unsigned.

        Raises:
            Exception: pickling raised it; :func:`nblaunch.wire.pickling.pickle_errors.unpicklable_parts` finds the
                part. Other values can still be appended.
            OSError, MemoryError: memory or disk is full. What was written of ``value`` is given back.
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
    return _read(MappedFile(fd), at)


def load_mapped_with_address(fd: int) -> tuple[Any, int]:
    """Load what was written first; return the memory address of the file's first byte, too."""
    file = MappedFile(fd)
    return _read(file, 0), ctypes.addressof(ctypes.c_char.from_buffer(file.part(0, 1)))


def load_copied(fd: int, at: int = 0) -> Any:
    """Read what was written at ``at`` into memory of its own, for values that are kept: the file may hold much more."""
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
    """Check the signature of what was written at ``at``, which follows the table of buffers.

    Raises:
        Damaged: the signature is another one, or the file was cut.
    """
    try:
        file = MappedFile(fd)
        header = file.part(at, _HEADER.size)
        body, table = _parts(file, header)
        start, length, num_buffers = _HEADER.unpack(header)
        end = aligned(start + length) + num_buffers * _ENTRY.size
        signing.check(bytes(file.part(aligned(end), signing.SIGNATURE_BYTES)), key, header, body, table)
    except (ValueError, struct.error) as error:  # an empty file can't be mapped, a short one has no header
        raise Damaged(str(error)) from None


def pickles_in(fd: int) -> list[bytes]:
    """Return the pickles of what :func:`dump` wrote, unread: what describes tensors and arrays, and the value."""
    file = MappedFile(fd)
    body, _ = _parts(file, file.part(0, _HEADER.size))
    data = bytes(body)
    found = []
    while data:
        *_, (_, _, last) = pickletools.genops(data)  # STOP, of one byte
        assert last is not None, "positions in bytes are known"
        found.append(data[: last + 1])
        data = data[last + 1 :]
    return found


def pickling_error(value: Any) -> Exception | None:
    """Return None if :func:`dump` accepts ``value``, otherwise the error that it raises. Writes nothing."""
    try:
        _Pickler(io.BytesIO(), NullWriter(), {}, False, {}).dump(value)
    except Exception as error:
        return error
    return None


def num_bytes(value: Any) -> int:
    """Return how large a file with ``value`` is, about. Writes nothing.

    Raises:
        Exception: pickling raised it.
    """
    writer, stream = NullWriter(), io.BytesIO()
    pickler = _Pickler(stream, writer, {}, True, {})
    pickler.dump(value)
    pickler.arrays.put()
    return writer.end + stream.getbuffer().nbytes


class _Pickler(NotebookPickler):
    """Writes dense tensors, arrays and large buffers beside the pickle.

    Tensors go by persistent id rather than as out-of-band buffers: a pickler's memo would keep the CPU copy of every
    GPU tensor alive until the end, all at once.
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
        # Objects are kept beside their number, so that no other gets the same id meanwhile, and their memory stays.
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
        # A lazily conjugated or negated view differs from its base by a bit alone.
        is_lazy = (tensor.is_conj(), tensor.is_neg())
        is_in_memory = tensor.device.type == "cpu" and not any(is_lazy) and num_bytes > 0
        if is_in_memory and tensor.is_contiguous():
            return self.arrays.add(Span(address, address, address + num_bytes, num_bytes, item_bytes, True))
        # Devices that don't show their memory, as XLA's, say 0: then every tensor has its own.
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
    """Return the memory of a tensor on the CPU; keeps it alive."""
    raw: Any = (ctypes.c_char * (dense.numel() * dense.element_size())).from_address(dense.data_ptr())
    raw.tensor = dense
    return raw


def _is_plain(tensor: Any, torch: Any) -> bool:
    """Return whether the tensor is nothing but dense numbers; any other kind is pickled by its own means."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested  # which has no shape
        and tensor.device.type != "meta"
        and not vars(tensor)
    )


def _is_plain_array(array: Any) -> bool:
    """Return whether the array is nothing but dense numbers or texts of fixed size, each in memory of its own."""
    dtype = array.dtype
    return (
        dtype.kind in _PLAIN_KINDS
        and not dtype.hasobject
        and array.nbytes > 0
        and (array.flags.c_contiguous or 0 not in array.strides)  # not one element for many indices
    )


_PLAIN_KINDS = frozenset("biufcmMSUV")  # source: numpy.dtype.kind


class _Unpickler(pickle.Unpickler):
    """Builds tensors and arrays on parts of the file; one per object that was written: tied ones stay tied."""

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
