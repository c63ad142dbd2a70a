"""Plain data between machines: written data comes back, and nothing else is accepted."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.events import (
    EpochEnded,
    ExceptionInfo,
    ExitStatus,
    Failed,
    FrameInfo,
    HostMemory,
    Returned,
    ValueLocation,
    WorkerState,
)
from nblaunch.nodes.messages import Heartbeat, Node, StopState, Summary
from nblaunch.wire import schema
from nblaunch.wire.board import SlotReading

NODE = Node("a-1", 0, "alpha", "10.0.0.1", 0, 2)

_INFO = ExceptionInfo("KeyError", "'\ud800 lr'", (FrameInfo("train.py", 3, "train", "x = 1"),), "text")
_HEARTBEAT = Heartbeat(
    "a-1", 7, 0, "alpha", "running", received={"b-2": 3},
    summary=Summary(
        -1, 1.5,
        readings=(SlotReading(0, WorkerState.TRAINING, loss=0.25), SlotReading(1, loss=math.inf)),
        failed={1: Failed(1, 2.0, ExceptionInfo("ValueError", "wrong", cause=_INFO, parts=(_INFO, _INFO)))},
        exits={0: (ExitStatus(-9), 3.0)},
        returned={2: Returned(2, 4, ValueLocation(5, 6, ("result[0]",)), sends=(0, "model"))},
        epochs=(EpochEnded(1, 2.0, 3, math.inf, 4.5), EpochEnded(0, 2.0, 3)),
        host_memory=(HostMemory(1, 2.0, 10**9, False, 2 * 10**9, 3 * 10**9),),
        stop=StopState(True, 1, -1, {0: (5, 1)}),
    ),
)  # fmt: skip


def test_dumped_messages_load_unchanged() -> None:
    assert schema.load(Heartbeat, schema.dump(_HEARTBEAT)) == _HEARTBEAT
    assert schema.load(Node, schema.dump(NODE)) == NODE


def test_nan_losses_survive() -> None:
    sample = schema.load(SlotReading, schema.dump(SlotReading(0, loss=math.nan)))
    assert sample.loss is not None
    assert math.isnan(sample.loss)


def test_pickles_are_not_sent() -> None:
    with pytest.raises(TypeError, match="bytes has no plain form"):
        schema.dump(Failed(0, 0.0, exception=b"\x80\x05"))


def _changed(**values: Any) -> bytes:
    return json.dumps({**json.loads(schema.dump(NODE)), **values}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b"[1, 2]",
        pickle.dumps(NODE),
        _changed(node_rank="0"),
        _changed(node_rank=True),
        _changed(node_rank=1 << 63),
        _changed(node_rank=10**400),
        _changed(node_rank=0.0),
        _changed(host=None),
        _changed(more=1),
        json.dumps({"id": "a"}).encode(),
    ],
)
def test_anything_else_is_rejected(text: bytes) -> None:
    with pytest.raises(ValueError):
        schema.load(Node, text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(json.loads(schema.dump(_HEARTBEAT.summary)))), _JSON)
def test_altered_summaries_are_read_or_rejected(name: str, part: Any) -> None:
    text = json.dumps({**json.loads(schema.dump(_HEARTBEAT.summary)), name: part}).encode()
    try:
        summary = schema.load(Summary, text)
    except ValueError:
        return
    assert schema.load(Summary, schema.dump(summary)) == summary
