"""Files that the kernel has open when it forks workers: each worker reads them at a position of its own.

    kernel ── KernelFiles.of_this_process: writes Python's buffers, notes files and positions
      └── fork ──> worker ── renew: a position of its own in each file that can be read (positions.py)
                              ├── watch: several ranks that write to one file are noticed (written_files.py)
                              └── end:   writes what it has buffered for them

Files that are open for writing alone keep the position that all share, or ranks would overwrite each other. Pipes,
sockets and terminals can't be opened anew, and stay shared.

Processes of a data loader share the positions of their rank, and get positions of their own in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from nblaunch import formatting, packages
from nblaunch.wire.locks import WorkerLocks
from nblaunch.worker.inheritance import positions
from nblaunch.worker.inheritance.positions import Identity, OpenFile
from nblaunch.worker.inheritance.written_files import WrittenFiles

_MAX_NAMED = 3
_SHARED = (
    "all ranks share one position in {names}, which {are} open in the kernel and can't be opened anew: open {them} "
    "inside the function if it reads {them}"
)


@dataclass(frozen=True)
class KernelFiles:
    """What a process has open, for the workers that are forked from it.

    Args:
        own: files of nblaunch.
        files: open files.
        written: the files that are open for writing.
        channels: pipes, sockets and terminals, by descriptor.
        shared: the files that a worker could not open anew.
    """

    own: frozenset[Identity]
    files: Collection[OpenFile]
    written: WrittenFiles
    channels: Mapping[int, Identity]
    shared: list[OpenFile] = field(default_factory=list)

    @classmethod
    def of_this_process(cls, own: Collection[int], ranks: range) -> KernelFiles:
        """Write what this process has buffered, and note what it has open.

        Args:
            own: descriptors of nblaunch, which are left as they are.
            ranks: ranks that will be forked.
        """
        left_out = positions.identities(own)
        files = positions.open_files(left_out)
        channels = positions.written_channels(left_out)
        written = WrittenFiles.of_this_process(files, ranks, channels.keys())
        if written.has_objects:  # which were written: they may stand elsewhere now
            files = positions.open_files(left_out)
        return cls(left_out, files, written, channels)

    def renew(self) -> None:
        """Make the files this worker's. Call it before all else: a worker itself closes some of the kernel's files."""
        self.shared.extend(positions.renew(self.files))
        self.written.drop_c_buffers()

    def watch(self, rank: int, locks: WorkerLocks, warn: Callable[[str], None]) -> None:
        """Notice what damages files; ``warn`` takes sentences for the user."""
        if self.shared and rank == self.written.ranks.start:
            is_one = len(self.shared) == 1
            names = formatting.first([file.name for file in self.shared], _MAX_NAMED)
            warn(_SHARED.format(names=names, are="is" if is_one else "are", them="it" if is_one else "them"))
        self.written.watch(rank, locks, warn)
        packages.when_imported("torch.utils.data._utils.worker", self._renew_in_loader_processes)

    def end(self) -> None:
        """Write what this worker has buffered, after the function."""
        self.written.end()

    def _renew_in_loader_processes(self, module: Any) -> None:
        loop = module._worker_loop

        @functools.wraps(loop)  # also its name, by which a fresh process finds the original
        def renew_and_loop(*args: Any, **kwargs: Any) -> None:
            positions.renew(positions.open_files(self.own))
            loop(*args, **kwargs)

        module._worker_loop = renew_and_loop
