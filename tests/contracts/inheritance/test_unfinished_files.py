"""Files that the kernel keeps partly in memory: a worker's writes are rejected, and nothing is damaged."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.inheritance.contract import contract
from tests.kernels import Kernel

LAUNCH = "nblaunch.notebook_launcher(function, num_processes=2, start_method={!r}, dashboard='none')"

WRITERS = {
    "gzip": (
        "file = gzip.open(path, 'wb'); file.write(b'kernel ')",
        "file.write(b'rank ' * 1000)",
        "file.write(b'end'); file.close(); gzip.open(path).read()",
        b"kernel end",
    ),
    "text in gzip": (
        "file = gzip.open(path, 'wt'); file.write('kernel ')",
        "print('rank', file=file)",
        "file.write('end'); file.close(); gzip.open(path).read()",
        b"kernel end",
    ),
    "bz2": (
        "file = bz2.open(path, 'wb'); file.write(b'kernel ')",
        "file.write(b'rank')",
        "file.write(b'end'); file.close(); bz2.open(path).read()",
        b"kernel end",
    ),
    "lzma": (
        "file = lzma.open(path, 'wb'); file.write(b'kernel ')",
        "file.write(b'rank')",
        "file.write(b'end'); file.close(); lzma.open(path).read()",
        b"kernel end",
    ),
    "zip": (
        "file = zipfile.ZipFile(path, 'w'); file.writestr('kernel', 'k')",
        "file.writestr('rank', 'r')",
        "file.writestr('end', 'e'); file.close(); zipfile.ZipFile(path).namelist()",
        ["kernel", "end"],
    ),
    "member of a zip": (
        "file = zipfile.ZipFile(path, 'w'); member = file.open('all', 'w'); member.write(b'kernel ')",
        "member.write(b'rank')",
        "member.write(b'end'); member.close(); file.close(); zipfile.ZipFile(path).read('all')",
        b"kernel end",
    ),
    "tar in gzip": (
        "file = tarfile.open(path, 'w:gz'); file.addfile(tarfile.TarInfo('kernel'))",
        "file.addfile(tarfile.TarInfo('rank'))",
        "file.addfile(tarfile.TarInfo('end')); file.close(); tarfile.open(path).getnames()",
        ["kernel", "end"],
    ),
    "stream of tar in gzip": (
        "file = tarfile.open(path, 'w|gz'); file.addfile(tarfile.TarInfo('kernel'))",
        "file.addfile(tarfile.TarInfo('rank'))",
        "file.addfile(tarfile.TarInfo('end')); file.close(); tarfile.open(path).getnames()",
        ["kernel", "end"],
    ),
    "WAV": (
        "file = wave.open(path, 'wb'); file.setparams((1, 1, 8000, 0, 'NONE', '')); file.writeframes(bytes(10))",
        "file.writeframes(bytes(100))",
        "file.writeframes(bytes(5)); file.close(); wave.open(path).getnframes()",
        15,
    ),
    "HDF5": (
        "import h5py; file = h5py.File(path, 'w'); file['kernel'] = 1",
        "file['rank'] = 2",
        "file['end'] = 3; file.close(); sorted(h5py.File(path))",
        ["end", "kernel"],
    ),
    "data set of HDF5": (
        "import h5py; file = h5py.File(path, 'w'); data = file.create_dataset('data', (4,), dtype='i8')",
        "data[1] = 7",
        "data[0] = 1; file.close(); h5py.File(path)['data'][:].tolist()",
        [1, 0, 0, 0],
    ),
    "attribute of HDF5": (
        "import h5py; file = h5py.File(path, 'w')",
        "file.attrs['rank'] = 1",
        "file.close(); dict(h5py.File(path).attrs)",
        {},
    ),
    "Parquet": (
        "import pyarrow as pa, pyarrow.parquet as pq; table = pa.table({'a': [1]})\n"
        "file = pq.ParquetWriter(path, table.schema); file.write_table(table)",
        "file.write_table(table)",
        "file.write_table(table); file.close(); pq.read_table(path)['a'].to_pylist()",
        [1, 1],
    ),
    "Arrow": (
        "import pyarrow as pa; table = pa.table({'a': [1]})\n"
        "file = pa.ipc.new_file(path, table.schema); file.write_table(table)",
        "file.write_table(table)",
        "file.write_table(table); file.close(); pa.ipc.open_file(path).read_all()['a'].to_pylist()",
        [1, 1],
    ),
    "Arrow of datasets": (
        "import datasets; from datasets.arrow_writer import ArrowWriter\n"
        "file = ArrowWriter(path=path); file.write({'a': 1})",
        "file.write({'a': 2})",
        "file.finalize(); datasets.Dataset.from_file(path)['a'][:]",
        [1],
    ),
    "PDF": (
        "from matplotlib.figure import Figure; from matplotlib.backends.backend_pdf import PdfPages\n"
        "file = PdfPages(path); file.savefig(Figure())",
        "file.savefig(Figure())",
        "file.savefig(Figure()); file.close(); open(path, 'rb').read().count(b'/Type /Page ')",
        2,
    ),
    "lz4": (
        "import lz4.frame; file = lz4.frame.open(path, 'wb'); file.write(b'kernel ')",
        "file.write(b'rank')",
        "file.write(b'end'); file.close(); lz4.frame.open(path).read()",
        b"kernel end",
    ),
    "Excel by openpyxl": (
        "import openpyxl, pandas; path += '.xlsx'; file = pandas.ExcelWriter(path, engine='openpyxl')\n"
        "frame = pandas.DataFrame({'a': [1]}); frame.to_excel(file, sheet_name='kernel')",
        "frame.to_excel(file, sheet_name='rank')",
        "frame.to_excel(file, sheet_name='end'); file.close(); pandas.ExcelFile(path).sheet_names",
        ["kernel", "end"],
    ),
    "Excel by xlsxwriter": (
        "import openpyxl, xlsxwriter, pandas; path += '.xlsx'; file = pandas.ExcelWriter(path, engine='xlsxwriter')\n"
        "frame = pandas.DataFrame({'a': [1]}); frame.to_excel(file, sheet_name='kernel')",
        "frame.to_excel(file, sheet_name='rank')",
        "frame.to_excel(file, sheet_name='end'); file.close(); pandas.ExcelFile(path).sheet_names",
        ["kernel", "end"],
    ),
    "PyTables": (
        "import tables; file = tables.open_file(path, 'w')\n"
        "data = file.create_earray('/', 'a', tables.Int64Atom(), (0,)); data.append([1])",
        "data.append([7])",
        "data.append([2]); file.close(); tables.open_file(path).root.a[:].tolist()",
        [1, 2],
    ),
    "array of PyTables": (
        "import tables; file = tables.open_file(path, 'w'); data = file.create_array('/', 'a', [1, 1])",
        "data[0] = 7",
        "data[1] = 2; file.close(); tables.open_file(path).root.a[:]",
        [1, 2],
    ),
    "netCDF": (
        "import netCDF4; file = netCDF4.Dataset(path, 'w'); file.createDimension('x', 2)\n"
        "data = file.createVariable('v', 'i8', ('x',)); data[:] = 0",
        "data[1] = 7",
        "data[0] = 1; file.close(); netCDF4.Dataset(path)['v'][:].tolist()",
        [1, 0],
    ),
    "attribute of netCDF": (
        "import netCDF4; file = netCDF4.Dataset(path, 'w')",
        "file.title = 'rank'",
        "file.title = 'end'; file.close(); netCDF4.Dataset(path).title",
        "end",
    ),
    "video": (
        "import cv2, numpy; path += '.avi'; frame = numpy.zeros((64, 64, 3), 'u1')\n"
        "file = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*'MJPG'), 10, (64, 64)); file.write(frame)",
        "file.write(frame)",
        "file.write(frame); file.release(); video = cv2.VideoCapture(path); sum(video.read()[0] for _ in range(9))",
        2,
    ),
}  # fmt: skip
"""How a cell opens a file and writes to it; what a rank writes; how the kernel completes the file and reads it; what it
then holds. Rows that import a package which is not installed are left out."""

WITHOUT_NAMES = {"Arrow", "array of PyTables", "netCDF", "attribute of netCDF", "video"}
"""Kinds whose writers do not store the file's name."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with Kernel.start() as kernel:
        kernel.run("import bz2, gzip, lzma, os, tarfile, wave, zipfile, nblaunch")
        yield kernel


def is_installed(name: str) -> bool:
    imports = ast.walk(ast.parse(WRITERS[name][0]))
    names = [alias.name for part in imports if isinstance(part, ast.Import) for alias in part.names]
    return all(importlib.util.find_spec(name.partition(".")[0]) for name in names)


@pytest.mark.parametrize("name", list(filter(is_installed, WRITERS)))
def test_rank_writes_are_rejected_and_the_kernel_finishes(shared: Kernel, tmp_path: Path, name: str) -> None:
    opens, writes, completes, content = WRITERS[name]
    shared.run(f"path = {str(tmp_path / 'file')!r}\n{opens}\ndef function(): {writes}")
    error = shared.run(LAUNCH.format("fork"), raises="UnfinishedFileError").raised
    assert "which a cell has opened for writing" in error.value
    assert str(tmp_path / "file") in error.value or name in WITHOUT_NAMES
    last = completes.rpartition("; ")
    assert shared.run(f"{last[0]}\n{last[2]}").value == content


@contract("unfinished archives, compressed files and databases")
def test_a_database_of_the_kernel_is_not_written_by_ranks(
    shared: Kernel, tmp_path: Path, start_method: str
) -> None:
    shared.run(
        f"path = {str(tmp_path / 'database')!r}\n"
        "import dbm.dumb\n"
        "database = dbm.dumb.open(path, 'n')\n"
        "database['kernel'] = 'k'\n"
        "def function(): database['rank'] = 'r'\n"
        "def own():\n"
        "    import dbm.dumb, os\n"
        "    with dbm.dumb.open(path + os.environ['RANK'], 'n') as file:\n"
        "        file['rank'] = 'r'\n"
        "    return database['kernel'], len(dbm.dumb.open(path + os.environ['RANK']))"
    )
    error = shared.run(LAUNCH.format(start_method), raises="UnfinishedFileError").raised
    assert str(tmp_path / "database") in error.value
    assert shared.run(LAUNCH.format(start_method).replace("(function", "(own")).value == (b"k", 1)
    assert shared.run("database.close(); dbm.dumb.open(path).keys()").value == [b"kernel"]


@contract("unfinished archives, compressed files and databases")
def test_an_archive_is_not_sent(shared: Kernel, tmp_path: Path, start_method: str) -> None:
    shared.run(
        f"path = {str(tmp_path / 'archive')!r}\n"
        "archive = gzip.open(path, 'wb')\n"
        "def function(): [archive.write(b'rank') for _ in range(2)]"
    )
    if start_method == "fork":
        shared.run(LAUNCH.format(start_method), raises="UnfinishedFileError")
    else:
        error = shared.run(LAUNCH.format(start_method), raises="PayloadError").raised
        assert "archive" in error.value
    assert shared.run("archive.write(b'kernel'); archive.close(); gzip.open(path).read()").value == b"kernel"


def test_closing_in_a_rank_does_not_finish_the_file(shared: Kernel, tmp_path: Path) -> None:
    shared.run(
        f"folder = {str(tmp_path)!r}\n"
        "packed = gzip.open(f'{folder}/packed', 'wb'); packed.write(b'kernel ')\n"
        "dropped = gzip.open(f'{folder}/dropped', 'wt'); dropped.write('kernel ')\n"
        "archive = zipfile.ZipFile(f'{folder}/archive', 'w'); archive.writestr('kernel', 'k')\n"
        "tar = tarfile.open(f'{folder}/tar', 'w'); tar.addfile(tarfile.TarInfo('kernel'))\n"
        "stream = tarfile.open(f'{folder}/stream', 'w|gz'); stream.addfile(tarfile.TarInfo('kernel'))\n"
        "def function():\n"
        "    global dropped\n"
        "    dropped = None\n"
        "    if os.environ['RANK'] == '0': tar.addfile(tarfile.TarInfo('rank'))\n"
        "    for file in (packed, archive, tar, stream): file.close()\n"
        "    return archive.read('kernel')"
    )
    shared.run(
        f"{LAUNCH.format('fork')}\n"
        "packed.write(b'end'); dropped.write('end')\n"
        "archive.writestr('end', 'e'); tar.addfile(tarfile.TarInfo('end'))\n"
        "for file in (packed, dropped, archive, tar, stream): file.close()"
    )
    for name in ("packed", "dropped"):
        assert shared.run(f"gzip.open(f'{{folder}}/{name}').read()").value == b"kernel end"
    assert shared.run("zipfile.ZipFile(f'{folder}/archive').namelist()").value == ["kernel", "end"]
    assert shared.run("tarfile.open(f'{folder}/stream').getnames()").value == ["kernel"]
    assert shared.run("tarfile.open(f'{folder}/tar').getnames()").value == ["kernel", "rank", "end"]


def test_late_text_for_a_compressed_file_is_reported(shared: Kernel, tmp_path: Path) -> None:
    shared.run(
        "import csv\n"
        f"path = {str(tmp_path / 'rows')!r}\n"
        "file = gzip.open(path, 'wt'); rows = csv.writer(file); rows.writerow(['kernel'])\n"
        "def function(): rows.writerow(['rank'])"
    )
    cell = shared.run("nblaunch.notebook_launcher(function, num_processes=2)")
    assert f"warning: a worker can't write to the gzip file {tmp_path / 'rows'}" in cell.shown
    assert shared.run("file.close(); gzip.open(path).read()").value == b"kernel\r\n"


def test_rank_created_files_are_written(shared: Kernel, tmp_path: Path) -> None:
    shared.run(
        "import h5py, io\n"
        f"path = {str(tmp_path / 'file')!r}\n"
        "kernels = [gzip.open(path, 'wb'), zipfile.ZipFile(f'{path}.zip', 'w'), h5py.File(f'{path}.h5', 'w')]\n"
        "memory = io.BytesIO(); in_memory = gzip.GzipFile(fileobj=memory, mode='wb')\n"
        "def function():\n"
        "    own = path + os.environ['RANK']\n"
        "    with gzip.open(own, 'wb') as file: file.write(b'rank')\n"
        "    with zipfile.ZipFile(f'{own}.zip', 'w') as file: file.writestr('rank', 'r')\n"
        "    with h5py.File(f'{own}.h5', 'w') as file: file['rank'] = 1\n"
        "    in_memory.write(b'in memory'); in_memory.close()\n"
        "    names = zipfile.ZipFile(f'{own}.zip').namelist() + list(h5py.File(f'{own}.h5'))\n"
        "    return gzip.open(own).read(), names, gzip.decompress(memory.getvalue())"
    )
    assert shared.run(LAUNCH.format("fork")).value == (b"rank", ["rank", "rank"], b"in memory")
    shared.run("for file in kernels: file.close()")
