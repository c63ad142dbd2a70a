"""Files of many kinds that a cell opens and every rank reads: how to create, open and read each kind.

A specimen is created once, in a folder. ``open`` returns the object that a cell holds at the launch; for files that are
read in order, it has read the first records. ``read`` counts the errors in a worker; all ranks read at the same time.
"""

from __future__ import annotations

import bz2
import csv
import dbm.dumb
import gzip
import io
import itertools
import json
import lzma
import mmap
import os
import pickle
import random
import sqlite3
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NUM_RECORDS = 4000
RECORD_BYTES = 64
NUM_PARTS = 60
NUM_BEGUN = 10
"""Number of records that the cell itself reads from files that are read in order."""


def record(index: int) -> bytes:
    """Return one record, whose every byte depends on its number."""
    return (b"%08d" % index) * (RECORD_BYTES // 8)


def part(index: int) -> bytes:
    """Return a larger piece, such as a member of an archive."""
    return record(index) * 150


@dataclass(frozen=True)
class Specimen:
    """One kind of file.

    Args:
        open: creates the file in a folder and opens it.
        read: returns the number of pieces that a worker reads wrongly.
        module: a module that it needs beyond the standard library and NumPy.
    """

    open: Callable[[Path], Any]
    read: Callable[[Any], int]
    module: str = ""


def shuffled(count: int) -> list[int]:
    """Return the numbers below ``count`` in a different order for each process."""
    numbers = list(range(count))
    random.Random(os.getpid()).shuffle(numbers)
    return numbers


# --- files of records ---------------------------------------------------------------------------------------------


def write_records(folder: Path) -> Path:
    path = folder / "records.bin"
    path.write_bytes(b"".join(map(record, range(NUM_RECORDS))))
    return path


def open_plain(folder: Path) -> Any:
    return write_records(folder).open("rb")


def open_unbuffered(folder: Path) -> Any:
    return write_records(folder).open("rb", buffering=0)


def open_for_update(folder: Path) -> Any:
    return write_records(folder).open("r+b")


def open_temporary(folder: Path) -> Any:
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
    file.write(write_records(folder).read_bytes())  # not flushed, because buffered data must arrive as well
    return file


def open_deleted(folder: Path) -> Any:
    path = write_records(folder)
    file = path.open("rb")
    path.unlink()
    return file


def read_records(file: Any) -> int:
    wrong = 0
    for index in shuffled(NUM_RECORDS):
        file.seek(index * RECORD_BYTES)
        wrong += file.read(RECORD_BYTES) != record(index)
    return wrong


def open_descriptor(folder: Path) -> int:
    return os.open(write_records(folder), os.O_RDONLY)


def read_descriptor(fd: int) -> int:
    wrong = 0
    for index in shuffled(NUM_RECORDS):
        os.lseek(fd, index * RECORD_BYTES, os.SEEK_SET)
        wrong += os.read(fd, RECORD_BYTES) != record(index)
    return wrong


def open_map(folder: Path) -> Any:
    with write_records(folder).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read_map(data: Any) -> int:
    return sum(
        data[index * RECORD_BYTES : (index + 1) * RECORD_BYTES] != record(index)
        for index in shuffled(NUM_RECORDS)
    )


def open_array_map(folder: Path) -> Any:
    return np.memmap(write_records(folder), dtype=np.uint8, mode="r").reshape(NUM_RECORDS, RECORD_BYTES)


def read_array_map(data: Any) -> int:
    return sum(data[index].tobytes() != record(index) for index in shuffled(NUM_RECORDS))


# --- files that are read in order ---------------------------------------------------------------------------------


def text_line(index: int) -> str:
    return f"{index},{index * index},{'é' * (index % 40)}\n"


def write_text(folder: Path) -> Path:
    path = folder / "lines.csv"
    path.write_text("".join(map(text_line, range(NUM_RECORDS))), encoding="utf-8")
    return path


def begun(lines: Any) -> Any:
    for _ in range(NUM_BEGUN):
        next(lines)
    return lines


def open_text(folder: Path) -> Any:
    return begun(write_text(folder).open(encoding="utf-8"))


def read_text(file: Any) -> int:
    return count_differences(file, map(text_line, range(NUM_BEGUN, NUM_RECORDS)))


def open_csv(folder: Path) -> Any:
    return begun(csv.reader(write_text(folder).open(encoding="utf-8", newline="")))


def read_csv(rows: Any) -> int:
    wanted = (text_line(index).rstrip("\n").split(",") for index in range(NUM_BEGUN, NUM_RECORDS))
    return count_differences(rows, wanted)


def open_frames(folder: Path) -> Any:
    import pandas

    frames = pandas.read_csv(write_text(folder), header=None, chunksize=NUM_BEGUN)
    next(frames)
    return frames


def read_frames(frames: Any) -> int:
    numbers = (number for frame in frames for number in frame[0].tolist())
    return count_differences(numbers, range(NUM_BEGUN, NUM_RECORDS))


def open_compressed(module: Any) -> Callable[[Path], Any]:
    def open_it(folder: Path) -> Any:
        path = folder / f"lines.{module.__name__}"
        with module.open(path, "wt", encoding="utf-8") as file:
            file.writelines(map(text_line, range(NUM_RECORDS)))
        return begun(module.open(path, "rt", encoding="utf-8"))

    return open_it


def open_pickles(folder: Path) -> Any:
    path = folder / "stream.pickle"
    with path.open("wb") as file:
        for index in range(NUM_RECORDS):
            pickle.dump(text_line(index), file)
    file = path.open("rb")
    for _ in range(NUM_BEGUN):
        pickle.load(file)
    return file


def read_pickles(file: Any) -> int:
    read = (pickle.load(file) for _ in range(NUM_BEGUN, NUM_RECORDS))
    return count_differences(read, map(text_line, range(NUM_BEGUN, NUM_RECORDS)))


def open_zstandard(folder: Path) -> Any:
    import zstandard

    path = folder / "lines.zst"
    text = "".join(map(text_line, range(NUM_RECORDS))).encode()
    path.write_bytes(zstandard.ZstdCompressor().compress(text))
    stream = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_size=1000)
    return begun(io.TextIOWrapper(stream, encoding="utf-8"))


def count_differences(read: Any, wanted: Any) -> int:
    """Return the number of differing items, including missing and surplus items."""
    missing = object()
    read, wanted = iter(read), iter(wanted)
    wrong = 0
    while True:
        try:
            item = next(read, missing)
        except Exception:  # the data is damaged, so nothing more can be read
            return wrong + 1 + sum(1 for _ in wanted)
        other = next(wanted, missing)
        if item is missing and other is missing:
            return wrong
        wrong += item != other


# --- archives and tables ------------------------------------------------------------------------------------------


def open_npz(folder: Path) -> Any:
    arrays = {str(index): np.frombuffer(part(index), np.uint8) for index in range(NUM_PARTS)}
    np.savez(folder / "arrays.npz", **arrays)
    return np.load(folder / "arrays.npz")


def read_npz(arrays: Any) -> int:
    return count_failures(lambda index: arrays[str(index)].tobytes())


def open_zip(folder: Path) -> Any:
    with zipfile.ZipFile(folder / "parts.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for index in range(NUM_PARTS):
            archive.writestr(str(index), part(index))
    return zipfile.ZipFile(folder / "parts.zip")


def write_tar(folder: Path) -> Path:
    path = folder / "parts.tar"
    with tarfile.open(path, "w") as archive:
        for index in range(NUM_PARTS):
            member = tarfile.TarInfo(f"{index:04d}.bin")
            member.size = len(part(index))
            archive.addfile(member, io.BytesIO(part(index)))
    return path


def open_tar(folder: Path) -> Any:
    return tarfile.open(write_tar(folder))


def read_tar(archive: Any) -> int:
    return count_failures(lambda index: archive.extractfile(f"{index:04d}.bin").read())


def open_tar_stream(folder: Path) -> Any:
    return begun_members(tarfile.open(write_tar(folder), "r|"))


def begun_members(archive: Any) -> Any:
    for _ in range(NUM_BEGUN):
        member = archive.next()
        assert archive.extractfile(member).read() == part(int(member.name[:4]))
    return archive


def read_tar_stream(archive: Any) -> int:
    def read() -> Iterator[bytes]:
        while (member := archive.next()) is not None:
            yield archive.extractfile(member).read()

    return count_differences(read(), map(part, range(NUM_BEGUN, NUM_PARTS)))


def count_failures(read: Callable[[int], bytes]) -> int:
    wrong = 0
    for index in shuffled(NUM_PARTS) * 3:
        try:
            wrong += read(index) != part(index)
        except Exception:
            wrong += 1
    return wrong


def open_hdf5(folder: Path) -> Any:
    import h5py

    with h5py.File(folder / "parts.h5", "w") as file:
        for index in range(NUM_PARTS):
            file[str(index)] = np.frombuffer(part(index), np.uint8)
    return h5py.File(folder / "parts.h5")


def open_hdf5_chunks(folder: Path) -> Any:
    import h5py

    data = np.frombuffer(b"".join(map(part, range(NUM_PARTS))), np.uint8).reshape(NUM_PARTS, -1)
    with h5py.File(folder / "chunks.h5", "w") as file:
        file.create_dataset("all", data=data, chunks=(1, data.shape[1]), compression="gzip")
    return h5py.File(folder / "chunks.h5", "r+")


def open_parquet(folder: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"part": [part(index) for index in range(NUM_PARTS)]})
    pyarrow.parquet.write_table(table, folder / "parts.parquet", row_group_size=1)
    return pyarrow.parquet.ParquetFile((folder / "parts.parquet").open("rb"))


def read_parquet(file: Any) -> int:
    return count_failures(lambda index: file.read_row_group(index, use_threads=False)["part"][0].as_py())


def open_picture(folder: Path) -> Any:
    from PIL import Image

    shape = (NUM_PARTS, len(part(0)))
    pixels = np.frombuffer(b"".join(map(part, range(NUM_PARTS))), np.uint8).reshape(shape)
    Image.fromarray(pixels).save(folder / "parts.png")
    return Image.open(folder / "parts.png")  # reads the pixels when they are first used


def read_picture(picture: Any) -> int:
    try:
        pixels = np.asarray(picture)
    except Exception:
        return NUM_PARTS
    return count_failures(lambda index: pixels[index].tobytes())


def open_database(folder: Path) -> Any:
    database = sqlite3.connect(folder / "parts.sqlite")
    with database:
        database.execute("create table parts (number integer primary key, body blob)")
        database.executemany(
            "insert into parts values (?, ?)", ((index, part(index)) for index in range(NUM_PARTS))
        )
    return database


def read_database(database: Any) -> int:
    query = "select body from parts where number = ?"
    return count_failures(lambda index: database.execute(query, (index,)).fetchone()[0])


def open_lmdb(folder: Path) -> Any:
    import lmdb

    environment = lmdb.open(str(folder / "parts.lmdb"), map_size=1 << 24)
    with environment.begin(write=True) as transaction:
        for index in range(NUM_PARTS):
            transaction.put(str(index).encode(), part(index))
    environment.close()
    return lmdb.open(str(folder / "parts.lmdb"), readonly=True, lock=False)


def read_lmdb(environment: Any) -> int:
    def read(index: int) -> bytes:
        with environment.begin() as transaction:
            return transaction.get(str(index).encode())

    return count_failures(read)


def open_tensors(folder: Path) -> Any:
    import safetensors
    from safetensors.numpy import save_file

    save_file(
        {str(index): np.frombuffer(part(index), np.uint8) for index in range(NUM_PARTS)},
        folder / "parts.safetensors",
    )
    return safetensors.safe_open(folder / "parts.safetensors", framework="np")


def open_dbm(folder: Path) -> Any:
    database = dbm.dumb.open(str(folder / "parts"), "n")  # noqa: SIM115
    for index in range(NUM_PARTS):
        database[str(index)] = part(index)
    database.sync()
    return database


def open_index(folder: Path) -> Any:
    """Open JSON lines with an index of their positions, as datasets of lines do."""
    path = folder / "lines.jsonl"
    lines = [
        json.dumps({"n": index, "text": text_line(index)}).encode() + b"\n" for index in range(NUM_RECORDS)
    ]
    path.write_bytes(b"".join(lines))
    return path.open("rb"), [0, *itertools.accumulate(map(len, lines))]


def read_index(opened: Any) -> int:
    file, starts = opened
    wrong = 0
    for index in shuffled(NUM_RECORDS):
        file.seek(starts[index])
        try:
            wrong += json.loads(file.readline()) != {"n": index, "text": text_line(index)}
        except ValueError:
            wrong += 1
    return wrong


def open_folder(folder: Path) -> Any:
    listed = folder / "listed"
    listed.mkdir(exist_ok=True)
    for index in range(NUM_PARTS):
        (listed / str(index)).touch()
    entries = os.scandir(listed)
    return {next(entries).name for _ in range(NUM_BEGUN)}, entries


def read_folder(opened: Any) -> int:
    begun_names, entries = opened
    names = begun_names | {entry.name for entry in entries}
    return len(names ^ {str(index) for index in range(NUM_PARTS)})


SPECIMENS = {
    "plain": Specimen(open_plain, read_records),
    "unbuffered": Specimen(open_unbuffered, read_records),
    "for update": Specimen(open_for_update, read_records),
    "temporary": Specimen(open_temporary, read_records),
    "deleted": Specimen(open_deleted, read_records),
    "descriptor": Specimen(open_descriptor, read_descriptor),
    "index of lines": Specimen(open_index, read_index),
    "map": Specimen(open_map, read_map),
    "numpy.memmap": Specimen(open_array_map, read_array_map),
    "text": Specimen(open_text, read_text),
    "csv": Specimen(open_csv, read_csv),
    "pandas in chunks": Specimen(open_frames, read_frames, "pandas"),
    "gzip": Specimen(open_compressed(gzip), read_text),
    "bz2": Specimen(open_compressed(bz2), read_text),
    "lzma": Specimen(open_compressed(lzma), read_text),
    "zstandard": Specimen(open_zstandard, read_text, "zstandard"),
    "pickles": Specimen(open_pickles, read_pickles),
    "npz": Specimen(open_npz, read_npz),
    "zip": Specimen(open_zip, lambda file: count_failures(lambda index: file.read(str(index)))),
    "tar": Specimen(open_tar, read_tar),
    "tar stream": Specimen(open_tar_stream, read_tar_stream),
    "hdf5": Specimen(
        open_hdf5, lambda file: count_failures(lambda index: file[str(index)][:].tobytes()), "h5py"
    ),
    "hdf5 in chunks": Specimen(
        open_hdf5_chunks, lambda file: count_failures(lambda index: file["all"][index].tobytes()), "h5py"
    ),
    "parquet": Specimen(open_parquet, read_parquet, "pyarrow"),
    "picture": Specimen(open_picture, read_picture, "PIL"),
    "sqlite": Specimen(open_database, read_database),
    "lmdb": Specimen(open_lmdb, read_lmdb, "lmdb"),
    "safetensors": Specimen(
        open_tensors,
        lambda file: count_failures(lambda index: file.get_tensor(str(index)).tobytes()),
        "safetensors",
    ),
    "dbm": Specimen(open_dbm, lambda file: count_failures(lambda index: file[str(index)])),
    "folder": Specimen(open_folder, read_folder),
}
