"""The user's line is named right, whatever called the hook before."""

from __future__ import annotations

import _thread
import threading
from types import CodeType
from typing import Any

import pytest

from nblaunch.worker.user_lines import UserLine, UserLines

LIBRARY = "/usr/lib/python3/site-packages/library/{}.py"


def _site(line: UserLine, key: object) -> tuple[str, str, int]:
    return line.name, line.filename, line.line


class Program:
    """Functions of the user and of libraries, which call a hook.

    Args:
        compared: as for a quick finder; None: another finder.
        texts: name of a file -> its code. Files in capitals belong to a library.
    """

    def __init__(self, compared: int | None = None, **texts: str) -> None:
        lines = UserLines((__file__,))
        self._find = lines.finder(_site, 2) if compared is None else lines.quick_finder(_site, 2, compared)
        self.names: dict[str, Any] = {"hook": self._hook}
        for name, text in texts.items():
            self.add(name, text)

    def add(self, name: str, text: str) -> CodeType:
        code = compile(text, LIBRARY.format(name) if name.isupper() else name, "exec")
        exec(code, self.names)
        return code

    def _hook(self) -> tuple[str, str, int]:
        return self._find(())

    def __call__(self, expression: str) -> tuple[str, str, int]:
        """Return what the hook finds: the second time that the expression is evaluated, and the first time."""
        results = {eval(expression, self.names) for _ in range(3)}
        assert len(results) == 1, results
        return results.pop()


@pytest.fixture(params=[None, -1])
def program(request: pytest.FixtureRequest) -> Program:
    return Program(
        request.param,
        FIRST="def reduce(): return hook()\ndef call(function): return function()",
        SECOND="def backward(): return reduce()\ndef defer(function): return call(function)",
        train="def one(): return reduce()\ndef two(): return one()\n\n\ndef three(): return backward()",
    )


def test_the_innermost_line_of_the_user_is_found(program: Program) -> None:
    assert program("one()") == ("reduce", "train", 1)
    assert program("two()") == ("reduce", "train", 1)
    assert program("three()") == ("backward", "train", 5)
    assert program("one()") == ("reduce", "train", 1)


def test_lines_of_one_function_differ(program: Program) -> None:
    program.add(
        "loop", "def loop():\n    return [\n        reduce(),\n        reduce(),\n        backward(),\n    ]"
    )
    first, second, third = program.names["loop"]()
    assert program.names["loop"]() == [first, second, third]
    assert (first[2], second[2], third[2]) == (3, 4, 5)
    assert third[0] == "backward"


def test_a_helper_of_the_user_between_two_libraries_is_found(program: Program) -> None:
    """One line calls either the library or a helper, at the same depth and from the same function below it."""
    program.add("helper", "\n\n\ndef defer_too(function): return call(function)")
    program.add("choose", "def choose(function): return function(reduce)")
    for _ in range(3):
        assert program("choose(defer)") == ("defer", "choose", 1)
        assert program("choose(defer_too)") == ("call", "helper", 4)


def test_a_helper_deep_between_libraries_is_found() -> None:
    program = Program(
        LIBRARY="def reduce(): return hook()\n"
        "def third(function): return reduce()\n"
        "def outer(function): return function(third)\n"
        "def middle(function): return function(third)",
        helper="def helper(function): return function(third)",
        train="def train(function): return outer(function)",
    )
    for _ in range(3):
        assert program("train(middle)") == ("outer", "train", 1)
        assert program("train(helper)") == ("third", "helper", 1)


def test_a_cell_that_runs_again_is_found() -> None:
    program = Program(LIBRARY="def reduce(): return hook()")
    for _ in range(20):
        program.add("cell", "def step(): return reduce()")
        assert program("step()") == ("reduce", "cell", 1)
    program.add("cell", "\ndef step(): return reduce()")
    assert program("step()") == ("reduce", "cell", 2)
    program.add("cell", "\ndef step():\n    x = 1; return [reduce() for _ in 'a'][0] if x else None")
    assert program("step()") == ("reduce", "cell", 3)


def test_lambdas_generators_and_decorators_are_found(program: Program) -> None:
    program.add(
        "odd",
        "def reduced(function):\n"
        "    def wrapped(): return function() and reduce()\n"
        "    return wrapped\n"
        "later = lambda: reduce()\n"
        "def each():\n"
        "    while True: yield reduce()\n"
        "@reduced\n"
        "def plain(): return True\n"
        "\n"
        "class Odd:\n"
        "    @property\n"
        "    def value(self): return reduce()\n"
        "    def __len__(self): return reduce()[2]\n",
    )
    assert program("later()") == ("reduce", "odd", 4)
    assert program("call(later)") == ("reduce", "odd", 4)
    assert program("next(each())") == ("reduce", "odd", 6)
    assert program("plain()") == ("reduce", "odd", 2)
    assert program("Odd().value") == ("reduce", "odd", 12)
    assert program("(len(Odd()),)[0] and Odd().value") == ("reduce", "odd", 12)
    assert program("sorted([2, 1], key=lambda _: one())[0] and one()") == ("reduce", "train", 1)
    assert program("eval('exec(\"found = one()\", globals()) or found')") == ("reduce", "train", 1)


def test_deep_recursion_ends_at_the_innermost_call(program: Program) -> None:
    program.add("deep", "def deep(n):\n    if n: return call(lambda: deep(n - 1))\n    return reduce()")
    for depth in (0, 3, 1, 30, 0):
        assert program(f"deep({depth})") == ("reduce", "deep", 3)


def test_threads_without_a_frame_of_the_user_get_the_last_line() -> None:
    lines = UserLines((__file__,))
    sum_up = lines.finder(lambda line, key: ("sum", line.filename, line.line), 1)
    meet = lines.finder(lambda line, key: ("meeting", line.filename, line.line), 1)
    _, *here = sum_up((1,))
    assert here[0] == __file__
    found: list[Any] = []
    names: dict[str, Any] = {"sum_up": sum_up, "meet": meet, "found": found}
    text = "def run(): found.extend([sum_up((2,)), meet((2,))])"
    exec(compile(text, LIBRARY.format("X"), "exec"), names)
    for _ in range(2):
        thread = threading.Thread(target=names["run"])
        thread.start()
        thread.join(180)
    assert found == [("sum", *here), ("meeting", *here)] * 2
    assert found[0] is found[2], "it is kept"


def test_a_thread_without_any_frame_gets_the_last_line() -> None:
    """A library in C may call a hook from its own thread."""
    found: list[UserLine] = []
    is_found = threading.Event()

    def site_of(line: UserLine, key: object) -> UserLine:
        found.append(line)
        is_found.set()
        return line

    find = UserLines((__file__,)).finder(site_of, 4)
    _thread.start_new_thread(find, ((),))
    assert is_found.wait(180)
    assert [(line.name, line.filename, line.line) for line in found] == [("", "", 0)]
