"""What an engine is: it starts our node program on machines, and carries bytes between each of them and this process.

    Engine ── start_nodes ──> NodeHandle of each machine: a pipe to the program, a pipe from it, and why it ended

An engine knows nothing of ranks, training or failures. A new one is a file of this folder with an :class:`Engine`, and
its name in ``__init__.py`` and in ``spec.py``. ``tests/contracts/test_engine.py`` shows what it must do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nblaunch.spec import LaunchSpec

NODE_MODULE = "nblaunch.engines.node"
"""The program that an engine starts: its ``main()`` talks through standard input and output."""


@dataclass(frozen=True)
class NodesWanted:
    """The machines that a job asks an engine for.

    Args:
        spec: of the launch, with the engine's own settings.
        log_path: returns the file for what the program on the n-th machine prints.
        check: called several times a second while an engine waits; raises if the job was interrupted or cancelled.
        note: receives a line for the user.
        path: where this process looks for modules.
        folder: working folder of this process; None if it was removed.
        environment: environment of this process.
    """

    spec: LaunchSpec
    log_path: Callable[[int], Path]
    check: Callable[[], None]
    note: Callable[[str], None]
    path: Sequence[str]
    folder: str | None
    environment: Mapping[str, str]


class NodeHandle(ABC):
    """The node program on one machine.

    Attributes:
        host: name of the machine, for messages.
        address: at which the other machines reach it; empty if the program finds that out.
        reading_fd: where its bytes arrive. The end of the file means that it has ended.
        writing_fd: for bytes to it.
    """

    host: str
    address: str
    reading_fd: int
    writing_fd: int

    @abstractmethod
    def how_ended(self) -> str:
        """Return why nothing more comes, as ``its process was killed by SIGKILL``. Called after the end of the file."""

    @abstractmethod
    def kill(self) -> None:
        """End the program at once, as far as that is possible from here."""

    @abstractmethod
    def close(self, patience_s: float) -> None:
        """Close both pipes, at which the program ends by itself; kill what has not ended after ``patience_s`` s."""


class Engine(ABC):
    """Starts our node program on machines. Must be closed, which leaves nothing behind.

    Attributes:
        is_this_machine: the nodes are processes of this machine, with its files and its environment.
    """

    is_this_machine = False

    @abstractmethod
    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        """Start the program on at least ``wanted.spec.min_nodes`` machines, and on ``max_nodes`` where it can.

        Called again after a node was lost, when all handles have been closed.

        Raises:
            LaunchError: that is not possible. Says what is wanted and what there is.
        """

    def close(self) -> None:
        """Release what the engine holds; all handles have been closed."""

    def notes(self) -> Sequence[str]:
        """Return what users should know of this engine once, as that others can reach it."""
        return ()
