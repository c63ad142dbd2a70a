"""The topology of TPU workers, compared with torch_xla's own functions on simulated metadata.

No TPU is needed: ``configure_topology`` only reads metadata and sets variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch_xla
from torch_xla._internal import tpu

from nblaunch import env
from nblaunch.host import tpu as tpu_host

# kind -> chips, and the metadata's processes and chips per process
HOSTS = {
    "v5litepod-8": (8, "1,1,1", "2,4,1"),
    "v6e-8": (8, "1,1,1", "2,4,1"),
    "v5litepod-4": (4, "1,1,1", "2,2,1"),
    "v4-8": (4, "1,1,1", "2,2,1"),
    "v5p-8": (4, "1,1,1", "2,2,1"),
}
LEFT_OVER = {
    "nothing": {},
    "bounds of one process": {"TPU_PROCESS_BOUNDS": "1,1,1"},
    "both bounds": {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,4,1"},
    "addresses": {"TPU_PROCESS_ADDRESSES": "local"},
    "old names": {"TPU_HOST_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"},
    "another worker's": {"CLOUD_TPU_TASK_ID": "5", "TPU_VISIBLE_CHIPS": "5", "TPU_PROCESS_PORT": "9999"},
    "a rank": {"PJRT_LOCAL_PROCESS_RANK": "5", "PJRT_LOCAL_PROCESS_COUNT": "6"},
}
SET_BY_TORCH_XLA = (
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_PROCESS_BOUNDS",
    "CLOUD_TPU_TASK_ID",
    "TPU_PROCESS_ADDRESSES",
    "TPU_VISIBLE_CHIPS",
    "TPU_PROCESS_PORT",
)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Restore the environment after each test."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if "TPU" in name]:
            del os.environ[name]
        yield
    assert not torch_xla._XLAC._xla_runtime_is_initialized()


def metadata(kind: str) -> mock._patch:
    _, processes, chips = HOSTS[kind]
    text = (
        f"ACCELERATOR_TYPE: '{kind}'\nTPU_PROCESS_BOUNDS: '{processes}'\n"
        f"TPU_CHIPS_PER_PROCESS_BOUNDS: '{chips}'\nWORKER_ID: '0'\n"
    )
    answers = {"tpu-env": text, "worker-network-endpoints": "h:0:10.0.0.2"}
    return mock.patch.object(tpu, "_get_metadata", answers.__getitem__)


def configured(kind: str, rank: int) -> dict[str, str | None]:
    """Return the variables after torch_xla has completed the environment."""
    with metadata(kind):
        tpu.configure_topology(rank, HOSTS[kind][0])
    return {name: os.environ.get(name) for name in SET_BY_TORCH_XLA}


@pytest.mark.parametrize("left_over", LEFT_OVER)
@pytest.mark.parametrize("kind", HOSTS)
def test_leftover_variables_are_overridden(kind: str, left_over: str) -> None:
    num_chips = HOSTS[kind][0]
    with mock.patch.dict(os.environ):
        expected = configured(kind, num_chips - 1)
    os.environ.update(LEFT_OVER[left_over])
    env.apply(tpu_host.topology_env(num_chips - 1, num_chips))
    assert configured(kind, num_chips - 1) == expected


def test_leftover_variables_still_exist() -> None:
    """Without nblaunch's clearing, torch_xla 2.9 keeps existing variables. If this test fails, the clearing can be
    removed.
    """
    os.environ["TPU_PROCESS_BOUNDS"] = "1,1,1"
    with mock.patch.object(tpu, "num_available_chips", return_value=8):
        assert tpu.num_local_processes() == 1, "one worker for eight chips"
    os.environ["TPU_PROCESS_ADDRESSES"] = "local"
    found = configured("v5litepod-8", 7)
    assert (found["TPU_PROCESS_BOUNDS"], found["TPU_PROCESS_ADDRESSES"]) == ("1,1,1", "local")


def test_all_torch_xla_chips_are_known() -> None:
    newer = set() if torch_xla.__version__ >= "2.9" else {"0x0076"}  # torch_xla 2.8 does not know v7x
    assert set(tpu_host._CHIPS) - newer == set(tpu._TPU_PCI_DEVICE_IDS)
    assert tpu._GOOGLE_PCI_VENDOR_ID == tpu_host._GOOGLE
