"""A guard against false alarms: checks must find nothing in a test's training loop, unless the test says what.

    @pytest.mark.alarms("gradients_not_cleared")
    def test_...                                  # may cause this alarm, and fails with any other

An alarm is a warning of a check, a hint, or a note about a hang or slow steps. Jobs log it (``nblaunch.notes``), in the
process of the tests and in kernels. Ranks without a launcher (``training/ranks.py``) send their observations instead.
The guard covers the tests in ``_GUARDED``; ``tests/notebooks`` looks at the outputs of its notebooks.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

import pytest

from nblaunch.diagnosis.silent_errors import SilentErrors
from nblaunch.events import Event, Note, Observation

_GUARDED = (
    "tests/integration/",
    "tests/progress/",
    "tests/session/",
    "tests/training/",
    "tests/test_weights.py",
)
_NAMES = re.compile(r"NBLAUNCH_CHECKS=-(\w+)|^\d+ hints? about the training loop \((.*?)\)")
_KINDS = {"slow": "slow_steps", "hang": "hang"}
_ABOUT_MACHINE = re.compile(r"\bcores?\b|control group|virtual machine")
"""Slow steps whose cause is the machine's load: true where tests run side by side."""

_END = "\0"

# Kernels run this; they import neither pytest nor this module.
_HANDLER = f"""
import logging

class FileHandler(logging.Handler):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def emit(self, record):
        try:
            with open(self.path, "a") as file:  # a descriptor that stays open would be a finding of other tests
                file.write(f"{{record.kind}} {{record.getMessage()}}" + {_END!r})
        except OSError:
            pass

logging.getLogger("nblaunch.notes").addHandler(FileHandler(PATH))
"""

_path: Path | None = None


def begin() -> None:
    """Make the file to which the kernels of this test process write their notes."""
    global _path
    file, name = tempfile.mkstemp(prefix="nblaunch-alarms-")
    os.close(file)
    _path = Path(name)


def end() -> None:
    """Remove the file."""
    if _path is not None:
        _path.unlink(missing_ok=True)


def handler_source() -> str:
    """Return code for a kernel whose jobs' notes count; none outside pytest, as in a lottery."""
    if _path is None:
        return ""
    return f"exec({f'PATH = {str(_path)!r}{_HANDLER}'!r}, {{}})"


def judge(observations: list[Observation], num_ranks: int) -> None:
    """Compare the observations of ranks without a launcher, as a launcher would."""
    errors = SilentErrors(range(num_ranks), _log)
    for observation in observations:
        errors.receive(observation)
    errors.end()


def _log(event: Event) -> None:
    if isinstance(event, Note):
        logging.getLogger("nblaunch.notes").warning("%s", event.text, extra={"kind": event.kind})


@pytest.fixture(autouse=True)
def no_false_alarms(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that causes an alarm that it has not declared."""
    if not request.node.nodeid.startswith(_GUARDED):
        yield
        return
    declared = {name for marker in request.node.iter_markers("alarms") for name in marker.args}
    with noted() as notes:
        yield
    if found := undeclared(notes, declared):
        pytest.fail("alarms of checks:\n" + "\n".join(found), pytrace=False)


@contextmanager
def noted() -> Iterator[list[tuple[str, str]]]:
    """Collect the notes of this process and of its kernels, as kind and text; complete after the block."""
    notes: list[tuple[str, str]] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append((getattr(record, "kind", "note"), record.getMessage()))

    logger, collector = logging.getLogger("nblaunch.notes"), Collector()
    assert _path is not None, "begin() comes first"
    at = _path.stat().st_size
    logger.addHandler(collector)
    try:
        yield notes
    finally:
        logger.removeHandler(collector)
        written = _path.read_bytes()[at:].decode(errors="replace").split(_END)[:-1]
        notes += [(kind, text) for kind, _, text in (note.partition(" ") for note in written)]


def undeclared(notes: Iterable[tuple[str, str]], declared: AbstractSet[str] = frozenset()) -> list[str]:
    """Return the alarms in ``notes`` that are not among the declared ones, each with its names."""
    named = ((_names(kind, text) - declared, text) for kind, text in notes)
    return [f"{', '.join(sorted(names))}: {text}" for names, text in named if names]


def _names(kind: str, text: str) -> set[str]:
    """Return the names of the alarms in a note."""
    is_alarm = kind in _KINDS and not (kind == "slow" and _ABOUT_MACHINE.search(text))
    names = {_KINDS[kind]} if is_alarm else set()
    for check, hints in _NAMES.findall(text):
        names |= set(hints.split(", ")) if hints else {check}
    return names
