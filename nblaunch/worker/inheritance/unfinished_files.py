"""Files that the kernel still keeps partly in memory: archives, compressed files, HDF5, Parquet, Excel, videos.

The kernel writes the file's index, compressor state or cached blocks when it closes the file. A worker has a copy of
that part. A worker's writes never reach the part that the kernel holds, so closing the file would lose them
or damage the file. In a worker, writing to such a file or adding a member therefore raises an error. Closing
the file there, explicitly or by garbage collection, writes nothing; only the kernel completes it.

A worker started with forkserver or spawn receives only ``dbm.dumb`` databases, because the others can't be pickled.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

from nblaunch import packages


@dataclass(frozen=True)
class _Writer:
    """A class whose objects write files that are partly in memory.

    Args:
        module: module of the class.
        name: name of the class.
        what: what the user calls the file.
        writes: methods that write, or add to the index.
        ends: methods that complete the file or a piece of it.
        stream: attribute with the file that it writes to; "" if it opens the file itself.
        path: attribute with the file's name, if there is no stream.
        is_pickled: whether objects can be sent to fresh processes.
    """

    module: str
    name: str
    what: str
    writes: tuple[str, ...]
    ends: tuple[str, ...] = ("close",)
    stream: str = ""
    path: str = ""
    is_pickled: bool = False


_WRITERS = (
    _Writer("gzip", "GzipFile", "gzip file", ("write",), ("flush", "close"), stream="fileobj"),
    _Writer("bz2", "BZ2File", "bz2 file", ("write",), stream="_fp"),
    _Writer("lzma", "LZMAFile", "xz file", ("write",), stream="_fp"),
    _Writer("lz4.frame", "LZ4FrameFile", "lz4 file", ("write",), ("flush", "close"), stream="_fp"),
    _Writer("zipfile", "ZipFile", "zip archive", ("write", "writestr", "mkdir", "_open_to_write"), stream="fp"),
    _Writer("zipfile", "_ZipWriteFile", "zip archive", ("write",), stream="_fileobj"),
    # Workers may add to a tar archive, but if a worker writes the end mark, readers stop there.
    _Writer("tarfile", "TarFile", "tar archive", (), stream="fileobj"),
    _Writer("tarfile", "_Stream", "tar archive", ("write",), stream="fileobj"),
    _Writer("wave", "Wave_write", "WAV file", ("writeframesraw", "writeframes"), stream="_file"),
    _Writer("dbm.dumb", "_Database", "database of dbm", ("__setitem__", "__delitem__"), ("sync", "close"),
            path="_datfile", is_pickled=True),
    _Writer("pyarrow.parquet.core", "ParquetWriter", "Parquet file", ("write_table", "write_batch"), path="where"),
    _Writer("pyarrow.ipc", "RecordBatchFileWriter", "Arrow file", ("write", "write_table", "write_batch")),
    _Writer("datasets.arrow_writer", "ArrowWriter", "Arrow file",
            ("write", "write_row", "write_batch", "write_table"), ("finalize", "close"), stream="stream"),
    _Writer("matplotlib.backends.backend_pdf", "PdfPages", "PDF file", ("savefig", "attach_note"), stream="_file.fh"),
    _Writer("pandas.io.excel._openpyxl", "OpenpyxlWriter", "Excel file", ("_write_cells",), stream="_handles.handle"),
    _Writer("pandas.io.excel._xlsxwriter", "XlsxWriter", "Excel file", ("_write_cells",), stream="_handles.handle"),
    # PyTables calls this method before every change to a file, except before changes to the elements of an array.
    _Writer("tables.file", "File", "PyTables file", ("_check_writable",), ("flush", "close"), path="filename"),
    _Writer("tables.array", "Array", "PyTables file", ("__setitem__",), ()),
    _Writer("netCDF4._netCDF4", "Dataset", "netCDF file",
            ("createVariable", "createDimension", "createGroup", "setncattr", "setncatts"), ("sync", "close")),
    _Writer("netCDF4._netCDF4", "Variable", "netCDF file", ("__setitem__", "setncattr", "setncatts"), ()),
    _Writer("cv2", "VideoWriter", "video", ("write",), ("release",)),
)  # fmt: skip

_HDF5 = "h5py._hl.files"
_HDF5_WRITES = (
    ("h5py._hl.group", "Group", ("__setitem__", "__delitem__", "create_dataset", "create_group",
                                 "create_virtual_dataset", "move")),
    ("h5py._hl.dataset", "Dataset", ("__setitem__", "write_direct", "resize")),
    ("h5py._hl.attrs", "AttributeManager", ("__setitem__", "__delitem__", "create", "modify")),
)  # fmt: skip
"""Module, class, methods that write."""

_made_here: set[int] = set()
"""Ids of writers that this worker created. No existing writer of the kernel has one of these ids."""

_abandoned: list[Any] = []
"""The kernel's writers that were closed here, kept because freeing one would flush its buffers."""


def reject_writes(fds: Collection[int]) -> None:
    """Make writes to the kernel's unfinished files raise an error in this forked worker.

    Args:
        fds: descriptors of files that the kernel has open for writing.
    """
    for writer in _WRITERS:
        cls = _class(writer) if fds or writer.is_pickled else None
        if cls is not None:
            _change(cls, writer, fds)
    if fds and _HDF5 in sys.modules:
        _reject_hdf5(sys.modules["h5py"])


def reject_writes_to_copies() -> None:
    """Make writes to an unfinished file raise an error if this worker received the file by pickle."""
    for writer in _WRITERS:
        if writer.is_pickled:
            packages.when_imported(writer.module, functools.partial(_change_in, writer))


def _change_in(writer: _Writer, module: Any) -> None:
    _change(getattr(module, writer.name), writer, ())


def hold_back_text(files: Collection[Any]) -> None:
    """Make writing text to the kernel's compressed files raise an error immediately, not only when a block is full.

    Args:
        files: file objects of the kernel; only text files are changed.
    """
    for file in files:
        if isinstance(file, io.TextIOWrapper):
            writer = next(
                (
                    each
                    for each in _WRITERS
                    if packages.is_subclass(type(file.buffer), f"{each.module}.{each.name}")
                ),
                None,
            )
            if writer is not None:
                reject = functools.partial(_raise, writer.what, _path(file.fileno()))
                file.write = reject  # type: ignore[method-assign]


def _class(writer: _Writer) -> Any:
    """Return the class of a row; None if its module is not imported."""
    return getattr(sys.modules.get(writer.module), writer.name, None)


def _change(cls: Any, writer: _Writer, fds: Collection[int]) -> None:
    """Change the class in this worker.

    Args:
        cls: the class.
        writer: its row.
        fds: as in :func:`reject_writes`; unused for a class without a stream.
    """

    def is_kernels(self: Any) -> bool:
        return id(self) not in _made_here and (not writer.stream or _descriptor(self, writer.stream) in fds)

    def name_of(self: Any) -> str:
        return (
            _path(_descriptor(self, writer.stream))
            if writer.stream
            else _text(getattr(self, writer.path, ""))
        )

    packages.call_before(cls, "__init__", lambda self: _made_here.add(id(self)))
    for name in writer.writes:
        if hasattr(cls, name):
            packages.call_before(cls, name, _rejecting(is_kernels, writer.what, name_of))
    for name in writer.ends:
        if hasattr(cls, name):
            _leave_to_kernel(cls, name, is_kernels)


def _descriptor(obj: Any, path: str) -> int:
    """Return the descriptor of the file that ``obj`` writes to; -1 for memory or a closed file."""
    try:
        used = attrgetter(path)(obj)
        if hasattr(used, "_extfileobj"):  # tarfile's stream
            used = used.fileobj
        number: int = used.fileno() if hasattr(used, "fileno") else used.fd
    except Exception:  # raised by a user's class
        return -1
    return number


def _text(path: Any) -> str:
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""


def _path(fd: int) -> str:
    """Return the path of an open file; "" if unknown."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _rejecting(
    is_kernels: Callable[[Any], bool], what: str, name_of: Callable[[Any], str]
) -> Callable[[Any], None]:
    """Return a function that raises an error if an object writes to a file of the kernel."""

    def reject_if_kernels(obj: Any) -> None:
        if is_kernels(obj):
            _raise(what, name_of(obj))

    return reject_if_kernels


def _leave_to_kernel(cls: Any, name: str, is_kernels: Callable[[Any], bool]) -> None:
    method = getattr(cls, name)

    @packages.replaces(cls, name)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_kernels(self):
            return method(self, *args, **kwargs)
        _abandoned.append(self)
        return None


class UnfinishedFileError(RuntimeError):
    """A worker tried to write to a file that the kernel keeps partly in memory."""


def _raise(what: str, path: str, *args: object, **kwargs: object) -> NoReturn:
    file = f"the {what} {path}" if path else f"the {what}"
    raise UnfinishedFileError(
        f"a worker can't write to {file}, which a cell has opened for writing, because the kernel holds part of the "
        "file in memory and will complete the file without the workers' data. Open one file per rank inside the "
        "function, or return the data and write it in the kernel"
    )


def _reject_hdf5(h5py: Any) -> None:
    """Make every change to an HDF5 file raise an error if the file is open in this process."""
    files, objects = h5py.h5f, h5py.h5o
    numbers = frozenset(
        objects.get_info(file).fileno
        for file in files.get_obj_ids(files.OBJ_ALL, files.OBJ_FILE)
        if file.get_intent() & files.ACC_RDWR and file.get_access_plist().get_driver() != h5py.h5fd.CORE
    )
    if not numbers:
        return

    def is_kernels(self: Any) -> bool:
        return objects.get_info(self._id).fileno in numbers

    def name_of(self: Any) -> str:
        return os.fsdecode(files.get_name(self._id))

    for module, name, methods in _HDF5_WRITES:
        cls = getattr(sys.modules[module], name)
        for method in methods:
            packages.call_before(cls, method, _rejecting(is_kernels, "HDF5 file", name_of))
