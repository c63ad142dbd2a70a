"""Variables on their way to the ranks of a session: pickled once, in a memory file that all of them read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nblaunch.errors import PayloadError
from nblaunch.wire import payload, pickle_errors
from nblaunch.wire.board import create_memory_file


@contextmanager
def saved_values(values: Mapping[str, Any]) -> Iterator[int]:
    """Yield the descriptor of a memory file with ``values``, pickled.

    Raises:
        PayloadError: one can't be pickled.
    """
    fd = create_memory_file("nblaunch-values")
    try:
        try:
            payload.dump(values, fd)
        except Exception as error:
            parts = [
                part
                for name, value in values.items()
                for part in pickle_errors.unpicklable_parts(value, name)
            ]
            named = "; ".join(f"{name} ({type(why).__name__}: {why})" for name, why in parts) or f"{error}"
            raise PayloadError(f"put() sends pickled values, and this can't be pickled: {named}") from error
        yield fd
    finally:
        os.close(fd)
