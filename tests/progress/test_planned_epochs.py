"""The number of epochs that a training function will run, read from its ``for`` loops with certainty, or not at all."""

from __future__ import annotations

import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nblaunch.progress.planned_epochs import iterations_left, places_around

# Remaining epochs of each loop, including the one that begins; `note()` marks where a loader is read.
KNOWN: dict[str, tuple[str, list[int]]] = {
    "range": ("for epoch in range(3):\n    note()", [3, 2, 1]),
    "many rounds": ("for step in range(10_000_000_000):\n    note()\n    break", [10_000_000_000]),
    "a variable": ("n = 2\nfor epoch in range(n):\n    note()", [2, 1]),
    "from one": ("for epoch in range(1, 3 + 1):\n    note()", [3, 2, 1]),
    "backwards": ("for left in range(2, 0, -1):\n    note()", [2, 1]),
    "an underscore": ("for _ in range(2):\n    note()", [2, 1]),
    "settings": ("for epoch in range(settings.epochs):\n    note()", [2, 1]),
    "a dict": ("config = {'epochs': 2}\nfor epoch in range(config['epochs']):\n    note()", [2, 1]),
    "a bar": ("for epoch in tqdm(range(2)):\n    note()", [2, 1]),
    "trange": ("for epoch in trange(2):\n    note()", [2, 1]),
    "enumerate": ("for number, rate in enumerate([0.1, 0.2]):\n    note()", [2, 1]),
    "a list": ("for rate in [0.1, 0.2]:\n    note()", [2, 1]),
    "folds": ("for fold in range(2):\n    for epoch in range(2):\n        note()", [4, 3, 2, 1]),
    "one epoch": ("note()", [1]),
    "another function": (
        "def an_epoch(epoch):\n    note()\nfor epoch in range(2):\n    an_epoch(epoch)",
        [2, 1],
    ),
    "after a warm-up": (
        "for step in range(5):\n    warm.step()\nfor epoch in range(2):\n    note()",
        [2, 1],
    ),
    "in a block": ("for epoch in range(2):\n    with block():\n        if True:\n            note()", [2, 1]),
    "read twice": ("for _ in note() or 'ab':\n    pass\nfor _ in note() or 'ab':\n    pass", [0, 1]),
    "a comprehension": ("for epoch in range(2):\n    losses = [note() for _ in '1']", [2, 1]),
}
UNKNOWN = {
    "while": "n = 0\nwhile n < 2:\n    n += 1\n    note()",
    "an iterator": "for epoch in iter([1, 2]):\n    note()",
    "count": "for epoch in count():\n    note()\n    if epoch: break",
    "a counter that the body changes": "for epoch in range(4):\n    epoch += 1\n    note()",
    "equal items": "for rate in [0.1, 0.1]:\n    note()",
    "another training follows": "for epoch in range(2):\n    note()\nfor epoch in range(3):\n    loss.backward()",
    "a range of its own": "range = lambda n: [7, 8]\nfor epoch in range(1):\n    note()",
    "a property": "for epoch in range(settings.computed):\n    note()",
    "a comprehension of epochs": "def an_epoch(e):\n    note()\n[an_epoch(e) for e in range(2)]",
}


class Settings:
    epochs = 2
    num_computed = 0

    @property
    def computed(self) -> int:
        Settings.num_computed += 1
        return 2


class Anything:
    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, *args: object) -> None:
        """Leave the block."""


def run(body: str) -> list[int]:
    """Run ``body`` as a function of a cell; return the remaining epochs at each call of ``note``."""
    seen: list[int] = []

    def note() -> None:
        seen.append(iterations_left(places_around(sys._getframe(1))))

    def counted() -> Iterator[int]:
        yield from (0, 1)

    source = "def train():\n" + textwrap.indent(body, "    ")
    name = f"<cell {abs(hash(body))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    library = eval(
        compile("lambda items: range(items) if isinstance(items, int) else items", bar_file(), "eval")
    )
    names: dict[str, Any] = {
        "note": note, "settings": Settings(), "tqdm": library, "trange": library, "count": counted,
        "block": Anything, "warm": Anything(), "loss": Anything(),
    }  # fmt: skip
    exec(compile(source, name, "exec"), names)
    call(names["train"])
    return seen


def bar_file() -> str:
    """Write the file of a library's bar."""
    return "/usr/lib/python3/site-packages/tqdm/std.py"


# The frame that calls the user's function in a worker: frames above it are not the user's.
_CALLER: dict[str, Any] = {"__name__": "nblaunch.worker.bootstrap"}
exec(compile("def call(function):\n    function()", linecache.__file__, "exec"), _CALLER)
call: Callable[[Any], None] = _CALLER["call"]


@pytest.mark.parametrize("name", KNOWN)
def test_planned_epochs_are_read_from_the_loop(name: str) -> None:
    body, left = KNOWN[name]
    assert run(body) == left


@pytest.mark.parametrize("name", UNKNOWN)
def test_unreadable_loops_plan_no_epochs(name: str) -> None:
    assert set(run(UNKNOWN[name])) == {0}


def test_no_code_of_the_user_runs() -> None:
    before = Settings.num_computed
    run(UNKNOWN["a property"])
    assert Settings.num_computed == before + 1  # the loop itself iterates
