"""What nodes tell each other through the store of their rendezvous: this node's page, and those of all others.

A thread of the agent writes the page and reads the others', twice a second, or at once where somebody waits for a
word. All else here may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from nblaunch.engines.agent_rendezvous import connect
from nblaunch.engines.bulletin import Bulletin
from nblaunch.engines.elastic import LINGER_S, Orders
from nblaunch.events import Event, Note
from nblaunch.wire import nodes
from nblaunch.wire.nodes import Member, News, NodeNews, Summary

BEAT_S = 0.5
"""Between two pages of news."""

_URGENT_BEATS_S = 0.1
"""The same while others may be waiting for a word: once this node is at its end, or while all agree on one."""

_RECONNECT_S = 5.0
_GATHER_S = 1.0
_FINAL = (nodes.DONE, nodes.FAILED, nodes.LEFT)
_GONE_S = 2.5
"""A node that has not been heard of for so long need not be waited for any more."""


class RankTakenError(Exception):
    """Another node has the rank that this one was given."""


class NewsExchange:
    """This node's news, and what it has heard of the other nodes.

    Args:
        orders: of the agent.
        id: names this run of the agent.
        tell: takes the news of the others, each time they were read.
    """

    def __init__(self, orders: Orders, id: str, tell: Callable[[Event], None]) -> None:
        self.id = id
        self._meeting = orders.meeting
        self._tell = tell
        self._changed = threading.Condition()
        self._own = NodeNews(
            id, 0, self._meeting.node_rank, orders.host_name, nodes.JOINING, terms=self._meeting.terms
        )
        self._others: tuple[NodeNews, ...] = ()
        self._members: tuple[Member, ...] = ()
        self._last_changes: dict[str, tuple[int, float]] = {}
        self._published = 0
        self._wanted = 0
        self._is_store_lost = False

    def start(self) -> None:
        """Begin to write and read. Ends with the process."""
        threading.Thread(target=self._keep_bulletin, name="bulletin", daemon=True).start()

    @property
    def has_begun(self) -> bool:
        """Whether anything was exchanged at all."""
        return self._own.beat > 0

    # --- what is told --------------------------------------------------------------------------------------------

    def tell_all(self, state: str, reason: str = "", node_rank: int | None = None) -> None:
        """Change what the next page of news says about this node, and have it published at once."""
        with self._changed:
            rank = self._own.node_rank if node_rank is None else node_rank
            if self._own.state != nodes.LEFT:
                self._own = replace(self._own, state=state, reason=reason, node_rank=rank)
            self._changed.notify_all()

    def begin(self, start: int) -> None:
        """From now on, news are about this start of the workers."""
        with self._changed:
            self._own = replace(self._own, start=start, summary=Summary(-1, 0.0))

    def summarise(self, summary: Summary) -> None:
        """Say from now on how this node's workers are doing."""
        with self._changed:
            self._own = replace(self._own, summary=summary)
            self._changed.notify_all()

    def enter(self, members: tuple[Member, ...]) -> None:
        """This node is part of a world of ``members`` now."""
        with self._changed:
            self._members = members

    # --- what is heard -------------------------------------------------------------------------------------------

    def refuse_taken_rank(self) -> None:
        """Where ranks are given by people, two machines may have got the same.

        The page of a node that has died says the same rank, but its beat stands still.

        Raises:
            RankTakenError: it is so.
        """
        self.refresh(_RECONNECT_S)
        with self._changed:
            first = {other.id: other.beat for other in self._with_same_rank()}
            self._changed.wait_for(lambda: not first or self._rivals(first), 3 * BEAT_S)
            rivals = self._rivals(first)
        if rivals:
            raise RankTakenError(
                f"node_rank={self._own.node_rank} is taken by a node on host {rivals[0].host} already; give each "
                "machine a rank of its own"
            )

    def _rivals(self, first: dict[str, int]) -> list[NodeNews]:
        """Those with this node's rank that have been heard of since their ``first`` beat."""
        return [other for other in self._with_same_rank() if other.beat > first.get(other.id, other.beat)]

    def _with_same_rank(self) -> list[NodeNews]:
        own = self._own.node_rank
        return [other for other in self._others if other.node_rank == own and other.state not in _FINAL]

    def refresh(self, timeout_s: float = _GATHER_S) -> None:
        """Have the launcher hear what all nodes say now."""
        with self._changed:
            wanted = self._own.beat + 1
            self._wanted = wanted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._published >= wanted or self._is_store_lost, timeout_s)

    def gather_last(self) -> None:
        """All nodes are done: wait a moment for what each says at its end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_store_lost or all(other.state in _FINAL for other in self._companions),
                _GATHER_S,
            )

    @property
    def _companions(self) -> list[NodeNews]:
        ids = {member.id for member in self._members}
        return [other for other in self._others if other.id in ids]

    def linger(self) -> None:
        """Stay until the last news are on the store; the node that has it, until all that live have read them."""
        with self._changed:
            final = self._own.beat + 1
            self._changed.wait_for(lambda: self._is_heard(final), LINGER_S)

    def _is_heard(self, beat: int) -> bool:
        if self._is_store_lost or not self._others:
            return True
        if self._meeting.listen_fd < 0:
            # By then whoever hosts the store has been told, too, that this one heard of it.
            return self._published > beat
        return self._published >= beat and all(self._has_heard(other, beat) for other in self._others)

    def _has_heard(self, other: NodeNews, beat: int) -> bool:
        silent_s = time.monotonic() - self._last_changes[other.id][1]
        is_ending = other.state in _FINAL
        return other.heard.get(self.id, -1) >= beat or silent_s > (_GATHER_S if is_ending else _GONE_S)

    def who_is_here(self) -> list[str]:
        """The nodes that look for each other now, this one among them."""
        with self._changed:
            now = time.monotonic()
            return sorted(
                str(news)
                for news in (self._own, *self._others)
                if news.state == nodes.JOINING
                and (news.id == self.id or now - self._last_changes[news.id][1] < _GONE_S)
            )

    # --- the thread ----------------------------------------------------------------------------------------------

    def _keep_bulletin(self) -> None:
        bulletin: Bulletin | None = None
        while True:
            try:
                bulletin = bulletin or Bulletin(
                    connect(self._meeting, _RECONNECT_S), self._meeting.run_id, self.id, self._warn
                )
                self._exchange(bulletin)
            except Exception as error:
                # The store is gone, or does not answer: silence is what the launchers understand.
                print(f"no news: {type(error).__name__}: {error}", flush=True)
                bulletin = None
                with self._changed:
                    self._is_store_lost = True
                    self._changed.notify_all()
                time.sleep(BEAT_S)
            self._wait_for_news()

    def _warn(self, text: str) -> None:
        self._tell(Note.of_job(text, "warning"))

    def _wait_for_news(self) -> None:
        with self._changed:
            told = self._worth_telling()
            is_urgent = self._own.state in _FINAL or self._own.summary.stopping.is_wanted
            beat_s = _URGENT_BEATS_S if is_urgent else BEAT_S
            self._changed.wait_for(
                lambda: self._worth_telling() != told or self._wanted > self._published, beat_s
            )

    def _worth_telling(self) -> tuple[object, ...]:
        """What is told at once when it changes, rather than with the next beat."""
        summary = self._own.summary
        stop = summary.stopping
        replies = [reply for _, reply in stop.answers.values()]
        urgent = stop.is_wanted, stop.proposal, stop.decision, replies
        return self._own.state, summary.failed, summary.exits, summary.finished, urgent

    def _exchange(self, bulletin: Bulletin) -> None:
        with self._changed:
            heard = {other.id: other.beat for other in self._others}
            self._own = replace(self._own, beat=self._own.beat + 1, heard=heard, clock_s=time.monotonic())
            own = self._own
        others = bulletin.exchange(own)
        with self._changed:
            self._others, self._published, self._is_store_lost = others, own.beat, False
            for other in others:
                if self._last_changes.get(other.id, (-1, 0.0))[0] != other.beat:
                    self._last_changes[other.id] = (other.beat, time.monotonic())
            self._changed.notify_all()
        self._tell(News(-1, time.time(), nodes=others))
