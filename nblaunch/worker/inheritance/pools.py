"""Lets workers use the kernel's data loaders, and its pools from the standard library, loky and joblib.

A fork copies a pool's bookkeeping but not its threads, and the pool's processes serve only the kernel. A pool
starts no new threads if its bookkeeping already lists some, so its first task would wait forever. nblaunch
therefore recreates a pool when a worker first uses it, with the same arguments. It does so in place, because
other objects may refer to the pool. The kernel's tasks stay in the kernel.

A data loader with ``persistent_workers`` keeps its iterator and processes; a rank creates its own. An iterator that a
cell has started to read raises an error, because a rank can't know what the iterator's processes have already sent to
the kernel. Iterators that use no processes continue in each rank from the kernel's position.

nblaunch looks only at modules that the kernel has loaded, and changes only pools that are used. It never walks the
heap. A worker leaves a module's classes as they are if the module's own records show that the kernel has no
pool of that kind, because each change copies pages of the kernel's memory.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from nblaunch import packages

_kept: list[Any] = []
"""Parts of the kernel's pools and loader iterators. They are never freed, because this might write to pipes that the
kernel's processes read, or end those processes.
"""
_watched: set[str] = set()
"""Modules whose pools or loaders are watched in this process."""


def renew_at_use() -> None:
    """Recreate every inherited pool and restart every inherited loader on its first use in this process.

    A process that this one forks inherits them again and must also call this function.
    """
    for name, watch, has_pools in _WATCHES:
        module = sys.modules.get(name)
        if module is not None and name not in _watched and has_pools(module):
            _watched.add(name)
            watch(module)


def _has_made_processes(package: str = "multiprocessing") -> bool:
    """Return whether this process or one of its parents has ever created a process object.

    Args:
        package: ``multiprocessing``, or a package with the same modules.
    """
    counter = getattr(sys.modules.get(f"{package}.process"), "_process_counter", None)
    return repr(counter) != "count(1)"


def _has_thread_executors(module: Any) -> bool:
    """Return whether there may be an executor that has started threads."""
    return bool(getattr(module, "_threads_queues", True))


def _has_process_executors(module: Any) -> bool:
    """Return whether there may be an executor. Each has a queue of tasks, which ``multiprocessing`` lists."""
    queues, util = sys.modules.get("multiprocessing.queues"), sys.modules.get("multiprocessing.util")
    listed = getattr(util, "_afterfork_registry", None)
    if queues is None or listed is None:
        return True
    return any(isinstance(each, queues.Queue) for each in list(listed.values()))


def _has_pools(module: Any) -> bool:
    """Return whether a pool may exist. A ``ThreadPool`` has no processes, but creating one imports another module."""
    package = module.__name__.rpartition(".")[0]
    return _has_made_processes(package) or f"{package}.dummy" in sys.modules


def _has_loaders(module: Any) -> bool:
    """Return whether a data loader with worker processes may exist."""
    return _has_made_processes() and hasattr(module, _LOADERS[module.__name__][1])


def empty_like(kernels: Any) -> Any:
    """Return an empty queue of the same class and size, with locks that no kernel thread holds."""
    return type(kernels)(kernels.maxsize) if isinstance(kernels, queue.Queue) else type(kernels)()


def _watch_thread_executors(module: Any) -> None:
    def renew(pool: Any) -> None:
        if pool._threads:
            _kept.append(dict(vars(pool)))
            pool._work_queue = empty_like(pool._work_queue)
            pool._idle_semaphore = threading.Semaphore(0)
            pool._threads = set()
            pool._shutdown_lock = threading.Lock()

    packages.before_first_use(module.ThreadPoolExecutor, ["submit"], renew, includes_new=True)


def _watch_process_executors(module: Any) -> None:
    cls = module.ProcessPoolExecutor
    make = cls.__init__

    def renew(pool: Any) -> None:
        if pool._shutdown_thread:
            return
        _kept.append(dict(vars(pool)))
        options = (
            {"max_tasks_per_child": pool._max_tasks_per_child}
            if hasattr(pool, "_max_tasks_per_child")
            else {}
        )
        make(pool, pool._max_workers, pool._mp_context, pool._initializer, pool._initargs, **options)

    # Otherwise, shutdown() would wake the thread that manages the kernel's pool.
    packages.before_first_use(cls, ["submit", "shutdown"], renew)
    # At exit, this process would wake all of these threads as well.
    _kept.append(module._threads_wakeups)
    module._threads_wakeups = type(module._threads_wakeups)()


def _watch_loky(module: Any) -> None:
    """Watch loky's executors. joblib includes a copy of loky and reuses one executor for all calls."""
    cls = module.ProcessPoolExecutor
    make = cls.__init__

    def renew(pool: Any) -> None:
        if pool._flags.shutdown:
            return
        _kept.append(dict(vars(pool)))
        initializer, initargs = pool._initializer, pool._initargs
        make(
            pool,
            max_workers=pool._max_workers,
            job_reducers=pool._call_queue._reducers,
            result_reducers=pool._result_queue._reducers,
            timeout=pool._timeout,
            context=pool._context,
            env=pool._env,
        )
        pool._initializer, pool._initargs = initializer, initargs  # already wrapped by loky

    packages.before_first_use(cls, ["submit", "shutdown"], renew)
    reusable = sys.modules.get(module.__name__.replace("process_executor", "reusable_executor"))
    if reusable is not None:
        packages.before_first_use(reusable._ReusablePoolExecutor, ["_resize"], renew, includes_new=True)


def _watch_pools(module: Any) -> None:
    """Watch the pools of ``multiprocessing.pool``, including ``ThreadPool``, or of a package with the same classes."""
    cls = module.Pool
    make = cls.__init__

    def renew(pool: Any) -> None:
        if pool._state == module.RUN:
            _kept.append(dict(vars(pool)))
            make(
                pool,
                pool._processes,
                pool._initializer,
                pool._initargs,
                pool._maxtasksperchild,
                pool._ctx,
            )

    def end(pool: Any) -> None:
        """End a pool that was never used here and has no threads or child processes in this process."""
        _kept.append(dict(vars(pool)))
        pool._pool = []
        pool._change_notifier = queue.SimpleQueue()

    packages.before_first_use(cls, ["_check_running"], renew)
    packages.before_first_use(cls, ["close", "terminate", "join"], end, includes_new=True)


_LOADERS = {
    "torch.utils.data.dataloader": ("DataLoader", "_MultiProcessingDataLoaderIter"),
    "torchdata.stateful_dataloader.stateful_dataloader": (
        "StatefulDataLoader",
        "_StatefulMultiProcessingDataLoaderIter",
    ),
}
"""Module -> names of its loader class and its multi-process iterator class."""


def _watch_loaders(module: Any) -> None:
    """Restart inherited loaders on first use, and reject iterators that use the kernel's processes."""
    loader, iterator = (getattr(module, name) for name in _LOADERS[module.__name__])
    end = iterator._shutdown_workers

    @packages.replaces(iterator, "_shutdown_workers")
    def end_here(self: Any) -> None:
        if not _serves_kernel(self):  # the kernel's processes share an event and would end
            end(self)

    packages.call_before(loader, "__iter__", _forget_iterator)
    packages.call_before(iterator, "_next_data", _reject_read)


def _serves_kernel(iterator: Any) -> bool:
    processes: Any = getattr(iterator, "_workers", None)
    return bool(processes) and processes[0]._parent_pid != os.getpid()


def _forget_iterator(loader: Any) -> None:
    """Make a loader create a new iterator if it still holds the kernel's."""
    iterator = vars(loader).get("_iterator")
    if _serves_kernel(iterator):
        _kept.append(iterator)
        loader._iterator = None


def _reject_read(iterator: Any) -> None:
    if _serves_kernel(iterator) and not iterator._shutdown:
        raise RuntimeError(
            "this DataLoader iterator was created in another process, and its worker processes serve only that "
            "process. Call iter(loader) inside the function to read the loader from its beginning"
        )


_WATCHES: tuple[tuple[str, Callable[[Any], None], Callable[[Any], bool]], ...] = (
    ("concurrent.futures.thread", _watch_thread_executors, _has_thread_executors),
    ("concurrent.futures.process", _watch_process_executors, _has_process_executors),
    ("multiprocessing.pool", _watch_pools, _has_pools),
    ("multiprocess.pool", _watch_pools, _has_pools),
    ("loky.process_executor", _watch_loky, _has_process_executors),
    ("joblib.externals.loky.process_executor", _watch_loky, _has_process_executors),
    *((module, _watch_loaders, _has_loaders) for module in _LOADERS),
)
"""Module, the function that watches its pools or loaders, and the function that returns whether it may have any."""
