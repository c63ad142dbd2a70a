"""Models that the function builds by itself: counted, and built one after the other where memory would not hold all.

    worker 0   builds ........ moves to device | end
    worker 1   builds ..  waits                | builds ...... moves | end
                       ^ so far that it is a big one, and all together would not fit

N workers that build the same model at once hold it N times on the host before the first has moved its copy to the
device. Passing the model avoids that altogether; this is for functions that don't. Small models never wait, nor does
anything where memory is plenty.

A turn ends when the model is on its device, and before anything that ranks do together: its holder must never
wait for one that waits for it. Where a function waits for other ranks in a way that is not seen here, patience runs
out and the waiting worker goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nblaunch import packages
from nblaunch.events import WorkerState
from nblaunch.host import memory
from nblaunch.wire import turns
from nblaunch.wire.board import Slot

_FIRST_MARK_BYTES = 64 << 20
_GROWTH = 2.0
"""How much more than it has built each worker is expected to need, at least: as much again, and a copy on its way."""

_PATIENCE_S = 120.0


class Construction:
    """Watches one worker build models.

    Args:
        slot: of the board, where what was built is counted.
        fd: of the board, on which turns are taken.
        num_workers: on this machine.
        takes_turns: whether models leave the host's memory when they are prepared, so that waiting is of use.
        note: takes a sentence for the user.
    """

    def __init__(
        self, slot: Slot, fd: int, num_workers: int, takes_turns: bool, note: Callable[[str], None]
    ) -> None:
        self._slot = slot
        self._fd = fd
        self._num_workers = num_workers
        self._takes_turns = takes_turns and num_workers > 1
        self._note = note
        self._built = 0
        self._next_mark = _FIRST_MARK_BYTES
        self._has_turn = False

    def watch(self) -> None:
        """Look at every parameter that a module gets from now on, whether torch is imported already or later."""

        def look(owner: Any, name: str, parameter: Any) -> None:
            if parameter is not None:
                self.add(parameter.numel() * parameter.element_size(), parameter.device.type == "cpu")

        packages.when_imported(
            "torch.nn.modules.module", lambda module: module.register_module_parameter_registration_hook(look)
        )

    def add(self, num_bytes: int, is_on_host: bool = True) -> None:
        """So much more was built. Waits for this worker's turn where memory would not hold what all are building."""
        self._slot.add_built_bytes(num_bytes)
        self._built += num_bytes if is_on_host else 0
        if not self._takes_turns or self._built < self._next_mark:
            return
        while self._next_mark <= self._built:
            self._next_mark *= 2
        if not self._has_turn and self._is_tight():
            self._wait()

    def end(self) -> None:
        """The model is where it belongs, or ranks are about to meet: the next one may build."""
        if self._has_turn:
            self._has_turn = False
            turns.end_building_turn(self._fd)
        self._built, self._next_mark = 0, _FIRST_MARK_BYTES

    def retire(self) -> None:
        """Wait for no turn any more, in a process that the worker forks: the worker may hold it, and wait for us."""
        self._takes_turns = self._has_turn = False

    def _is_tight(self) -> bool:
        _, available = memory.limit_and_available()
        return available is not None and available < self._num_workers * self._built * _GROWTH

    def _wait(self) -> None:
        self._note(
            "the workers build their models one after the other, because the host's memory would not hold all at once. "
            "A model that is built in a cell and passed, notebook_launcher(function, (model,)), is held once"
        )
        before = self._slot.state
        self._slot.set_state(WorkerState.WAITING)
        self._has_turn = turns.take_building_turn(self._fd, _PATIENCE_S)
        self._slot.set_state(before)
        if not self._has_turn:
            self._takes_turns = False  # others may wait for this one
