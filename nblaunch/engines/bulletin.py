"""The bulletin of a rendezvous: each node keeps a page of news on the store and reads the pages of all others.

    <prefix>/pages          how many pages there are
    <prefix>/page/<n>       whose the n-th page is
    <prefix>/news/<id>      the last news of that node

A page is written and all are read in four requests, however many nodes there are. Pages of nodes that are gone stay:
their news stop. Pages are plain data (``wire/schema.py``): what others have put there instead is left aside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nblaunch.wire import schema
from nblaunch.wire.nodes import NodeNews


class Bulletin:
    """One node's access to it. Not for several threads.

    Args:
        store: a connection of its own to the rendezvous store; a request that blocks must not hold up torch's agent.
        prefix: of all keys: names the job.
        id: of this node.
        warn: takes a sentence about a page that no node has written, once for each.
    """

    def __init__(self, store: Any, prefix: str, id: str, warn: Callable[[str], None] = print) -> None:
        self._store = store
        self._prefix = prefix
        self._id = id
        self._warn = warn
        self._unreadable: set[str] = set()
        self._has_page = False
        self._num_known = 0
        self._others: list[str] = []

    def exchange(self, news: NodeNews) -> tuple[NodeNews, ...]:
        """Publish ``news``; returns the last news of every other node.

        Raises:
            RuntimeError: the store is gone.
        """
        self._store.set(f"{self._prefix}/news/{self._id}", schema.dump(news))
        if not self._has_page:
            number = self._store.add(f"{self._prefix}/pages", 1)
            self._store.set(f"{self._prefix}/page/{number}", self._id)
            self._has_page = True
        self._find_others()
        if not self._others:
            return ()
        pages = self._store.multi_get([f"{self._prefix}/news/{id}" for id in self._others])
        read = (self._read(id, page) for id, page in zip(self._others, pages, strict=True))
        return tuple(news for news in read if news is not None)

    def _read(self, id: str, page: bytes) -> NodeNews | None:
        try:
            news = schema.load(NodeNews, page)
            if news.id != id:
                raise ValueError(f"it is of {news.id!r:.80}")
        except ValueError as error:
            if id not in self._unreadable:
                self._unreadable.add(id)
                self._warn(
                    f"the page of {id!r:.80} at the rendezvous was not written by a node of this job, and is left "
                    f"aside ({error}). Other processes can reach the rendezvous: keep it on a network of your own, and "
                    "use the same version of nblaunch on all nodes"
                )
            return None
        return news

    def _find_others(self) -> None:
        num_pages = self._store.add(f"{self._prefix}/pages", 0)
        while self._num_known < num_pages:
            key = f"{self._prefix}/page/{self._num_known + 1}"
            if not self._store.check([key]):
                return  # counted, but not written yet: reading it would wait
            self._num_known += 1
            id = self._store.get(key).decode(errors="replace")
            if id != self._id and id not in self._others:
                self._others.append(id)
