"""An agent's end of the line to its launcher: what it tells it, and what it waits to be told."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nblaunch.engines.agent_news import NewsExchange
from nblaunch.events import Event
from nblaunch.wire.channel import EventReceiver, EventSender
from nblaunch.wire.nodes import Ended, Hosting, Leave, Summary
from nblaunch.wire.polling import wait_until_readable


class LauncherLine:
    """The launcher, as its node's agent knows it.

    Args:
        sender: writes to it.
        reading_fd: what it writes arrives here.
        news: gets what it says of the workers.
        leave: ends this process, with a reason for the other nodes.
    """

    def __init__(
        self, sender: EventSender, reading_fd: int, news: NewsExchange, leave: Callable[[str], None]
    ) -> None:
        self.send: Callable[[Event], None] = sender.send
        self._reading_fd = reading_fd
        self._news = news
        self._leave = leave
        self._changed = threading.Condition()
        self._hosting: Hosting | None = None
        self._ended: Ended | None = None

    def start(self) -> None:
        """Begin to listen. Ends with the process."""
        threading.Thread(target=self._listen, name="reader", daemon=True).start()

    def _listen(self) -> None:
        """Take in what the launcher says. If it is gone, so is this node."""
        receiver = EventReceiver(self._reading_fd)
        while True:
            wait_until_readable([receiver.fd])
            messages, is_closed = receiver.receive()
            for message in messages:
                self._heed(message)
            if is_closed:
                self._leave("ended: its launching process was killed")

    def _heed(self, message: Event) -> None:
        if isinstance(message, Leave):
            self._leave(message.reason)
        elif isinstance(message, Summary):
            self._news.summarise(message)
        elif isinstance(message, Ended):
            self._news.summarise(message.summary)
        with self._changed:
            if isinstance(message, Hosting):
                self._hosting = message
            elif isinstance(message, Ended):
                self._ended = message
            self._changed.notify_all()

    @property
    def ended(self) -> Ended | None:
        """How the workers have ended; None: they have not."""
        return self._ended

    def expect_workers(self) -> None:
        """Forget the workers before."""
        with self._changed:
            self._ended = self._hosting = None

    def wait_for_port(self) -> int:
        """Wait until the launcher hosts the store of the workers of all nodes, and take its port."""
        with self._changed:
            self._changed.wait_for(lambda: self._hosting is not None)
            assert self._hosting is not None
            port, self._hosting = self._hosting.port, None
            return port

    def wait_for_end(self) -> None:
        """Wait until the workers have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None)
            self._ended = None
