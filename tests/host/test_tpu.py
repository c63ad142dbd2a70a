"""Counting TPU chips and finding their users, on simulated hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.host import tpu


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read the folders of a simulated host, which are empty, in place of this machine's."""
    monkeypatch.setattr(tpu, "PCI_DEVICES", tmp_path / "devices")
    monkeypatch.setattr(tpu, "DEV", tmp_path / "dev")
    monkeypatch.setattr(tpu, "PROC", tmp_path / "proc")
    monkeypatch.setattr(tpu, "LOCK_FILE", tmp_path / "libtpu_lockfile")
    forget_readings()
    yield
    forget_readings()


def forget_readings() -> None:
    for reading in (tpu.chips, tpu.vfio_chips, tpu.device_files):
        reading.cache_clear()


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    """Create a PCI bus with a network card from Google and eight chips."""
    folder = tmp_path / "devices"
    devices = [("0x1ae0", "0x0042"), ("0x8086", "0x0063"), *[("0x1ae0", "0x0063")] * 8]
    for number, (vendor, device) in enumerate(devices):
        one = folder / f"0000:00:{number:02x}.0"
        one.mkdir(parents=True)
        (one / "vendor").write_text(vendor + "\n")
        (one / "device").write_text(device + "\n")
    return folder


def test_chips_are_counted_by_vendor_and_kind(pci: Path) -> None:
    assert tpu.chips() == {"v5e": 8}


def test_a_host_without_a_bus_has_no_chips() -> None:
    assert tpu.chips() == {}


def test_two_cores_per_chip_are_known(pci: Path) -> None:
    assert not tpu.has_two_cores(tpu.chips())
    (pci / "0000:00:02.0" / "device").write_text("0x0027")
    forget_readings()
    assert tpu.has_two_cores(tpu.chips())


def test_device_files_replace_a_hidden_bus(tmp_path: Path) -> None:
    def count(*, names_tpu: bool) -> int:
        forget_readings()
        return tpu.device_files(names_tpu)

    dev = tmp_path / "dev"
    assert count(names_tpu=True) == 0
    (dev / "vfio").mkdir(parents=True)
    for name in ("vfio/vfio", "vfio/0", "vfio/1"):
        (dev / name).touch()
    assert count(names_tpu=False) == 0, "VFIO groups may be of any device"
    assert count(names_tpu=True) == 2
    for name in ("accel0", "accel1", "accel2", "accelerometer"):
        (dev / name).touch()
    assert count(names_tpu=False) == 3


@pytest.mark.parametrize(
    ("num_workers", "num_chips", "can"),
    [(1, 8, True), (8, 8, True), (4, 4, True), (3, 8, False), (4, 8, False)],
)
def test_one_worker_or_one_per_chip(num_workers: int, num_chips: int, can: bool) -> None:
    assert tpu.can_drive(num_workers, num_chips) is can


def test_the_last_of_eight_workers() -> None:
    changes = tpu.topology_env(7, 8)
    assert changes["TPU_PROCESS_BOUNDS"] == "2,4,1"
    assert changes["TPU_PROCESS_ADDRESSES"] == ",".join(f"localhost:{port}" for port in range(8476, 8484))
    assert (changes["TPU_PROCESS_PORT"], changes["TPU_VISIBLE_CHIPS"], changes["CLOUD_TPU_TASK_ID"]) == (
        "8483",
        "7",
        "7",
    )
    assert changes["TPU_HOST_BOUNDS"] is None
    assert tpu.topology_env(7, 8, is_v7x=True)["TPU_PROCESS_BOUNDS"] == "2,2,1,2"


def test_only_living_lock_holder_is_found(tmp_path: Path) -> None:
    lock, proc = tmp_path / "libtpu_lockfile", tmp_path / "proc"
    lock.touch()
    (proc / "7" / "fd").mkdir(parents=True)
    (proc / "7" / "cmdline").write_bytes(b"python\0-m\0ipykernel\0")
    assert tpu.lock_holder() is None
    os.symlink(lock, proc / "7" / "fd" / "3")
    assert tpu.lock_holder() == 7
    assert tpu.command_of(7) == "python -m ipykernel"
    assert tpu.command_of(8) == "?"
    own = proc / str(os.getpid()) / "fd"
    own.mkdir(parents=True)
    os.unlink(proc / "7" / "fd" / "3")
    os.symlink(lock, own / "3")
    assert tpu.lock_holder() == os.getpid(), "a library of the kernel itself may have taken them"


def test_an_open_device_holds_the_chips_too(tmp_path: Path) -> None:
    (tmp_path / "proc" / "9" / "fd").mkdir(parents=True)
    os.symlink("/dev/accel3", tmp_path / "proc" / "9" / "fd" / "5")
    assert tpu.lock_holder() == 9


def test_the_lock_is_found_despite_closed_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, own = tmp_path / "libtpu_lockfile", tmp_path / "proc" / str(os.getpid()) / "fd"
    own.mkdir(parents=True)
    (own / "0").symlink_to("/dev/null")
    (own / "1").write_text("can't be read as a link, as the descriptor by which the folder itself was listed")
    (own / "2").symlink_to(lock)
    entries = sorted(own.iterdir())
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(entries))  # in the order of /proc
    assert tpu.lock_holder() == os.getpid()
