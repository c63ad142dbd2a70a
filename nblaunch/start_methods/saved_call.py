"""A call on its way to fresh processes, as it was at one moment: function and arguments, and what surrounds them.

Saved and started in one go where a launch waits for its workers. A job that may start workers when its call has
returned saves it at the launch: whatever the kernel does meanwhile, every attempt is of the same state.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nblaunch import env
from nblaunch.errors import PayloadError
from nblaunch.host import descriptors
from nblaunch.spec import name_of
from nblaunch.wire.assignment import FunctionCall, capture_sources, restore_sources
from nblaunch.wire.board import create_memory_file
from nblaunch.wire.pickling import payload, pickle_errors
from nblaunch.worker import output
from nblaunch.worker.inheritance import connected_engines
from nblaunch.worker.inheritance.modules import Place, find_at, places_of_this_process
from nblaunch.worker.inheritance.random_states import RandomStates
from nblaunch.worker.inheritance.settings import KernelSettings


@dataclass(frozen=True)
class SavedCall:
    """A call as it was at one moment, and all that a fresh process needs to run it as this one would have then.

    Args:
        fd: memory file of the call, see ``wire/pickling/payload.py``.
        modules: the user's modules that imports would not find there now, by name.
        settings: of libraries, warnings and loggers.
        random_states: of this process, so that a fresh worker draws the numbers that a forked one would.
        environment: all variables, and those by which workers connect to the kernel's cluster.
        path: where modules are looked for.
        folder: the working folder; None if it had been removed.
        argv: ``sys.argv``, which a function may parse.
        authkey: by which processes of ``multiprocessing`` know each other: a manager of the kernel answers workers.
        sources: file name -> text of the notebook's cells, for tracebacks and the debugger.
        has_shell: this process is an IPython shell, so ``display`` shall work there, too.
    """

    fd: int
    modules: Mapping[str, Place]
    settings: KernelSettings
    random_states: RandomStates
    environment: Mapping[str, str]
    path: Sequence[str]
    folder: str | None
    argv: Sequence[str]
    authkey: bytes
    sources: Mapping[str, str]
    has_shell: bool

    @classmethod
    def around(cls, fd: int) -> SavedCall:
        """Return the call in the memory file ``fd``, with what else this process has at present."""
        return cls(
            fd=fd,
            modules=places_of_this_process(),
            settings=KernelSettings.of_this_process(),
            random_states=RandomStates.of_this_process(),
            environment={**env.snapshot(), **connected_engines.environment()},
            path=tuple(sys.path),
            folder=present_folder(),
            argv=tuple(sys.argv),
            authkey=bytes(multiprocessing.current_process().authkey),
            sources=capture_sources(),
            has_shell="IPython.core.interactiveshell" in sys.modules,
        )

    def restore_surroundings(self) -> None:
        """Give this process the command line, the sources of cells and the shell that the call was saved with."""
        sys.argv[:] = self.argv
        restore_sources(self.sources)
        if self.has_shell:
            output.ensure_shell()

    def load(self) -> tuple[FunctionCall, int]:
        """Return the call, and the address of its memory file; put settings and random states back."""
        find_at(self.modules)
        multiprocessing.current_process().authkey = self.authkey
        loaded = payload.load_mapped_with_address(self.fd)
        self.settings.restore()
        self.random_states.restore()
        return loaded

    def close(self) -> None:
        """Release the memory, as far as no process has it mapped."""
        descriptors.close(self.fd)


def save_call(
    call: FunctionCall,
    remedy: str = "start_method='fork' pickles nothing, where this process can still be forked",
) -> SavedCall:
    """Write the call to a memory file, by cloudpickle.

    Args:
        call: the function and its arguments.
        remedy: what to do where it can't be pickled, beyond creating inside the function what can't.

    Raises:
        PayloadError: some variable of the call can't be pickled; names it and what to do.
    """
    fd = create_memory_file("nblaunch-call")
    descriptors.keep_from_children(fd)
    try:
        try:
            payload.dump(call, fd)
        except Exception as error:
            raise PayloadError(_blame(call, error, remedy)) from error
        return SavedCall.around(fd)
    except BaseException:
        descriptors.close(fd)
        raise


@contextmanager
def saved_or_now(saved: SavedCall | None, call: FunctionCall) -> Iterator[SavedCall]:
    """Give the call as it was saved before, or save it for the block alone; raises as :func:`save_call` does."""
    if saved is not None:
        yield saved
        return
    own = save_call(call)
    try:
        yield own
    finally:
        own.close()


def present_folder() -> str | None:
    """Name the working folder; None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _blame(call: FunctionCall, error: Exception, remedy: str) -> str:
    function, args = call
    parts = pickle_errors.unpicklable_variables(function, args)
    named = "; ".join(f"{name} ({type(why).__name__}: {why})" for name, why in parts) or f"{error}"
    return (
        f"{name_of(function)} can't be sent to fresh processes, because this can't be pickled: {named}. "
        f"Create it inside the function, or pass the data from which it is made in args; {remedy}."
    )
