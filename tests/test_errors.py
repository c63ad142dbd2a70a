"""All of nblaunch's exceptions survive pickling with their attributes, and have their promised base classes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
from torch.utils._pytree import tree_map

import nblaunch
from nblaunch import errors

ALL = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.NblaunchError)]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_errors_survive_pickling(cls: type[errors.NblaunchError]) -> None:
    error = cls("what happened")
    for name, value in (("rank", 3), ("exitcode", -9), ("partial", {"kept": [1, 2]})):
        if hasattr(error, name):
            setattr(error, name, value)
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is cls
        assert (str(copied), copied.args) == (str(error), error.args)
        assert vars(copied) == vars(error)


def test_errors_have_their_documented_bases() -> None:
    assert issubclass(errors.PayloadError, errors.LaunchError)
    assert issubclass(errors.PayloadError, TypeError)
    assert issubclass(errors.LaunchError, RuntimeError)
    assert issubclass(errors.WorkerDied, errors.WorkerError)
    assert issubclass(errors.WorkerError, RuntimeError)
    assert issubclass(errors.ResultError, TypeError)


def test_all_errors_are_public() -> None:
    public = {cls.__name__ for cls in ALL}
    assert public <= set(nblaunch.__all__)
    assert all(getattr(nblaunch, name) is getattr(errors, name) for name in public)


def test_a_warning_shows_the_line_of_the_user() -> None:
    with pytest.warns(UserWarning, match="called by torch") as caught:
        tree_map(errors.warn, ["called by torch"])
    assert [one.filename for one in caught] == [__file__]
