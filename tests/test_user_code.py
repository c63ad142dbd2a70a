"""What of a program is the user's."""

from __future__ import annotations

import json

import pytest

from nblaunch.user_code import is_user_file


@pytest.mark.parametrize(
    ("filename", "is_users"),
    [
        (json.__file__, False),
        (pytest.__file__, False),
        ("<frozen importlib._bootstrap>", False),
        # Of the user, of a system below a virtual environment, of Debian.
        ("/home/ada/.local/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", False),
        ("/usr/lib/python3/dist-packages/torch/nn/modules/module.py", False),
        ("/tmp/ipykernel_7/1234.py", True),
        ("/home/ada/project/train.py", True),
    ],
)
def test_installed_packages_are_not_the_users_wherever_they_are(filename: str, is_users: bool) -> None:
    assert is_user_file(filename) is is_users
