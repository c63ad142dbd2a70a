"""Which files of a program belong to the user, and to which objects a call refers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nblaunch import user_code
from nblaunch.user_code import has_user_class, is_user_file, reachable_from, user_frame_behind


@pytest.mark.parametrize(
    ("filename", "is_users"),
    [
        (json.__file__, False),
        (pytest.__file__, False),
        ("<frozen importlib._bootstrap>", False),
        # Packages of the user, of a system below a virtual environment, and of Debian.
        ("/home/ada/.local/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", False),
        ("/usr/lib/python3/dist-packages/torch/nn/modules/module.py", False),
        ("/tmp/ipykernel_7/1234.py", True),
        ("/home/ada/project/train.py", True),
        (user_code.__file__, False),
        (f"{Path(user_code.__file__).parent}_extras/train.py", True),
    ],
)
def test_installed_packages_are_not_user_code(filename: str, is_users: bool) -> None:
    assert is_user_file(filename) is is_users


def test_nblaunch_knows_its_own_files_behind_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(Path(user_code.__file__).parent)
    spec = importlib.util.spec_from_file_location("linked", tmp_path / "link" / "user_code.py")
    assert spec is not None
    assert spec.loader is not None
    linked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(linked)
    filename = linked.is_own_file.__code__.co_filename
    assert filename.startswith(str(tmp_path))
    assert linked.is_own_file(filename)
    assert not linked.is_user_file(filename)


def test_objects_of_a_call_are_reached_whatever_they_are() -> None:
    class Proxy:
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            raise RuntimeError("working outside of request context")

    class Unindexed(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise RuntimeError

    class Meta(type):
        @property
        def __dict__(cls) -> Any:
            raise RuntimeError

    class Hidden(metaclass=Meta):
        def method(self) -> None: ...

    def helper() -> None: ...

    def train(*values: Any) -> None:
        helper()

    hidden, proxy = object(), Proxy()
    reached = list(reachable_from((train, ([proxy], Unindexed([hidden]), Hidden))))
    for wanted in (train, helper, hidden, proxy, Hidden.method):
        assert any(each is wanted for each in reached)


@pytest.mark.parametrize(
    "values", [list(map(str, range(10**6))), set(range(10**6)), dict.fromkeys(range(10**6))]
)
def test_the_rest_of_a_call_is_reached_beside_millions_of_values(values: Any) -> None:
    last = object()
    assert any(each is last for each in reachable_from((len, (values, [[last]]))))


def test_a_class_of_the_user_is_recognised() -> None:
    class InTheNotebook:
        __module__ = "__main__"

    assert [has_user_class(value) for value in (InTheNotebook(), Path(), 1)] == [True, False, False]


@pytest.mark.parametrize(("packages", "is_behind"), [({"json"}, True), ({"pytest"}, False)])
def test_the_users_frame_behind_a_library(packages: set[str], is_behind: bool) -> None:
    frames = []
    json.loads("{}", object_hook=lambda value: frames.append(sys._getframe(1)))
    frame = user_frame_behind(frames[0], packages)
    assert (frame is not None and frame.f_code.co_filename == __file__) is is_behind
