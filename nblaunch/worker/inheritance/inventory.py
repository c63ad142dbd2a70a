"""The inventory of inherited state: each kind of thing that a kernel may hold, and what a worker gets of it.

A forked worker starts with a copy of the kernel's memory and descriptors, but not of its threads. A worker of a
forkserver or of spawn starts from a fresh interpreter, which has what the launch sends: the call, and the state that
``start_methods/saved_call.py`` captures. Every row has a contract test of the same name for each start method in
``tests/contracts/inheritance/``; ``docs/how-a-launch-works.md`` shows the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Treatment(Enum):
    """What a worker gets of a kind of state."""

    KEPT = "kept"
    """As in the kernel."""
    RENEWED = "renewed"
    """Made anew for this worker, and works."""
    DROPPED = "dropped"
    """Belongs to the kernel alone; the worker starts without it."""
    REFUSED = "refused"
    """An error, before the function starts or at the first use, says why and what to do."""
    NOTED = "noted"
    """Not there or not usable; one line says so."""


@dataclass(frozen=True)
class Way:
    """How one start method treats a kind of state.

    Args:
        treatment: the outcome in one word.
        text: the outcome in one sentence, without a full stop.
    """

    treatment: Treatment
    text: str


@dataclass(frozen=True)
class Kind:
    """One kind of state that a kernel may hold when it launches.

    Args:
        name: unique; contract tests and documentation refer to it.
        fork: what a forked worker gets.
        fresh: what a worker of a forkserver or of spawn gets.
    """

    name: str
    fork: Way
    fresh: Way


_NOT_PICKLED = "can't be pickled: a `PayloadError` names the variable before any process starts"

KINDS: tuple[Kind, ...] = (
    Kind(
        "files open for reading",
        fork=Way(
            Treatment.RENEWED,
            "a position of its own in each file, from where the kernel stood, also in files that are deleted or open "
            "for writing as well; processes of a `DataLoader` have one each, too; locks stay with the kernel",
        ),
        fresh=Way(Treatment.REFUSED, f"an open file {_NOT_PICKLED}"),
    ),
    Kind(
        "files open for writing",
        fork=Way(
            Treatment.KEPT,
            "all ranks write at the position that they share with the kernel, and nothing is lost or written twice; a "
            "line names a file in which ranks may damage each other's data",
        ),
        fresh=Way(Treatment.REFUSED, f"an open file {_NOT_PICKLED}"),
    ),
    Kind(
        "unfinished archives, compressed files and databases",
        fork=Way(
            Treatment.REFUSED,
            "of gzip, bz2, xz, zip, HDF5, Parquet, Arrow, WAV, PDF and `dbm.dumb` the kernel holds a part in memory: "
            "the first write of a rank raises an error, and the kernel alone completes the file. A line names a "
            "compressor of `zstandard`. Ranks may add to a plain tar archive and to databases of SQLite and LMDB",
        ),
        fresh=Way(
            Treatment.REFUSED,
            "they can't be pickled: a `PayloadError` names the variable before any process starts; the first write to "
            "a database of `dbm.dumb` raises an error",
        ),
    ),
    Kind(
        "folders",
        fork=Way(Treatment.RENEWED, "a listing that has begun goes on in each rank by itself"),
        fresh=Way(Treatment.REFUSED, f"a listing that has begun {_NOT_PICKLED}"),
    ),
    Kind(
        "pipes and sockets",
        fork=Way(
            Treatment.KEPT,
            "shared with the kernel and all ranks: each byte reaches one reader. Clients of HTTP (`requests`, `httpx`, "
            "`urllib3`, `http.client`) connect anew. Other connections to other machines are the first rank's; other "
            "ranks find them closed",
        ),
        fresh=Way(Treatment.REFUSED, f"a connection {_NOT_PICKLED}"),
    ),
    Kind(
        "queues between processes",
        fork=Way(
            Treatment.KEPT,
            "shared with the kernel and all ranks. What ranks have put into a `multiprocessing.Queue` and no "
            "process has read when they end, tensors too, is kept for the kernel. `put()` into a full "
            "`SimpleQueue`, `Pipe` or queue with a size waits, and a note names it after two seconds. Proxies of a "
            "`Manager` work",
        ),
        fresh=Way(
            Treatment.REFUSED,
            f"a queue, lock or value between processes {_NOT_PICKLED}; proxies of a `Manager` work",
        ),
    ),
    Kind(
        "memory maps",
        fork=Way(Treatment.KEPT, "shared with the kernel, as the map was made"),
        fresh=Way(
            Treatment.REFUSED,
            f"a plain map {_NOT_PICKLED}; a `numpy.memmap` arrives as an array with its numbers, and a line names "
            "one that is open for writing",
        ),
    ),
    Kind(
        "programs of subprocess",
        fork=Way(
            Treatment.KEPT,
            "`poll()`, `wait()` and `kill()` act on the kernel's program, which runs on when the worker ends; its "
            "streams are shared with the kernel",
        ),
        fresh=Way(Treatment.REFUSED, f"a `Popen` {_NOT_PICKLED}"),
    ),
    Kind(
        "exit handlers",
        fork=Way(
            Treatment.DROPPED, "`atexit` and `weakref.finalize` calls of the kernel run in the kernel alone"
        ),
        fresh=Way(Treatment.DROPPED, "a fresh interpreter has none of the kernel's"),
    ),
    Kind(
        "signal handlers",
        fork=Way(
            Treatment.KEPT,
            "handlers that cells have set, except for SIGTERM, SIGHUP and SIGQUIT, which have the system's default, "
            "and SIGINT and SIGCHLD, which are the worker's; timers stay with the kernel",
        ),
        fresh=Way(Treatment.DROPPED, "all signals have Python's defaults"),
    ),
    Kind(
        "working folder, umask and resource limits",
        fork=Way(Treatment.KEPT, "the kernel's"),
        fresh=Way(Treatment.KEPT, "the kernel's"),
    ),
    Kind(
        "buffers of C streams",
        fork=Way(
            Treatment.DROPPED,
            "the kernel alone writes what its C code has buffered; a worker writes at its end what the function's C "
            "code has buffered",
        ),
        fresh=Way(
            Treatment.DROPPED,
            "a fresh process has none of the kernel's; it writes at its end what the function's C code has buffered",
        ),
    ),
    Kind(
        "environment variables",
        fork=Way(Treatment.KEPT, "the kernel's, with the worker's rank and sizes added"),
        fresh=Way(Treatment.KEPT, "the kernel's, with the worker's rank and sizes added"),
    ),
    Kind(
        "random generators",
        fork=Way(
            Treatment.KEPT,
            "`random`, NumPy's global generator and torch's on the CPU have the kernel's states, alike on all ranks "
            "and in each attempt; then the kernel's move on, so that the next launch draws other numbers. A generator "
            "that is an object (`numpy.random.default_rng()`, `torch.Generator`) is copied: the next launch replays it",
        ),
        fresh=Way(Treatment.KEPT, "the same"),
    ),
    Kind(
        "import path and modules",
        fork=Way(Treatment.KEPT, "all that the kernel has imported"),
        fresh=Way(
            Treatment.KEPT,
            "`sys.path`, and the user's modules from the files from which the kernel has them, also after `%cd` or a "
            "change of the path. A file that was edited since its import counts as it is now",
        ),
    ),
    Kind(
        "numeric settings of torch",
        fork=Way(Treatment.KEPT, "all"),
        fresh=Way(
            Treatment.KEPT,
            "default dtype and device, precision of matrix products, deterministic algorithms, flags of "
            "`torch.backends`, kernels of attention, anomaly, gradient and inference mode, autocast, function and "
            "dispatch modes, print options, flushing of denormal numbers, settings of the compiler; set when the "
            "worker has imported torch",
        ),
    ),
    Kind(
        "settings of Python, NumPy and other libraries",
        fork=Way(Treatment.KEPT, "all"),
        fresh=Way(
            Treatment.KEPT,
            "limits of `sys`, thresholds of `gc`, locale, decimal context, start method of `multiprocessing`; error "
            "handling and print options of NumPy; options of pandas, Matplotlib, scikit-learn, OpenCV, Pillow. Other "
            "libraries have their defaults: set them inside the function",
        ),
    ),
    Kind(
        "filters of warnings",
        fork=Way(Treatment.KEPT, "all"),
        fresh=Way(Treatment.KEPT, "all; one for a category of a library, once the worker has imported it"),
    ),
    Kind(
        "loggers",
        fork=Way(
            Treatment.KEPT,
            "levels and handlers; a `MemoryHandler` starts empty, and what ranks log to it is written when they end",
        ),
        fresh=Way(
            Treatment.KEPT,
            "levels, and handlers that write to a standard stream or append to a file; a line names other handlers",
        ),
    ),
    Kind(
        "connections to Ray",
        fork=Way(
            Treatment.REFUSED, "no worker is forked from a process that is connected; the others start afresh"
        ),
        fresh=Way(
            Treatment.RENEWED, "`RAY_ADDRESS` names the kernel's cluster, to which the worker connects"
        ),
    ),
    Kind(
        "runs of experiment trackers",
        fork=Way(
            Treatment.KEPT,
            "a run of Weights & Biases takes what all ranks log. Of other trackers begin the run inside the function",
        ),
        fresh=Way(Treatment.KEPT, "the same"),
    ),
    Kind(
        "studies of optuna",
        fork=Way(
            Treatment.NOTED,
            "a study in memory is copied to each worker: a line says that what the function writes to it is lost",
        ),
        fresh=Way(Treatment.NOTED, "the same"),
    ),
    Kind(
        "debuggers",
        fork=Way(
            Treatment.DROPPED,
            "breakpoints of the front end's debugger do not stop in workers, and a line says so; `breakpoint()` in "
            "the function opens pdb in the cell",
        ),
        fresh=Way(Treatment.DROPPED, "the same"),
    ),
    Kind(
        "compiled functions",
        fork=Way(
            Treatment.KEPT,
            "what `torch.compile` has compiled runs as it is where a worker has as many threads as the kernel, and is "
            "compiled again, from inductor's cache, where it has not. Inductor's pools are made anew",
        ),
        fresh=Way(
            Treatment.RENEWED, "compiled again with the same settings, from inductor's cache on the disk"
        ),
    ),
    Kind(
        "thread pools",
        fork=Way(
            Treatment.RENEWED,
            "`ThreadPoolExecutor`, `ThreadPool` and asyncio's executor start threads at the first use in a worker; the "
            "kernel's tasks stay there",
        ),
        fresh=Way(
            Treatment.RENEWED,
            "`ThreadPoolExecutor` is made anew; `ThreadPool` is refused by the error about pickling",
        ),
    ),
    Kind(
        "process pools",
        fork=Way(
            Treatment.RENEWED,
            "`ProcessPoolExecutor`, `multiprocessing.Pool` and joblib's processes start at the first use in a worker",
        ),
        fresh=Way(
            Treatment.RENEWED,
            "`ProcessPoolExecutor` is made anew; `multiprocessing.Pool` is refused by the error about pickling",
        ),
    ),
    Kind(
        "threads",
        fork=Way(
            Treatment.NOTED,
            "none runs in a worker: a note names a `join()` of one, and a wait that no thread of the worker can end is "
            "named within seconds",
        ),
        fresh=Way(Treatment.REFUSED, "a thread can't be pickled, and an error names the variable"),
    ),
    Kind(
        "locks",
        fork=Way(
            Treatment.NOTED,
            "a copy for each worker; a wait for one that a thread of the kernel holds is named within seconds",
        ),
        fresh=Way(Treatment.REFUSED, "a lock can't be pickled, and an error names the variable"),
    ),
    Kind(
        "data loaders",
        fork=Way(
            Treatment.RENEWED,
            "a `DataLoader` starts processes of its own; an iterator that the kernel has begun goes on without "
            "processes, and is refused with them",
        ),
        fresh=Way(
            Treatment.RENEWED,
            "a `DataLoader` starts processes of its own; an iterator with processes is refused by the error about "
            "pickling",
        ),
    ),
    Kind(
        "generators and iterators",
        fork=Way(
            Treatment.NOTED,
            "each rank has a copy, which goes on from where the kernel's stands: a line says that all ranks get the "
            "same values",
        ),
        fresh=Way(
            Treatment.NOTED,
            "the same for iterators that can be pickled; a generator can't be pickled: a `PayloadError` names the "
            "variable",
        ),
    ),
    Kind(
        "listeners of log queues",
        fork=Way(Treatment.RENEWED, "a `QueueListener` starts a thread in each worker at the first record"),
        fresh=Way(Treatment.NOTED, "a line names the handler, which can't be sent"),
    ),
    Kind(
        "event loops",
        fork=Way(Treatment.DROPPED, "`asyncio.run` and `asyncio.get_event_loop` make one for the worker"),
        fresh=Way(Treatment.DROPPED, "a fresh interpreter has none of the kernel's"),
    ),
)
"""Ordered by what users meet first."""
