"""The agent of one node: torch's elastic agent, in a process of its own, with workers that its launcher starts.

    launcher (kernel) <── pipes ──> agent (fresh interpreter): main thread    torch's SimpleElasticAgent
        │ fork                                                 reader         what the launcher says
        └──> workers                                           bulletin       news of all nodes, twice a second

torch's agent decides: when to meet, who gets which ranks, whether to restart, when a node that came back is let in. Its
four abstract methods are answered by messages (``torch_agent.py``): "start", "are they well", "stop". The agent never
touches a worker. :func:`main` is called with the number of an inherited memory file.
"""

from __future__ import annotations

import os
import pickle
import secrets
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import RunResult

from nblaunch.engines.agent_failure import story_of
from nblaunch.engines.agent_news import NewsExchange
from nblaunch.engines.agent_rendezvous import is_connection_error, make_handler, open_store
from nblaunch.engines.elastic import Orders
from nblaunch.engines.launcher_line import LauncherLine
from nblaunch.engines.torch_agent import TorchAgent
from nblaunch.wire import nodes
from nblaunch.wire.channel import EventSender
from nblaunch.wire.nodes import Over
from nblaunch.worker import stdio


def main(arguments: Sequence[str]) -> NoReturn:
    """Live by the orders that the launcher wrote to the pipe whose descriptor is given."""
    with os.fdopen(int(arguments[0]), "rb") as file:
        orders: Orders = pickle.load(file)
    stdio.capture(orders.log_path)
    exit_code = 1
    try:
        NodeAgent(orders).live()
        exit_code = 0
    finally:
        stdio.flush()
        os._exit(exit_code)


class NodeAgent:
    """The life of this process: from the store of the rendezvous to the last news.

    Args:
        orders: of its launcher.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        sender = EventSender(orders.writing_fd)
        id = f"{orders.host_name}-{os.getpid()}-{secrets.token_hex(4)}"
        self._news = NewsExchange(orders, id, sender.send)
        self._launcher = LauncherLine(sender, orders.reading_fd, self._news, self._leave)

    def live(self) -> None:
        """Run torch's agent to its end; every outcome is told to the launcher."""
        self._launcher.start()
        meeting = self._orders.meeting
        try:
            store = open_store(meeting)
            self._news.start()
            if meeting.backend == "static":
                self._news.refuse_taken_rank()
            handler = make_handler(meeting, store, self._news.id, self._orders.host_name)
            agent = TorchAgent(self._orders, handler, store, self._news, self._launcher)
            result: RunResult | None = agent.run()
            is_success = result is not None and not result.is_failed()
            self._news.tell_all(nodes.DONE if is_success else nodes.FAILED)
            if is_success:
                self._news.gather_last()
            self._launcher.send(Over(-1, time.time(), is_success=is_success))
            handler.shutdown()
        except Exception as error:
            traceback.print_exc()
            story = story_of(error, meeting, self._news)
            self._news.tell_all(nodes.FAILED, reason="could not go on")
            self._launcher.send(Over(-1, time.time(), error=story, can_retry=is_connection_error(error)))
        self._news.linger()

    def _leave(self, reason: str) -> NoReturn:
        """End this process, whatever its main thread waits for, once the others have heard of it."""
        self._news.tell_all(nodes.LEFT, reason)
        self._news.linger()
        stdio.flush()
        os._exit(0)
