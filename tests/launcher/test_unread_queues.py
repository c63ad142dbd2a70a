"""UnreadQueues keeps values in queues once no rank is left that may read them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import pytest

from nblaunch.events import Event, Note, PutUnread
from nblaunch.wire.board import Board
from nblaunch.worker.inheritance.queues import UnreadQueues

PIECE = bytes(500_000)


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(2)
    yield board
    board.close()


def test_queues_are_left_alone_while_ranks_may_read_them(board: Board) -> None:
    queue = multiprocessing.get_context("fork").Queue()
    unread = UnreadQueues(board, lambda event: None)
    unread.receive(PutUnread(1, 0.0, (pipe_of(queue),)))
    for number in range(3):
        queue.put((number, PIECE))
    unread.collect({0, 1})
    assert queue.get()[0] == 0
    unread.collect({1})
    unread.collect({1})
    unread.end()
    assert [queue.get()[0] for _ in range(2)] == [1, 2]


def test_a_queue_without_readers_in_this_process_is_reported(board: Board) -> None:
    emitted: list[Event] = []
    unread = UnreadQueues(board, emitted.append)
    unread.receive(PutUnread(0, 0.0, (1,)))
    unread.collect({0})
    unread.end()
    assert ["return the values instead" in event.text for event in emitted if isinstance(event, Note)] == [
        True
    ]


def test_values_before_a_truncated_one_arrive(board: Board) -> None:
    queue = multiprocessing.get_context("fork").Queue()
    emitted: list[Event] = []
    unread = UnreadQueues(board, emitted.append)
    queue.put("whole")
    assert queue._poll(10)  # type: ignore[attr-defined]
    os.write(queue._writer.fileno(), b"\0\0\1\0half")  # type: ignore[attr-defined]
    unread.receive(PutUnread(0, 0.0, (pipe_of(queue),)))
    unread.collect({0})
    unread.end()
    assert queue.get(timeout=180) == "whole"
    assert queue.empty()
    assert [type(event) for event in emitted] == [Note]


def pipe_of(queue: object) -> int:
    return os.fstat(queue._writer.fileno()).st_ino  # type: ignore[attr-defined]
