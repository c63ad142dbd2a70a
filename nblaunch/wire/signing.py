"""Pickles that cross a socket between ranks carry a signature, by a key that only the job's own processes have.

    launcher ── key: in the memory that workers inherit, never in a file, a variable or on a store ──> workers
    rank 0   ── signature + pickle ──> process group ──> rank 1: the signature first, the pickle only if that is right

Workers find each other through a store on a loopback port, which every user of the machine can reach. Without a
signature, a process that put itself in a rank's place there could have any code run by the others.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
from typing import Any

_DIGEST = "sha256"
_SIGNATURE_BYTES = 32


def new_key() -> bytes:
    """Return a key for one job."""
    return secrets.token_bytes(_SIGNATURE_BYTES)


def dump(value: Any, key: bytes) -> bytes:
    """Pickle ``value`` behind its signature; without a key (b"") the pickle alone."""
    body = pickle.dumps(value)
    return hmac.digest(key, body, _DIGEST) + body if key else body


def load(signed: bytes, key: bytes) -> Any:
    """Load what :func:`dump` wrote.

    Raises:
        ValueError: it does not carry the signature of this job. Nothing of it was unpickled.
    """
    if key:
        signature, signed = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, hmac.digest(key, signed, _DIGEST)):
            raise ValueError(
                "an object that arrived from another rank does not carry the signature of this job, and was not read: "
                "another process has put itself in that rank's place, or the bytes were changed on their way"
            )
    return pickle.loads(signed)
