"""Files that the kernel has open when it forks workers. Each worker reads them at its own position.

    kernel ── KernelFiles.of_this_process: flushes Python's buffers, records files and positions
      └── fork ──> worker ── renew: its own position in each readable file (positions.py)
                              ├── watch: detects ranks that write to the same file (written_files.py)
                              └── flush: flushes its buffers

Files open only for writing keep the shared position, because ranks would otherwise overwrite each other. Pipes,
sockets and terminals can't be reopened, so they stay shared.

A data loader's processes inherit their rank's positions, and get their own positions in the same way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nblaunch import formatting, packages
from nblaunch.host import sockets
from nblaunch.host.sockets import Connection
from nblaunch.user_code import ipython_shell
from nblaunch.wire.locks import WorkerLocks
from nblaunch.worker.inheritance import positions
from nblaunch.worker.inheritance.positions import Identity, OpenDescriptors, OpenFile
from nblaunch.worker.inheritance.written_files import WrittenFiles

_MAX_NAMED = 3
_SHARED = (
    "all ranks share one position in {names}, which {are} open in the kernel and can't be reopened. If the "
    "function reads {them}, open {them} inside the function"
)


def _standard_outputs() -> set[int]:
    """Return this process's output descriptors, and ipykernel's copies of these, to which no cell writes directly."""
    fds = {1, 2, *(getattr(stream, "_original_stdstream_copy", None) for stream in (sys.stdout, sys.stderr))}
    return {fd for fd in fds if isinstance(fd, int) and positions.is_open(fd)}


def _history() -> str:
    """Return the path of IPython's history database, which only a thread of the kernel uses; empty if there is none."""
    path = getattr(getattr(ipython_shell(), "history_manager", None), "hist_file", None)
    return os.path.realpath(path) if isinstance(path, (str, os.PathLike)) else ""


def _identities_of(path: str) -> frozenset[Identity]:
    try:
        status = os.stat(path)
    except OSError:  # the database is in memory
        return frozenset()
    return frozenset({(status.st_dev, status.st_ino)})


def _without_journals(files: Iterable[OpenFile], database: str) -> list[OpenFile]:
    """Return ``files`` without the journals of ``database``, which SQLite creates for a change and then removes.

    IPython writes its history when a cell starts, so nearly every launch would find a file that it has not seen before
    and search the heap for its file object.
    """
    beginning = f"{database}-"
    return [file for file in files if not (file.can_be_written and file.name.startswith(beginning))]


@dataclass(frozen=True)
class KernelFiles:
    """The open files of a process, for the workers that it forks.

    Args:
        ours: files of nblaunch and of IPython's history, and files that receive the process's output.
        files: open files.
        written: the files that are open for writing.
        channels: pipes, sockets and terminals, by descriptor.
        connections: connections that only the first rank keeps.
        shared: the files that a worker could not reopen.
    """

    ours: frozenset[Identity]
    files: Collection[OpenFile]
    written: WrittenFiles
    channels: Mapping[int, Identity]
    connections: Sequence[Connection] = ()
    shared: list[OpenFile] = field(default_factory=list)

    @classmethod
    def of_this_process(cls, ours: Collection[int], ranks: range) -> KernelFiles:
        """Flush this process's buffers, and record its open files.

        Args:
            ours: nblaunch's descriptors, which are left alone.
            ranks: ranks that will be forked.
        """
        history = _history()
        left_out = frozenset(map(positions.identity, {*ours, *_standard_outputs()})) | _identities_of(history)
        opened = OpenDescriptors.of_this_process(left_out)
        files = _without_journals(opened.files, history)
        # Every kernel has sockets, and C code does not buffer what it writes to them.
        written = WrittenFiles.of_this_process(files, ranks, opened.streams)
        channels = {**opened.streams, **opened.sockets}
        if written.has_objects:  # flushing them may have moved their positions
            files = _without_journals(OpenDescriptors.of_this_process(left_out).files, history)
        return cls(left_out, files, written, channels, sockets.connections_to_others(opened.sockets))

    def renew(self) -> None:
        """Take over the files in this worker. Call this first, because a worker closes some of the kernel's files."""
        self.shared.extend(positions.renew(self.files))
        self.written.drop_c_buffers()

    def watch(self, rank: int, locks: WorkerLocks, warn: Callable[[str], None]) -> None:
        """Detect writes that damage files; ``warn`` receives sentences for the user."""
        if self.shared and rank == self.written.ranks.start:
            is_one = len(self.shared) == 1
            names = formatting.first([file.name for file in self.shared], _MAX_NAMED)
            warn(_SHARED.format(names=names, are="is" if is_one else "are", them="it" if is_one else "them"))
        self.written.watch(rank, locks, warn)
        packages.when_imported("torch.utils.data._utils.worker", self._renew_in_loader_processes)

    def flush(self) -> None:
        """Flush this process's buffers: before a fork, and in a worker after the function has returned."""
        self.written.flush()

    @packages.defines_replacements
    def _renew_in_loader_processes(self, module: Any) -> None:
        loop = module._worker_loop

        @packages.replacement_of(loop)  # keeps the name, by which a fresh process finds the original
        def renew_and_loop(*args: Any, **kwargs: Any) -> None:
            positions.renew(OpenDescriptors.of_this_process(self.ours).files)
            loop(*args, **kwargs)

        module._worker_loop = renew_and_loop
