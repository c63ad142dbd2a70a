"""Arguments that can't be combined with ``detach=True`` are rejected before any process is started."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nblaunch import PayloadError, notebook_launcher


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"background": False}, "background=True"),
        ({"session": object()}, "session"),
        ({"post_mortem": True}, "post_mortem"),
        ({"num_nodes": 2}, "several machines"),
        ({"sync_optimizers": True}, "save_state"),
        ({"log_dir": "/tmp"}, "NBLAUNCH_LOG_DIR"),
        ({"engine": "inline"}, "inline"),
    ],
)
def test_settings_that_need_the_kernel_are_rejected(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        notebook_launcher(print, **{"background": True, "detach": True, **settings})


def test_flags_must_be_booleans() -> None:
    with pytest.raises(TypeError, match="detach"):
        notebook_launcher(print, background=True, detach="yes")  # type: ignore[arg-type]


def test_a_call_that_cannot_be_pickled_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_LOG_DIR", str(tmp_path))
    with pytest.raises(PayloadError, match="lock"):
        notebook_launcher(print, (torch.nn.Linear(1, 1), threading.Lock()), background=True, detach=True)
    assert [path.name for path in (tmp_path / "detached").iterdir()] == [".key"]
