"""The channel between a coordinator and a node: complete messages, in order, only with the job's signature."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nblaunch.engines.channel import MARK, Channel, ChannelError
from nblaunch.engines.messages import CallPart, Hello, Request
from nblaunch.wire import schema, signing

KEY = b"k" * 32


class Pair:
    """Both ends, over two pipes."""

    def __init__(self) -> None:
        down, up = os.pipe(), os.pipe()
        self.fds = {*down, *up}
        self.coordinator = Channel(up[0], down[1], b"c")
        self.node = Channel(down[0], up[1], b"n")

    def agree(self) -> Pair:
        """Exchange the first messages of both ends."""
        self.node.send_mark()
        self.node.send_raw(schema.dump(Hello("a", "3.11", "1")))
        assert len(self.coordinator.receive_raw(1)) == 1
        self.coordinator.key = self.node.key = KEY
        return self

    def close(self, fd: int) -> None:
        os.close(fd)
        self.fds.discard(fd)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for fd in pair.fds:
        os.close(fd)


def test_shell_output_before_the_program_is_skipped(pair: Pair) -> None:
    os.write(pair.node.writing_fd, b"Welcome to this machine!\n" * 100 + MARK[:5])
    assert pair.coordinator.receive_raw() == []
    pair.node.send_mark()
    pair.node.send_raw(b"first")
    assert pair.coordinator.receive_raw() == [b"first"]


def test_large_objects_arrive_without_blocking(pair: Pair) -> None:
    pair.agree()
    parts = [CallPart(bytes([number]) * 700_000) for number in range(20)]
    pair.coordinator.send_bulk(iter(parts))
    assert pair.coordinator.backlog <= 2 * 700_000, "parts are made when there is room for them"
    arrived = []
    while len(arrived) < len(parts):
        pair.coordinator.flush()
        arrived += pair.node.receive()
    assert arrived == parts


def test_unsealed_messages_are_not_read(pair: Pair) -> None:
    pair.agree()
    pair.node.key = b"x" * 32
    pair.node.send(Request("stop"))
    with pytest.raises(ChannelError, match="not signed"):
        pair.coordinator.receive()


def test_foreign_pickles_run_no_code(pair: Pair, tmp_path: os.PathLike[str]) -> None:
    pair.agree()
    mark = f"{os.fspath(tmp_path)}/ran"
    evil = f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()
    for body in (evil, b"\0" * 32 + b"\0" * 8 + evil, signing.seal(b"\0" * 8 + evil, KEY)):
        pair.node.send_raw(body)
        with pytest.raises(ChannelError):
            pair.coordinator.receive()
    assert not os.path.exists(mark)


def test_a_replayed_message_is_not_read(pair: Pair) -> None:
    pair.agree()
    copy = Pair()
    copy.agree()
    copy.node.send(Request("stop"))
    (sealed,) = copy.coordinator.receive_raw()
    for fd in copy.fds:
        os.close(fd)
    pair.node.send_raw(sealed)
    assert pair.coordinator.receive() == [Request("stop")]
    pair.node.send_raw(sealed)
    with pytest.raises(ChannelError, match="arrived instead of"):
        pair.coordinator.receive()


def test_reflected_messages_are_not_read(pair: Pair) -> None:
    pair.agree()
    pair.coordinator.send(Request("stop"))
    (sealed,) = pair.node.receive_raw()
    pair.node.send_raw(sealed)
    with pytest.raises(ChannelError, match="not signed"):
        pair.coordinator.receive()


def test_the_end_follows_sent_messages(pair: Pair) -> None:
    pair.agree()
    pair.node.send(Request("stop"))
    pair.close(pair.node.writing_fd)
    assert pair.coordinator.receive() == [Request("stop")]
    assert pair.coordinator.receive() == []
    assert pair.coordinator.is_closed
    pair.close(pair.node.reading_fd)
    pair.coordinator.send(Request("stop"))  # nothing raises: the reason comes with the end
    assert pair.coordinator.backlog == 0
