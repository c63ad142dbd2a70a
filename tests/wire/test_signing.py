"""Objects between ranks are read only with the job's signature."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from nblaunch.wire import signing

unpickled: list[str] = []


class Witness:
    """An object that leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled.append, ("this ran",)


def test_signed_values_load_unchanged() -> None:
    key = signing.new_key()
    assert signing.load(signing.dump({"a": [1, 2]}, key), key) == {"a": [1, 2]}
    assert signing.load(signing.dump("no key", b""), b"") == "no key"


@pytest.mark.parametrize("signature", [b"", b"\0" * 32, b"\0" * 40], ids=["none", "wrong", "longer"])
def test_unsigned_values_are_not_unpickled(signature: bytes) -> None:
    with pytest.raises(ValueError, match="does not carry the signature of this job"):
        signing.load(signature + pickle.dumps(Witness()), signing.new_key())
    assert unpickled == []


def test_foreign_or_changed_signatures_are_rejected() -> None:
    key = signing.new_key()
    signed = bytearray(signing.dump(Witness(), key))
    with pytest.raises(ValueError):
        signing.load(bytes(signed), signing.new_key())
    signed[-1] ^= 1
    with pytest.raises(ValueError):
        signing.load(bytes(signed), key)
    assert unpickled == []
