"""Objects between ranks: read only under the seal of the job."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from nblaunch.wire import sealing

unpickled: list[str] = []


class Witness:
    """A pickle of it leaves a trace where it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled.append, ("this ran",)


def test_what_is_sealed_comes_back() -> None:
    key = sealing.new_key()
    assert sealing.load(sealing.dump({"a": [1, 2]}, key), key) == {"a": [1, 2]}
    assert sealing.load(sealing.dump("no key", b""), b"") == "no key"


@pytest.mark.parametrize("seal", [b"", b"\0" * 32, b"\0" * 40], ids=["none", "wrong", "longer"])
def test_what_is_not_sealed_is_not_read(seal: bytes) -> None:
    with pytest.raises(ValueError, match="does not carry the seal of this job"):
        sealing.load(seal + pickle.dumps(Witness()), sealing.new_key())
    assert unpickled == []


def test_what_is_sealed_by_another_job_or_changed_on_its_way_is_not_read() -> None:
    key = sealing.new_key()
    sealed = bytearray(sealing.dump(Witness(), key))
    with pytest.raises(ValueError):
        sealing.load(bytes(sealed), sealing.new_key())
    sealed[-1] ^= 1
    with pytest.raises(ValueError):
        sealing.load(bytes(sealed), key)
    assert unpickled == []
