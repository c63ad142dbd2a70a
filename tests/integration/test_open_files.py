"""Files that a cell has opened and every rank reads: each byte is right, or the launch names what can't be sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.file_zoo import NUM_RECORDS, RECORD_BYTES
from tests.kernels import Kernel
from tests.thorough import thorough

OPEN_ALL = """
import importlib.util, multiprocessing, pathlib
from nblaunch import notebook_launcher
from tests.integration.file_zoo import SPECIMENS

opened = {{}}
for name, specimen in SPECIMENS.items():
    if not specimen.module or importlib.util.find_spec(specimen.module):
        folder = pathlib.Path({folder!r}, name)
        folder.mkdir()
        opened[name] = specimen.open(folder)
"""

READ_ALL = """
barrier = multiprocessing.get_context("fork").Barrier({num_ranks})

def read_all():
    wrong = {{}}
    for name, value in opened.items():
        barrier.wait()  # so that ranks do read at the same time
        wrong[name] = SPECIMENS[name].read(value)
    return {{name: count for name, count in wrong.items() if count}}

notebook_launcher(read_all, num_processes={num_ranks}, return_all=True, dashboard="none")
"""

SEND_EACH = """
def read(name, value):
    return SPECIMENS[name].read(value)

outcomes = {{}}
for name, value in opened.items():
    try:
        outcomes[name] = sum(
            notebook_launcher(read, (name, value), num_processes=2, start_method={start_method!r},
                              dashboard="none", return_all=True)
        )
    except Exception as error:
        outcomes[name] = type(error).__name__
outcomes
"""

RIGHT_IN_A_FRESH_PROCESS = {"numpy.memmap", "picture", "dbm"}
"""Kinds whose objects are pickled with their data, or with their file's name."""
ONLY_A_NUMBER = {"descriptor", "tar stream"}
"""Kinds whose pickle contains the number of a descriptor, which a fresh process does not have: the function fails."""


def test_forked_ranks_read_from_the_kernels_position(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(OPEN_ALL.format(folder=str(tmp_path)))
    for num_ranks in (
        2,
        4,
    ):  # the second launch begins at the same positions, because no rank has moved the kernel's
        assert kernel.run(READ_ALL.format(num_ranks=num_ranks)).value == [{}] * num_ranks


@pytest.mark.parametrize("start_method", ["forkserver", thorough("spawn")])
def test_fresh_processes_get_every_byte_or_an_error(
    kernel: Kernel, tmp_path: Path, start_method: str
) -> None:
    kernel.run(OPEN_ALL.format(folder=str(tmp_path)))
    outcomes = kernel.run(SEND_EACH.format(start_method=start_method)).value
    for name, outcome in outcomes.items():
        if name in RIGHT_IN_A_FRESH_PROCESS:
            assert outcome == 0, name
        elif name in ONLY_A_NUMBER:
            assert outcome != 0, name
        else:
            assert outcome == "PayloadError", name


def test_loader_processes_read_at_own_positions(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(
        "import pathlib, torch\n"
        "from nblaunch import notebook_launcher\n"
        "from tests.integration import file_zoo\n"
        f"file = file_zoo.open_plain(pathlib.Path({str(tmp_path)!r}))\n"
        "class Records(torch.utils.data.Dataset):\n"
        f"    def __len__(self): return {NUM_RECORDS}\n"
        "    def __getitem__(self, index):\n"
        f"        file.seek(index * {RECORD_BYTES})\n"
        f"        return int(file.read({RECORD_BYTES}) != file_zoo.record(index))\n"
        "def count_wrong():\n"
        "    loader = torch.utils.data.DataLoader(Records(), batch_size=50, shuffle=True, num_workers=2)\n"
        "    return sum(int(batch.sum()) for batch in loader)"
    )
    cell = kernel.run("notebook_launcher(count_wrong, num_processes=2, return_all=True, dashboard='none')")
    assert cell.value == [0, 0]
