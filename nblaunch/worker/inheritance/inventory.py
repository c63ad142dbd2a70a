"""The inventory of inherited state: every kind of state that a kernel may hold, and what a worker gets.

A forked worker starts with a copy of the kernel's memory and descriptors, but not of its threads. A worker started with
forkserver or spawn is a fresh interpreter. It gets only what the launch sends: the call, and the state that
``start_methods/saved_call.py`` captures. Every row has a contract test of the same name for each start method in
``tests/contracts/inheritance/``; ``docs/how-a-launch-works.md`` shows the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Treatment(Enum):
    """How much of a given kind of state a worker gets."""

    KEPT = "kept"
    """As in the kernel."""
    RENEWED = "renewed"
    """The worker gets its own working copy."""
    DROPPED = "dropped"
    """The state belongs to the kernel alone; the worker starts without it."""
    REJECTED = "rejected"
    """An error that is raised before the function starts, or on first use, says why and what to do."""
    NOTED = "noted"
    """Missing or unusable; a note says so."""


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
        fresh: what a worker started with forkserver or spawn gets.
    """

    name: str
    fork: Way
    fresh: Way


_NOT_PICKLED = "can't be pickled, and a `PayloadError` names the variable before any process starts"

KINDS: tuple[Kind, ...] = (
    Kind(
        "files open for reading",
        fork=Way(
            Treatment.RENEWED,
            "each worker, and each process of a `DataLoader`, reads from its own position, which starts at the "
            "kernel's. This includes files that have been deleted or are also open for writing. File locks stay with "
            "the kernel",
        ),
        fresh=Way(Treatment.REJECTED, f"an open file {_NOT_PICKLED}"),
    ),
    Kind(
        "files open for writing",
        fork=Way(
            Treatment.KEPT,
            "all ranks share the kernel's position, and nothing is lost or written twice; a note names a file in which "
            "ranks may damage each other's data",
        ),
        fresh=Way(Treatment.REJECTED, f"an open file {_NOT_PICKLED}"),
    ),
    Kind(
        "unfinished archives, compressed files and databases",
        fork=Way(
            Treatment.REJECTED,
            "the kernel holds part of an unfinished gzip, bz2, xz, lz4, zip, HDF5, PyTables, netCDF, Parquet, Arrow, "
            "Excel, WAV, video (OpenCV), PDF or `dbm.dumb` file in memory, so a rank's first write raises an error, "
            "and only the kernel completes the file. For an unfinished `zstandard` file, a note names the compressor "
            "instead. Ranks may add to a plain tar archive and to SQLite and LMDB databases",
        ),
        fresh=Way(
            Treatment.REJECTED,
            "they can't be pickled, and a `PayloadError` names the variable before any process starts; the first "
            "write to a `dbm.dumb` database raises an error",
        ),
    ),
    Kind(
        "folders",
        fork=Way(
            Treatment.RENEWED,
            "a listing (`os.scandir`) that the kernel has started continues on each rank independently",
        ),
        fresh=Way(Treatment.REJECTED, f"an unfinished listing {_NOT_PICKLED}"),
    ),
    Kind(
        "pipes and sockets",
        fork=Way(
            Treatment.KEPT,
            "shared with the kernel and all ranks, so each byte reaches one reader. HTTP clients (`requests`, `httpx`, "
            "`urllib3`, `http.client`) and log handlers reconnect. Other connections to other machines, and to "
            "programs that the kernel has not started, such as databases, belong to the first rank; the other ranks "
            "find them closed, and an error names them. A note appears if all ranks read from one "
            "`multiprocessing.Pipe` to a process of the kernel",
        ),
        fresh=Way(Treatment.REJECTED, f"a connection {_NOT_PICKLED}"),
    ),
    Kind(
        "queues between processes",
        fork=Way(
            Treatment.KEPT,
            "shared with the kernel and all ranks. When the ranks end, the kernel keeps values and tensors that they "
            "have put into a `multiprocessing.Queue` and that no process has read. `put()` into a full "
            "`SimpleQueue`, `Pipe` or bounded queue waits, and a note names it after two seconds. Proxies of a "
            "`Manager` work",
        ),
        fresh=Way(
            Treatment.REJECTED,
            f"a queue, lock or value that processes share {_NOT_PICKLED}; proxies of a `Manager` work",
        ),
    ),
    Kind(
        "memory maps",
        fork=Way(
            Treatment.KEPT,
            "a shared map stays shared with the kernel; a private map becomes a copy in each worker",
        ),
        fresh=Way(
            Treatment.REJECTED,
            f"a plain map {_NOT_PICKLED}; a `numpy.memmap` arrives as an array with the same values, and a note "
            "names a `numpy.memmap` that is open for writing",
        ),
    ),
    Kind(
        "subprocess programs",
        fork=Way(
            Treatment.KEPT,
            "`poll()`, `wait()` and `kill()` act on the kernel's program, which keeps running when the worker ends; "
            "worker and kernel share its streams",
        ),
        fresh=Way(Treatment.REJECTED, f"a `Popen` {_NOT_PICKLED}"),
    ),
    Kind(
        "exit handlers",
        fork=Way(
            Treatment.DROPPED, "the kernel's `atexit` and `weakref.finalize` calls run only in the kernel"
        ),
        fresh=Way(Treatment.DROPPED, "a fresh interpreter does not have the kernel's"),
    ),
    Kind(
        "signal handlers",
        fork=Way(
            Treatment.KEPT,
            "the worker keeps handlers that cells have set, except for SIGTERM, SIGHUP and SIGQUIT (the system's "
            "defaults) and SIGINT and SIGCHLD (the worker's own); timers stay with the kernel",
        ),
        fresh=Way(Treatment.DROPPED, "all signals have Python's defaults"),
    ),
    Kind(
        "working folder, umask and resource limits",
        fork=Way(Treatment.KEPT, "the kernel's"),
        fresh=Way(Treatment.KEPT, "the kernel's"),
    ),
    Kind(
        "C stream buffers",
        fork=Way(
            Treatment.DROPPED,
            "only the kernel writes the output that its own C code has buffered; when a worker ends, it writes the "
            "output that the function's C code has buffered",
        ),
        fresh=Way(
            Treatment.DROPPED,
            "a fresh process starts with empty buffers; it writes the function's buffered output when it ends",
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
            "`random`, NumPy's global generator and torch's CPU generator start from the kernel's states, which are "
            "the same on all ranks and in each attempt; the kernel then advances its own, so the next launch draws "
            "different numbers. Generator objects (`numpy.random.default_rng()`, `torch.Generator`) are copied: the "
            "next launch draws the same numbers again",
        ),
        fresh=Way(
            Treatment.KEPT,
            "the same; all ranks iterate over sets of strings in the same order, which is not the kernel's",
        ),
    ),
    Kind(
        "import path and modules",
        fork=Way(Treatment.KEPT, "every module that the kernel has imported"),
        fresh=Way(
            Treatment.KEPT,
            "`sys.path`, and your modules from the same files as in the kernel, even after `%cd` or a change of the "
            "path. If you have edited a file since its import, the worker loads the new version",
        ),
    ),
    Kind(
        "variables of the notebook",
        fork=Way(
            Treatment.NOTED,
            "each worker has its own copy. The weights of modules come back; other changes do not. A note names "
            "what is lost: containers, arrays and tables that the function has filled, as in `losses.append(loss)`, "
            "attributes that it has set to a result, averages of weights, parameters outside modules, modules "
            "outside `args`, and variables that it has assigned",
        ),
        fresh=Way(
            Treatment.NOTED,
            "the same. Only variables that the function's code names are sent; an error explains why one is missing",
        ),
    ),
    Kind(
        "attributes of modules and classes",
        fork=Way(Treatment.KEPT, "all"),
        fresh=Way(
            Treatment.KEPT,
            "attributes that a cell has assigned, such as `config.lr = 0.1`, `Config.width = 8` or "
            "`torch.nn.functional.gelu = my_gelu`. In your modules, this also covers dictionaries, lists, sets, "
            "settings objects and global variables that calls from cells may have changed, such as `cfg.merge(...)` "
            "or `config.set_lr(0.1)`. A note names assigned values that can't be sent. If a model is a global "
            "variable in one of your modules, each worker creates it again; pass the model as an argument instead",
        ),
    ),
    Kind(
        "registrations",
        fork=Way(Treatment.KEPT, "all"),
        fresh=Way(
            Treatment.KEPT,
            "if a cell registers one of the notebook's functions or classes, each worker repeats this once it "
            "has imported the library. The cell may do so in a call or decorator, such as "
            "`AutoModel.register(MyConfig, MyModel)` or `@area.register` of `functools.singledispatch`, or by setting "
            "an item in a library's dictionary, such as `ACT2FN['mine'] = Mine`. A note names registrations whose "
            "arguments can't be sent. Registrations made inside a function that a cell calls are lost: call that "
            "function inside the launched function as well",
        ),
    ),
    Kind(
        "numeric settings of torch",
        fork=Way(Treatment.KEPT, "all"),
        fresh=Way(
            Treatment.KEPT,
            "default dtype and device, precision of matrix products, deterministic algorithms, flags of "
            "`torch.backends`, attention kernels, anomaly, gradient and inference mode, autocast, function and "
            "dispatch modes, saved-tensor hooks, global hooks of modules and optimizers, multithreaded backward, "
            "print options, flushing of denormal numbers, compiler settings. The worker applies them when it has "
            "imported torch",
        ),
    ),
    Kind(
        "settings of Python, NumPy and other libraries",
        fork=Way(Treatment.KEPT, "all"),
        fresh=Way(
            Treatment.KEPT,
            "`sys` limits, `gc` thresholds, locale, decimal context, `multiprocessing` start method; error "
            "handling and print options of NumPy; options of pandas, Matplotlib, scikit-learn, OpenCV, Pillow, JAX. "
            "Other libraries start with their defaults: change their settings inside the function",
        ),
    ),
    Kind(
        "warning filters",
        fork=Way(Treatment.KEPT, "all"),
        fresh=Way(
            Treatment.KEPT, "all; a filter for a library's category applies once the worker has imported it"
        ),
    ),
    Kind(
        "loggers",
        fork=Way(
            Treatment.KEPT,
            "levels and handlers; a `MemoryHandler` starts empty, and each rank writes its records when it ends",
        ),
        fresh=Way(
            Treatment.KEPT,
            "levels, and handlers that write to a standard stream or append to a file; a note names other handlers",
        ),
    ),
    Kind(
        "Ray connections",
        fork=Way(
            Treatment.REJECTED,
            "a process that is connected to Ray is not forked; workers start from a clean process",
        ),
        fresh=Way(
            Treatment.RENEWED, "`RAY_ADDRESS` names the kernel's cluster, to which the worker connects"
        ),
    ),
    Kind(
        "experiment tracker runs",
        fork=Way(
            Treatment.KEPT,
            "a run of Weights & Biases collects what all ranks log. With other trackers, start the run inside the "
            "function",
        ),
        fresh=Way(Treatment.KEPT, "the same"),
    ),
    Kind(
        "Optuna studies",
        fork=Way(
            Treatment.NOTED,
            "each worker gets a copy of an in-memory study; a note says that the function's changes to it are lost",
        ),
        fresh=Way(Treatment.NOTED, "the same"),
    ),
    Kind(
        "debuggers",
        fork=Way(
            Treatment.DROPPED,
            "breakpoints that you set in the front end do not stop workers, and a note says so; `breakpoint()` in "
            "the function opens pdb in the cell",
        ),
        fresh=Way(Treatment.DROPPED, "the same"),
    ),
    Kind(
        "Python profilers",
        fork=Way(
            Treatment.DROPPED,
            "`%prun` and `cProfile` measure only the kernel; other profilers continue in the workers",
        ),
        fresh=Way(Treatment.DROPPED, "a fresh interpreter has none of the kernel's"),
    ),
    Kind(
        "compiled functions",
        fork=Way(
            Treatment.KEPT,
            "compiled code runs unchanged if the worker has as many threads as the kernel; otherwise it is compiled "
            "again, from inductor's cache. Inductor's pools are created again",
        ),
        fresh=Way(
            Treatment.RENEWED, "compiled again with the same settings, from inductor's cache on the disk"
        ),
    ),
    Kind(
        "thread pools",
        fork=Way(
            Treatment.RENEWED,
            "`ThreadPoolExecutor`, `ThreadPool` and asyncio's executor start new threads on first use in a worker; "
            "the kernel's tasks stay in the kernel",
        ),
        fresh=Way(
            Treatment.RENEWED,
            "the worker gets a new `ThreadPoolExecutor`; a `ThreadPool` can't be pickled, and an error says so",
        ),
    ),
    Kind(
        "process pools",
        fork=Way(
            Treatment.RENEWED,
            "`ProcessPoolExecutor`, `multiprocessing.Pool` and joblib's processes start on first use in a worker",
        ),
        fresh=Way(
            Treatment.RENEWED,
            "the worker gets a new `ProcessPoolExecutor`; a `multiprocessing.Pool` can't be pickled, and an error says "
            "so",
        ),
    ),
    Kind(
        "threads",
        fork=Way(
            Treatment.NOTED,
            "the kernel's threads do not run in a worker. Within seconds, a note names a `join()` of such a thread, or "
            "any wait that no thread of the worker can end",
        ),
        fresh=Way(Treatment.REJECTED, "a thread can't be pickled, and an error names the variable"),
    ),
    Kind(
        "locks",
        fork=Way(
            Treatment.NOTED,
            "each worker gets a copy. The launcher briefly waits for threads that hold a lock; if a worker "
            "waits for a lock that a thread of the kernel still holds, a note says so within seconds",
        ),
        fresh=Way(Treatment.REJECTED, "a lock can't be pickled, and an error names the variable"),
    ),
    Kind(
        "data loaders",
        fork=Way(
            Treatment.RENEWED,
            "a `DataLoader` starts its own processes; an iterator that the kernel has started continues if it has no "
            "processes, and raises an error if it has any",
        ),
        fresh=Way(
            Treatment.RENEWED,
            "a `DataLoader` starts its own processes; an iterator with processes can't be pickled, and an error says "
            "so",
        ),
    ),
    Kind(
        "generators and iterators",
        fork=Way(
            Treatment.NOTED,
            "each rank gets a copy that continues from the kernel's position; a note says that all ranks get the same "
            "values, even if the iterator is an attribute of one of your objects",
        ),
        fresh=Way(
            Treatment.NOTED,
            "the same for iterators that can be pickled; a generator can't be pickled, and a `PayloadError` names the "
            "variable",
        ),
    ),
    Kind(
        "log queue listeners",
        fork=Way(Treatment.RENEWED, "a `QueueListener` starts a thread in each worker on the first record"),
        fresh=Way(Treatment.NOTED, "a note names the handler, which can't be sent"),
    ),
    Kind(
        "event loops",
        fork=Way(Treatment.DROPPED, "`asyncio.run` and `asyncio.get_event_loop` create one for the worker"),
        fresh=Way(Treatment.DROPPED, "a fresh interpreter does not have the kernel's"),
    ),
)
"""All kinds, in the order in which users encounter them."""
