"""Ranks that meet where a checkpoint is saved, through the store of their process group.

No collectives: many scripts call ``save_state`` on the main process alone, and a collective would then wait for ever,
or be answered by the gradients of the others' next step. So others announce themselves, and the main process goes on
without them if none does:

    main        opens the folder ── "folder" ──>               <── "here", "state" of each ── writes ── "verdict" ──>
    others      "here" ──> wait for "folder", run hooks, "state" ──>            wait for "verdict", or come for it later
"""

from __future__ import annotations

import pickle
import time
from typing import Any

import torch.distributed as dist

from nblaunch.training.joining import is_distributed
from nblaunch.training.waiting import waiting

PATIENCE_S = 5.0
SHORT_PATIENCE_S = 1.0  # where nobody came the last time

_POLL_S = (0.001, 0.05)  # first and longest pause between two looks at the store


class Meeting:
    """One place in the program that ranks come to.

    Args:
        key: its name, the same on all ranks. The n-th meeting of a name is that of every rank's n-th time.
        rank: of this process.
        world_size: ranks of the job.
    """

    def __init__(self, key: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.others = list(range(1, world_size))
        self._store: Any = None
        if world_size > 1 and is_distributed():
            # The store has no public name; torch's own modules take it so, since 1.13 at least.
            store = dist.distributed_c10d._get_default_store()
            # Counted where the group lives, so that a name means the same to all of its processes, and to no others.
            count = store.add(f"nblaunch/{key}/times of {rank}", 1)
            self._store = dist.PrefixStore(f"nblaunch/{key}/{count}", store)

    def post(self, name: str, value: Any) -> None:
        """Let all ranks read ``value``, which is pickled, under ``name``."""
        if self._store is not None:
            self._store.set(name, pickle.dumps(value))

    def has(self, name: str) -> bool:
        """Whether something was posted under ``name``."""
        return self._store is not None and self._store.check([name])

    def read(self, name: str) -> Any:
        """What was posted under ``name``; waits for it, as long as it takes."""
        with waiting():
            self._wait_for([name])
        return pickle.loads(self._store.get(name))

    def arrivals(self, patience_s: float) -> list[int]:
        """The ranks besides the main process that come: all of them, or none.

        Args:
            patience_s: how long to wait for the first one. Where one has come, the others are waited for.
        """
        if self._store is None:
            return []
        names = [f"here/{rank}" for rank in self.others]
        deadline = time.monotonic() + patience_s
        with waiting():
            pause_s = _POLL_S[0]
            while not any(self._store.check([name]) for name in names):
                if time.monotonic() >= deadline:
                    return []
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S[1])
            self._wait_for(names)
        return self.others

    def forget(self, name: str) -> None:
        """Drop what was posted under ``name``, once nobody will read it any more."""
        if self._store is not None:
            self._store.delete_key(name)

    def _wait_for(self, names: list[str]) -> None:
        # Looks rather than one long wait, which would hold an interrupt back until its end.
        pause_s = _POLL_S[0]
        while not self._store.check(names):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
