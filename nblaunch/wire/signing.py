"""Signatures for pickles that other processes could replace, made with a key that only nblaunch's processes have.

Between ranks:

    launcher ── key: in memory that workers inherit, never in a file, a variable or a store ──> workers
    rank 0   ── signature + pickle ──> process group ──> rank 1: checks the signature, then reads the pickle

Workers find each other through a store on a loopback port, which every user on the machine can reach. Without
signatures, a process that took a rank's place in the store could make the other ranks run arbitrary code.

Files of a detached job are signed with the user's key (``detached/folder.py``), with :func:`seal` and :func:`unseal`.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
from typing import Any

_DIGEST = "sha256"
SIGNATURE_BYTES = 32


def new_key() -> bytes:
    """Return a new key for one job."""
    return secrets.token_bytes(SIGNATURE_BYTES)


def dump(value: Any, key: bytes) -> bytes:
    """Return the signature of the pickled ``value``, then the pickle; without a key (b""), only the pickle."""
    return seal(pickle.dumps(value), key)


def load(signed: bytes, key: bytes) -> Any:
    """Load an object from the output of :func:`dump`.

    Raises:
        ValueError: it does not carry this job's signature; nothing was unpickled.
    """
    try:
        body = unseal(signed, key)
    except ValueError:
        raise ValueError(
            "an object that arrived from another rank does not carry the signature of this job, so it was not "
            "read. Another process took that rank's place, or the bytes changed in transit"
        ) from None
    return pickle.loads(body)


def seal(body: bytes, key: bytes) -> bytes:
    """Return the signature of ``body`` followed by ``body``; without a key (b""), return only ``body``."""
    return digest(key, body) + body if key else body


def unseal(sealed: bytes, key: bytes) -> bytes:
    """Return the body that :func:`seal` received.

    Raises:
        ValueError: it was not signed with this key.
    """
    if not key:
        return sealed
    body = sealed[SIGNATURE_BYTES:]
    check(sealed[:SIGNATURE_BYTES], key, body)
    return body


def digest(key: bytes, *parts: bytes | memoryview) -> bytes:
    """Return the signature of the concatenated ``parts``."""
    signer = hmac.new(key, digestmod=_DIGEST)
    for part in parts:
        signer.update(part)
    return signer.digest()


def check(signature: bytes, key: bytes, *parts: bytes | memoryview) -> None:
    """Check the signature of ``parts``.

    Raises:
        ValueError: the signature is wrong.
    """
    if not hmac.compare_digest(signature, digest(key, *parts)):
        raise ValueError("the bytes are not signed with this key")
