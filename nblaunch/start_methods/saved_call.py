"""A snapshot of a call for fresh processes: its function, its arguments, and the state of this process around them.

A launch that waits for its workers saves the call and starts them immediately. A job that may start workers after the
calling cell has finished saves the call when it is launched, so that every attempt gets this state, whatever the kernel
does later.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nblaunch import env
from nblaunch.errors import PayloadError
from nblaunch.host import descriptors, heap
from nblaunch.spec import name_of
from nblaunch.user_code import is_user_file
from nblaunch.wire.assignment import FunctionCall, capture_sources, restore_sources
from nblaunch.wire.board import create_memory_file
from nblaunch.wire.pickling import payload, pickle_errors
from nblaunch.worker import output
from nblaunch.worker.inheritance import connections, fresh_processes
from nblaunch.worker.inheritance.fresh_processes import Place
from nblaunch.worker.inheritance.random_states import RandomStates
from nblaunch.worker.inheritance.settings import KernelSettings


@dataclass(frozen=True)
class SavedCall:
    """A snapshot of a call, with everything that a fresh process needs to run it as this process would.

    Args:
        fd: memory file that contains the call; see ``wire/pickling/payload.py``.
        modules: user modules, by name, that imports would not find now.
        settings: settings of libraries, warnings and loggers.
        random_states: this process's random states, so that a fresh worker draws the same numbers as a forked one.
        environment: all variables, including those that connect workers to the kernel's cluster.
        path: search path for modules.
        folder: the working folder; None if it was removed.
        argv: ``sys.argv``, which a function may parse.
        authkey: the key that ``multiprocessing`` processes share; workers need it to reach the kernel's managers.
        sources: file name -> text of the notebook's cells, for tracebacks and the debugger.
        has_shell: whether this process is an IPython shell, so that ``display`` must also work in workers.
        names: names of the notebook's variables, most of which the call does not contain.
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
    names: frozenset[str]

    @classmethod
    def around(cls, fd: int) -> SavedCall:
        """Return the call in the memory file ``fd``, with the state of this process that it needs."""
        sources = capture_sources()
        return cls(
            fd=fd,
            modules=fresh_processes.places_of_this_process(),
            settings=KernelSettings.of_this_process([*sources.values(), *_text_of_script()]),
            random_states=RandomStates.of_this_process(),
            environment={**_hash_seed(), **env.snapshot(), **connections.environment_of_ray()},
            path=tuple(sys.path),
            folder=present_folder(),
            argv=tuple(sys.argv),
            authkey=bytes(multiprocessing.current_process().authkey),
            sources=sources,
            has_shell="IPython.core.interactiveshell" in sys.modules,
            names=fresh_processes.names_of_this_process(),
        )

    def restore_surroundings(self) -> None:
        """Give this process the saved call's command line, cell sources and shell."""
        sys.argv[:] = self.argv
        restore_sources(self.sources)
        if self.has_shell:
            output.ensure_shell()

    def load(self) -> tuple[FunctionCall, int]:
        """Return the call, and the address of its memory file; restore settings and random states."""
        fresh_processes.find_at(self.modules)
        multiprocessing.current_process().authkey = self.authkey
        with heap.growing():  # most of the time is spent on imports of the user's modules
            loaded = payload.load_mapped_with_address(self.fd)
        self.settings.restore()
        self.random_states.restore_in_worker()
        fresh_processes.remember(self.names)
        return loaded

    def close(self) -> None:
        """Release the memory, unless a process still maps it."""
        descriptors.close(self.fd)


def save_call(
    call: FunctionCall,
    advice: str = "start_method='fork' needs no pickling, if this process can still be forked",
) -> SavedCall:
    """Write the call to a memory file with cloudpickle.

    Args:
        call: the function and its arguments.
        advice: what to do if a call can't be pickled, besides creating the object inside the function.

    Raises:
        PayloadError: a variable in the call can't be pickled; the message names it and says what to do.
    """
    fd = create_memory_file("nblaunch-call")
    descriptors.keep_from_children(fd)
    try:
        try:
            payload.dump(call, fd)
        except Exception as error:
            raise PayloadError(_blame(call, error, advice)) from error
        return SavedCall.around(fd)
    except BaseException:
        descriptors.close(fd)
        raise


@contextmanager
def saved_or_now(saved: SavedCall | None, call: FunctionCall) -> Iterator[SavedCall]:
    """Yield the call that was saved earlier, or a snapshot for this block; raise errors as :func:`save_call` does."""
    if saved is not None:
        yield saved
        return
    snapshot = save_call(call)
    try:
        yield snapshot
    finally:
        snapshot.close()


def _text_of_script() -> Iterator[str]:
    """Yield the text of the script that this process is running; yield nothing in a notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    if is_user_file(file or "<frozen"):
        with suppress(OSError, SyntaxError, UnicodeDecodeError), tokenize.open(file) as script:
            yield script.read()


def _hash_seed() -> dict[str, str]:
    """Return the variable that gives sets of strings the same order on all ranks, in each attempt and launch.

    Without it, each fresh interpreter would choose its own order, and ranks that number the words in a set would
    disagree.
    """
    return {"PYTHONHASHSEED": str(hash("nblaunch") % (1 << 32))} if sys.flags.hash_randomization else {}


def present_folder() -> str | None:
    """Return the working folder; None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _blame(call: FunctionCall, error: Exception, advice: str) -> str:
    function, args = call
    parts = pickle_errors.unpicklable_variables(function, args)
    named = "; ".join(map(str, parts)) or f"{error}"
    what = "values that it needs" if len(parts) > 1 else "a value that it needs"
    return (
        f"{name_of(function)} can't be sent to fresh processes, because {what} can't be pickled: {named}. "
        f"Create the value inside the function, or pass in args the data from which it is made; {advice}."
    )
